"""File descriptors that are sent to a child process, beside the pickled objects that own them."""

from __future__ import annotations

import errno
import os
import pickle
import socket
import threading
from collections.abc import Sequence
from typing import Any

from penstock import system

_MOST_FDS = 100  # in one message; the system allows 253


class _Pickling(threading.local):
    fds: list[int] | None = None  # while `dumps` or `loads` runs: the descriptors that are sent


_pickling = _Pickling()


class _ClosedFd:
    """A descriptor that was closed. It has no `__del__`, in which Python would drop the exception of a Ctrl-C."""

    fd = -1

    def fileno(self) -> int:
        return self.fd

    def close(self) -> None:
        """Nothing is left to close."""


class InheritedFd(_ClosedFd):
    """Owns one descriptor. A forked child inherits it.

    `dumps` pickles it as a place in its list of descriptors. At any other time pickling fails.
    """

    # At the end of the interpreter, the names of this module may have been cleared before `__del__` runs.
    _close, _closed = staticmethod(os.close), _ClosedFd

    def __init__(self, fd: int) -> None:
        self.fd = fd  # an exception of a signal handler may come before: then it is -1

    def close(self) -> None:
        """Close the descriptor; harmless when repeated."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._close(fd)
        self.__class__ = self._closed  # type: ignore[assignment]

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if _pickling.fds is None:
            raise TypeError("a descriptor can be pickled only to a process that is being started")
        _pickling.fds.append(self.fd)
        return _received, (len(_pickling.fds) - 1,)


def _received(place: int) -> InheritedFd:
    assert _pickling.fds is not None
    return InheritedFd(_pickling.fds[place])


def dumps(value: object) -> tuple[bytes, list[int]]:
    """Pickle `value` for a process that is being started. Returns its descriptors too, which their owners close."""
    _pickling.fds = fds = list[int]()
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL), fds
    finally:
        _pickling.fds = None


def loads(data: bytes, fds: Sequence[int]) -> Any:
    """Unpickle what `dumps` has pickled. `fds` are its descriptors as they have arrived; the value owns them now."""
    _pickling.fds = list(fds)
    try:
        return pickle.loads(data)
    finally:
        _pickling.fds = None


def send(connection: socket.socket, fds: Sequence[int]) -> None:
    """Send any number of descriptors through a new socket. Never blocks: they fit into its buffer."""
    connection.setblocking(False)
    for first in range(0, len(fds), _MOST_FDS):
        socket.send_fds(connection, [b"."], fds[first : first + _MOST_FDS])


def receive(connection: socket.socket, n: int) -> list[int]:
    """Receive the `n` descriptors of one `send`."""
    fds: list[int] = []
    while len(fds) < n:
        message, received = system.receive_fds(connection, 1, _MOST_FDS)
        if not message or len(received) < min(n - len(fds), _MOST_FDS):
            for fd in (fds := fds + received):
                os.close(fd)
            raise OSError(
                errno.EMFILE, f"received {len(fds)} of {n} descriptors: this process may have too many open files"
            )
        fds += received
    return fds


def anonymous_file(name: str) -> InheritedFd:
    """An empty file without a path, in memory where the system allows it. `name` is for tools such as lsof."""
    return InheritedFd(system.anonymous_file(name))
