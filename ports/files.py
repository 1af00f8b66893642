"""The folder of lock files, one per leased port: who may use it, and that a lock is what it seems to be."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fasteners

from penstock.errors import PortLeaseError

__all__ = ["FOLDER_VARIABLE", "FileNote", "PortFile", "lock_folder", "ports_noted", "read_note"]

#: The environment variable that names another folder. Processes that share ports must share it.
FOLDER_VARIABLE = "PENSTOCK_PORT_FOLDER"

_SUFFIX = ".lock"
_TRIES = 8  # a file may be removed by its last owner between our opening and our locking it
# The sticky bit keeps those who clean temporary folders (tmpfiles.d(5), the XDG specification) off a file.
_FILE_MODE = 0o1600 if sys.platform == "linux" else 0o600


def lock_folder() -> Path:
    """The folder of this user's lock files: `$PENSTOCK_PORT_FOLDER`, or `/tmp/penstock-ports-UID`.

    Neither XDG_RUNTIME_DIR nor TMPDIR has a say: a user's processes must find the same folder from a terminal,
    from cron and from a job scheduler, which set them differently.
    """
    given = os.environ.get(FOLDER_VARIABLE)
    return Path(given).absolute() if given else Path(f"/tmp/penstock-ports-{os.geteuid()}")


@contextlib.contextmanager
def _opened(folder: Path, *, make: bool = False) -> Iterator[int]:
    """A descriptor of `folder`, which is made on request if it is missing.

    Raises `FileNotFoundError` if there is none, `PortLeaseError` if it is not this user's alone.
    """
    try:
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not make:
            raise
        raise _unsafe(
            folder, "is a symbolic link" if os.path.islink(folder) else f"cannot be used: {error.strerror}"
        ) from error
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise _unsafe(folder, f"belongs to user {status.st_uid}, and this process is user {os.geteuid()}'s")
        if status.st_mode & 0o077:
            raise _unsafe(folder, f"is open to other users (mode {stat.S_IMODE(status.st_mode):04o}, must be 0700)")
        yield descriptor
    finally:
        os.close(descriptor)


def _unsafe(folder: Path, why: str) -> PortLeaseError:
    return PortLeaseError(
        f"the folder of port locks {folder} {why}: remove it, or name another one, for all processes that share ports, "
        f"in the environment variable {FOLDER_VARIABLE}"
    )


def _suspect(path: Path, why: str) -> PortLeaseError:
    return PortLeaseError(
        f"the lock file {path} {why}, so a lock on it would exclude nobody: remove it, and see who made it"
    )


class PortFile:
    """The lock file of one port, locked by this process.

    The lock is POSIX's, which the kernel drops when its process ends, which a fork does not inherit, and which is lost
    when the process closes *any* descriptor of the file. So whoever calls `lock` or `read_note` must see to it
    that nothing else in this process does so for the same port.
    """

    def __init__(self, path: Path, lock: fasteners.InterProcessLock) -> None:
        self._path, self._lock = path, lock

    @classmethod
    def lock(cls, folder: Path, port: int) -> PortFile | None:
        """Lock `port`'s file, which is made if it is missing; None if another process has locked it.

        Raises `PortLeaseError` if the folder or the file cannot be trusted.
        """
        path = folder / f"{port}{_SUFFIX}"
        for _ in range(_TRIES):
            lock = fasteners.InterProcessLock(path)
            with _opened(folder, make=True) as at:
                # fasteners would follow a symbolic link; it takes a file that has been opened for it.
                lock.lockfile = os.fdopen(_open(path, at, os.O_CREAT), "r+b", buffering=0)
                try:
                    if not _acquire(lock, path):
                        lock.lockfile.close()
                        return None
                    if _is_in_place(path.name, at, lock.lockfile.fileno()):
                        _sign(lock.lockfile.fileno())
                        return cls(path, lock)
                    lock.release()
                except BaseException:
                    lock.lockfile.close()
                    raise
        raise _suspect(path, f"was removed or replaced {_TRIES} times while it was being locked")

    def unlock(self) -> None:
        """Remove the file, then unlock it: who has opened it meanwhile will see that it is no longer in place."""
        try:
            with _opened(self._path.parent) as at:
                if _is_in_place(self._path.name, at, self._lock.lockfile.fileno()):
                    os.unlink(self._path.name, dir_fd=at)
        except (OSError, PortLeaseError):
            pass  # the folder has been removed or taken over: there is nothing of ours in it
        finally:
            self._lock.release()

    def abandon(self) -> None:
        """In a fork of the owner, which has the descriptor but not the lock: close it, and change nothing."""
        if self._lock.lockfile is not None:
            self._lock.lockfile.close()


def _open(path: Path, at: int, flags: int) -> int:
    flags |= os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path.name, flags, 0o600, dir_fd=at)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise _suspect(path, "is a symbolic link") from error
        if error.errno == errno.ENOENT and not flags & os.O_CREAT:
            raise
        raise PortLeaseError(f"the lock file {path} cannot be opened: {error.strerror}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise _suspect(path, "is not a regular file of this user's with one name")
    return descriptor


def _acquire(lock: fasteners.InterProcessLock, path: Path) -> bool:
    try:
        return bool(lock.acquire(blocking=False))
    except threading.ThreadError as error:  # fasteners' word for a file system without locks
        raise PortLeaseError(
            f"the lock file {path} cannot be locked: {error}. Name a folder on a local disk in {FOLDER_VARIABLE}"
        ) from error


def _sign(descriptor: int) -> None:
    try:
        os.ftruncate(descriptor, 0)  # a dead owner's note
        os.pwrite(descriptor, f"{os.getpid()} {time.time():.3f}\n".encode(), 0)
        os.fchmod(descriptor, _FILE_MODE)
    except OSError as error:
        raise PortLeaseError(
            f"a lock file cannot be written: {error}. Is the disk full, or a limit reached?"
        ) from error


def _is_in_place(name: str, at: int, descriptor: int) -> bool:
    """Whether the open file is the one that others find under its name: locking another excludes nobody."""
    try:
        found = os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))


@dataclass(frozen=True)
class FileNote:
    """What a lock file says of its owner."""

    pid: int
    since: float  #: seconds since the epoch


def ports_noted(folder: Path) -> list[int]:
    """The ports that have a lock file, locked or left behind; none if there is no such folder."""
    try:
        with _opened(folder) as at:
            names = [name.removesuffix(_SUFFIX) for name in os.listdir(at) if name.endswith(_SUFFIX)]
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if name.isdecimal())


def read_note(folder: Path, port: int) -> FileNote | None:
    """What the lock file of `port` says, which this process must not have locked; None if there is none."""
    try:
        with _opened(folder) as at:
            descriptor = _open(folder / f"{port}{_SUFFIX}", at, 0)
            try:
                words = os.read(descriptor, 100).split()
            finally:
                os.close(descriptor)
    except FileNotFoundError:
        return None
    return FileNote(int(words[0]), float(words[1])) if len(words) == 2 else None  # empty while it is being locked
