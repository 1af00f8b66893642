"""A file descriptor that can be sent to a child process under every start method."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Sequence
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

_MOST_FDS = 100  # in one message; the system allows 253
_SEND_SECONDS = 5.0


class InheritedFd:
    """Owns one descriptor. A forked child inherits it.

    While spawn or forkserver starts a child, pickling sends it a duplicate. At any other time pickling fails.
    """

    __slots__ = ("fd",)

    _close = staticmethod(os.close)  # at the end of the interpreter, `os` may have been cleared before `__del__` runs

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def fileno(self) -> int:
        return self.fd

    def close(self) -> None:
        """Close the descriptor; harmless when repeated."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._close(fd)

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:  # outside a start, DupFd would start a server thread
            raise TypeError("a descriptor can be pickled only to a process that is being started")
        return _receive, (reduction.DupFd(self.fd),)


class InheritedFds:
    """Sends many descriptors to one child process. Their owners close them.

    A process can be started with at most about 250 descriptors. This passes one of them, a socket. The child receives
    the others through it.
    """

    def __init__(self, fds: Sequence[int]) -> None:
        self.fds = list(fds)
        self._in_transit: InheritedFd | None = None  # stays open until the child has its duplicate

    def __reduce__(self) -> tuple[Any, ...]:
        self.close()
        receiver, sender = socket.socketpair()
        self._in_transit = InheritedFd(receiver.detach())
        with sender:
            sender.settimeout(_SEND_SECONDS)
            for first in range(0, len(self.fds), _MOST_FDS):
                socket.send_fds(sender, [b"."], self.fds[first : first + _MOST_FDS])
        return _receive_all, (self._in_transit, len(self.fds))

    def close(self) -> None:
        """Close the socket, once the child has been started."""
        if self._in_transit is not None:
            self._in_transit.close()


def _receive_all(inherited: InheritedFd, n: int) -> InheritedFds:
    fds: list[int] = []
    with socket.socket(fileno=os.dup(inherited.fd)) as receiver:
        while len(fds) < n:
            message, received, _, _ = socket.recv_fds(receiver, 1, _MOST_FDS, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
            if not message:
                raise OSError(f"received {len(fds)} of {n} descriptors: this process may have too many open files")
            fds += received
    inherited.close()
    return InheritedFds(fds)


def anonymous_file(name: str) -> InheritedFd:
    """An empty file without a path, in memory where the system allows it. `name` is for tools such as lsof."""
    try:
        return InheritedFd(os.memfd_create(name, os.MFD_CLOEXEC))
    except (AttributeError, OSError):
        pass
    with tempfile.TemporaryFile(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as file:
        return InheritedFd(os.dup(file.fileno()))


def _receive(duplicate: Any) -> InheritedFd:
    return InheritedFd(duplicate.detach())
