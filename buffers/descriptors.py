"""A file descriptor that can be sent to a child process under every start method."""

from __future__ import annotations

import os
import tempfile
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any


class InheritedFd:
    """Owns one descriptor. A forked child inherits it.

    While spawn or forkserver starts a child, pickling sends it a duplicate. At any other time pickling fails.
    """

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def fileno(self) -> int:
        return self.fd

    def close(self) -> None:
        """Close the descriptor; harmless when repeated."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:  # outside a start, DupFd would start a server thread
            raise TypeError("a descriptor can be pickled only to a process that is being started")
        return _receive, (reduction.DupFd(self.fd),)


def anonymous_file(name: str) -> InheritedFd:
    """An empty file without a path, in memory if the system can. `name` is for tools such as lsof."""
    if hasattr(os, "memfd_create"):
        return InheritedFd(os.memfd_create(name, os.MFD_CLOEXEC))
    with tempfile.TemporaryFile() as file:
        return InheritedFd(os.dup(file.fileno()))


def _receive(duplicate: Any) -> InheritedFd:
    return InheritedFd(duplicate.detach())
