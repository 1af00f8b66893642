"""The ports that this process has claimed. Each claim is made once and released once, and forks do not inherit it.

A claim has two parts. The first is a name in the kernel's abstract namespace of Unix sockets (Linux only). All users
and containers that share the network see the name. Only one socket can have it, and the kernel frees it when the
process ends. The second part is a lock file (see `lock_files`). Systems other than Linux have only this part.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from typing import NamedTuple

import psutil

from penstock.errors import PortLeaseError
from penstock.ports.lock_files import lock, lock_path, ports_with_lock_file, read_owner, unlock
from penstock.workers import cleanup

_HAS_NAMES = sys.platform == "linux"
_CREDENTIALS = struct.Struct("3i")  # struct ucred in unix(7): pid, uid, gid
_BACKLOG = 4  # only processes that ask for the owner connect, and they get no answer

# The claims of this process by port. A POSIX lock does not protect against the process that holds it, so a claim
# applies to all folders and hosts. The garbage collector or a signal handler may call this module at any moment. So
# nothing here waits for a lock, and each change of the dict is atomic.
_claims: dict[int, PortClaim] = {}
_prepared_pid = 0  # the process that will release its claims when it ends


class PortClaim:
    """One port that this process has claimed. The claim does not bind the port itself."""

    def __init__(self, port: int) -> None:
        self.port, self.since = port, time.time()
        self._release_lock = threading.Lock()  # the first call of `release` takes it and keeps it
        self._name_socket: socket.socket | None = None
        self._file: io.FileIO | None = None
        self._path: Path  # of the file

    @property
    def is_active(self) -> bool:
        """False after `release`, and in a fork of the process that made the claim."""
        return not self._release_lock.locked()

    def take(self) -> bool:
        """Take the name, then the lock file. Returns False if another process has one of them."""
        if _HAS_NAMES:
            self._name_socket = _bind_name(self.port)
            if self._name_socket is None:
                return False
        self._path = lock_path(self.port)
        self._file = lock(self._path)
        return self._file is not None

    def release(self) -> None:
        """Release the port. A second call does nothing."""
        if not self._release_lock.acquire(blocking=False):
            return
        try:
            if self._file is not None:
                unlock(self._path, self._file)
        finally:
            if self._name_socket is not None:
                self._name_socket.close()
            _claims.pop(self.port, None)  # last: only now may this process open the lock file again

    def close_in_fork(self) -> None:
        """Close the descriptors in a fork. The parent process keeps the port."""
        self._release_lock.acquire(blocking=False)
        if self._name_socket is not None:
            self._name_socket.close()  # an open copy would reserve the name after the parent has ended
        if self._file is not None:
            self._file.close()


def prepare_process() -> None:
    """Before the first lease: make this process release all claims when it ends, and remove stale lock files."""
    global _prepared_pid  # noqa: PLW0603 - a property of the process
    if _prepared_pid != os.getpid():
        _prepared_pid = os.getpid()
        # multiprocessing's children do not run atexit functions. With a negative priority, this runs after a process
        # has joined its own children.
        util.Finalize(None, release_all, exitpriority=-10)
        cleanup.register(release_all, remove_stale="penstock.ports.claims:remove_stale")
        remove_stale()


def claim(port: int, is_usable: Callable[[int], bool] = lambda port: True) -> PortClaim | None:
    """Claim `port`. Release it again if `is_usable(port)` is False.

    Returns None if the port is not usable, or if this or another process has claimed it. Raises `PortLeaseError` if the
    folder or the lock file is not safe to use.
    """
    new = PortClaim(port)
    if _claims.setdefault(port, new) is not new:
        return None
    is_kept = False
    try:
        is_kept = new.take() and is_usable(port)
    finally:
        if not is_kept:
            new.release()
    return new if is_kept else None


def release_all() -> None:
    """Release all claims of this process. Never waits."""
    for each in list(_claims.values()):
        each.release()


def remove_stale() -> None:
    """Remove the lock files of killed processes. They block no port, but nothing else would ever remove them."""
    with contextlib.suppress(PortLeaseError, OSError):  # the next lease reports a folder that is not safe
        for port in ports_with_lock_file():
            with contextlib.suppress(PortLeaseError, OSError):  # the next lease of this port reports the file
                if (stale := claim(port)) is not None:
                    stale.release()


class PortOwner(NamedTuple):
    """The process that has leased a port."""

    pid: int  #: 0 if this process cannot see it, for example in another container
    uid: int
    since: float | None  #: seconds since the epoch; None if unknown


def owner_of(port: int) -> PortOwner | None:
    """The process that has leased `port`; None if no process has, or if the system does not say."""
    # A claim without a name or a file. While it is in the dict, no other thread opens the lock file. Otherwise closing
    # the file here would drop that thread's lock.
    mine = PortClaim(port)
    if (own := _claims.setdefault(port, mine)) is not mine:
        return PortOwner(os.getpid(), os.geteuid(), own.since)
    try:
        owner = read_owner(lock_path(port))
    finally:
        mine.release()
    pid, since = owner if owner is not None and psutil.pid_exists(owner[0]) else (None, None)
    if (name_owner := _name_owner(port)) is not None:
        return PortOwner(*name_owner, since if pid == name_owner[0] else None)
    return None if pid is None else PortOwner(pid, os.geteuid(), since)


def _name(port: int) -> str:
    return f"\0penstock-port-{port}"


def _bind_name(port: int) -> socket.socket | None:
    """A socket that reserves the name of `port` until it is closed; None if another socket has the name."""
    with contextlib.ExitStack() as stack:
        try:
            name_socket = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            name_socket.bind(_name(port))
            name_socket.listen(_BACKLOG)  # makes the kernel record the owner's pid and uid
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            raise PortLeaseError(
                f"port {port} cannot be reserved: binding the abstract Unix socket @{_name(port)[1:]} failed: {error}. "
                "A sandbox may forbid it, or this process has too many open files"
            ) from error
        stack.pop_all()
        return name_socket


def _name_owner(port: int) -> tuple[int, int] | None:
    """The pid and the uid of the process that has the name of `port`. The pid is 0 if this process cannot see it."""
    if not _HAS_NAMES:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as query:
        query.setblocking(False)
        try:
            query.connect(_name(port))
        except (ConnectionRefusedError, BlockingIOError):  # free, or not listening yet; or the backlog is full
            return None
        pid, uid, _ = _CREDENTIALS.unpack(query.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        return pid, uid


def _close_all_in_fork() -> None:
    for each in list(_claims.values()):
        each.close_in_fork()
    _claims.clear()


os.register_at_fork(after_in_child=_close_all_in_fork)
