"""A file descriptor that survives the trip into a child process under every start method."""

from __future__ import annotations

import os
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

__all__ = ["InheritedFd"]


class InheritedFd:
    """Owns one descriptor. Under fork the child simply has it; while a process is being started by
    spawn or forkserver, pickling hands the child a duplicate. Pickling at any other time fails."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def fileno(self) -> int:
        return self.fd

    def close(self) -> None:
        """Close the descriptor; again is harmless."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:  # DupFd would quietly start a server thread instead
            raise TypeError("a descriptor can be pickled only to a process that is being started")
        return _rebuild, (reduction.DupFd(self.fd),)


def _rebuild(duplicate: Any) -> InheritedFd:
    return InheritedFd(duplicate.detach())
