"""Claims on what a machine has only once, such as a port or a CPU. Each has at most one owner.

A claim has two parts, and the kernel ends both when their process ends. Forks inherit neither of them.

1. A `fasteners.InterProcessLock` on an empty file in a folder of this user.
2. On Linux, a name in the abstract namespace of Unix sockets. All users and containers that share the network see the
   name, even if they cannot use the folder. Other systems have only the lock.

The lock is a POSIX lock. It protects against other processes only, and this process loses it when it closes any
descriptor of the file. So `_claims` decides within the process, and a file is opened only for a claim in it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from fasteners import InterProcessLock

_HAS_NAMES = sys.platform == "linux"
_CREDENTIALS = struct.Struct("3i")  # struct ucred in unix(7): pid, uid, gid
_BACKLOG = 4  # only processes that ask for the owner connect, and they get no answer

# The claims of this process by name. The garbage collector or a signal handler may call this module at any moment. So
# nothing here waits for a lock, and each change of the dict is atomic.
_claims: dict[str, Claim] = {}
_swept: set[str] = set()  # the kinds whose stale files this process has removed


class Claim:
    """What this process owns until `release` or its end. `claim` makes it."""

    def __init__(self, kind: str, label: str) -> None:
        self.label, self.since = label, time.time()
        self._name = f"penstock-{kind}-{label}"
        self._release_lock = threading.Lock()  # the first call of `release` takes it and keeps it
        self._path = str(lock_folder(kind) / f"{label}.lock")
        self._lock = InterProcessLock(self._path)
        self._socket: socket.socket | None = None

    @property
    def is_active(self) -> bool:
        """False after `release`, and in a fork of the process that made the claim."""
        return not self._release_lock.locked()

    def release(self) -> None:
        """End the claim, and remove the lock file. A second call does nothing."""
        if not self._release_lock.acquire(blocking=False):
            return
        try:
            if self._lock.acquired:
                with contextlib.suppress(OSError):  # an empty file that stays is harmless
                    if self._is_in_folder():
                        os.unlink(self._path)  # while it is locked: see `_take`
                self._lock.release()
        finally:
            self._close()
            _claims.pop(self._name, None)  # last: only now may this process open the file again

    def _take(self) -> bool:
        """Take both parts. Returns False if another process has one of them."""
        try:
            _check_folder(Path(self._path).parent)
            # The last owner may remove the file after this process has opened it. Then the lock protects nothing.
            if not self._lock.acquire(blocking=False) or not self._is_in_folder():
                return False
            os.utime(self._path)  # `owner_of` reads from it how old the claim is
        except (OSError, RuntimeError) as error:  # fasteners raises RuntimeError if the file system has no locks
            if not _HAS_NAMES:
                raise OSError(f"the lock file {self._path} cannot be used: {error}") from error
        return not _HAS_NAMES or self._take_name()

    def _is_in_folder(self) -> bool:
        """Whether the locked file is the one that other processes find."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._lock.lockfile.fileno()))
        except FileNotFoundError:
            return False

    def _take_name(self) -> bool:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(f"\0{self._name}")
            self._socket.listen(_BACKLOG)  # makes the kernel record the owner's pid and uid
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise OSError(f"the abstract Unix socket @{self._name} cannot be bound: {error}") from error
        return True

    def _close(self) -> None:
        if self._lock.lockfile is not None:
            self._lock.lockfile.close()
        if self._socket is not None:
            self._socket.close()


def claim(kind: str, label: str) -> Claim | None:
    """Claim `label` among the things of this kind. Returns None if this or another process has claimed it.

    Raises `OSError` if this system offers neither part of a claim.
    """
    if kind not in _swept:
        _swept.add(kind)
        remove_stale(kind)
    new = Claim(kind, label)
    if _claims.setdefault(new._name, new) is not new:
        return None
    is_taken = False
    try:
        is_taken = new._take()
    finally:
        if not is_taken:
            new.release()
    return new if is_taken else None


def lock_folder(kind: str) -> Path:
    """The folder of lock files, such as `/tmp/penstock-ports-UID`, or the one that PENSTOCK_PORT_FOLDER names.

    XDG_RUNTIME_DIR and TMPDIR are ignored: terminals, cron and job schedulers set them differently, but all processes
    of a user must find the same folder.
    """
    given = os.environ.get(f"PENSTOCK_{kind.upper()}_FOLDER")
    return Path(given).absolute() if given else Path(f"/tmp/penstock-{kind}s-{os.geteuid()}")


def _check_folder(folder: Path) -> None:
    """Create the folder if it is missing. Raises `OSError` if another user could change what is in it."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder that only this user can open (mode 0700)")


def remove_stale(kind: str) -> None:
    """Remove the lock files of killed processes. They are empty and block nothing, but would stay until the next claim
    of the same label."""
    with contextlib.suppress(OSError):  # without a folder that can be used there is nothing to remove
        _check_folder(lock_folder(kind))
        for path in lock_folder(kind).glob("*.lock"):
            if (stale := claim(kind, path.stem)) is not None:
                stale.release()


class Owner(NamedTuple):
    """The process that has claimed something."""

    pid: int  #: 0 if this process cannot see it, for example in another container
    uid: int
    since: float | None  #: seconds since the epoch; None if unknown


def owner_of(kind: str, label: str) -> Owner | None:
    """The process that has claimed `label`; None if no process has. Raises as `claim` does."""
    if (free := claim(kind, label)) is not None:
        free.release()
        return None
    asked = Claim(kind, label)
    if (own := _claims.get(asked._name)) is not None:
        return Owner(os.getpid(), os.geteuid(), own.since)
    pid, uid, since = 0, os.geteuid(), None
    if _HAS_NAMES:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as query:
            query.setblocking(False)
            # It may be released meanwhile, not listen yet, or be in another network. Or the backlog is full.
            with contextlib.suppress(ConnectionRefusedError, BlockingIOError):
                query.connect(f"\0{asked._name}")
                credentials = query.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid == os.geteuid():
        with contextlib.suppress(OSError):  # the lock files of another container cannot be seen
            since = os.stat(asked._path).st_mtime
    return Owner(pid, uid, since)


def _close_all_in_fork() -> None:
    for each in list(_claims.values()):
        each._release_lock.acquire(blocking=False)
        each._close()  # an open copy of the socket would keep the name after its owner has ended
    _claims.clear()
    _swept.clear()


os.register_at_fork(after_in_child=_close_all_in_fork)
