"""The lock files of ports, one file per port, in a folder that only this user can open.

The locks are POSIX locks. The kernel drops them when their process ends, and a fork does not inherit them. But a
process also loses its lock when it closes *any* descriptor of the file. So the caller must make sure that this
process opens the file of a port only once at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import PortLeaseError

#: The environment variable that names another folder. Processes that share ports must use the same folder.
FOLDER_VARIABLE = "PENSTOCK_PORT_FOLDER"

_SUFFIX = ".lock"
_TRIES = 8  # how often to lock: the last owner may remove the file between opening and locking it here
# The sticky bit tells programs that clean temporary folders to keep a file (tmpfiles.d(5), the XDG specification).
_FILE_MODE = 0o1600 if sys.platform == "linux" else 0o600


def lock_folder() -> Path:
    """The folder of this user's lock files: `$PENSTOCK_PORT_FOLDER`, or `/tmp/penstock-ports-UID`.

    XDG_RUNTIME_DIR and TMPDIR are ignored: terminals, cron and job schedulers set them differently, but all processes
    of a user must find the same folder.
    """
    given = os.environ.get(FOLDER_VARIABLE)
    return Path(given).absolute() if given else Path(f"/tmp/penstock-ports-{os.geteuid()}")


def lock_path(port: int) -> Path:
    """The lock file of `port`."""
    return lock_folder() / f"{port}{_SUFFIX}"


def ports_with_lock_file() -> list[int]:
    """The ports that have a lock file, locked or not, sorted. Empty if there is no folder."""
    try:
        with _open_folder(lock_folder()) as folder:
            names = [name.removesuffix(_SUFFIX) for name in os.listdir(folder) if name.endswith(_SUFFIX)]
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if name.isdecimal())


def lock(path: Path) -> io.FileIO | None:
    """Lock the file `path`, and create it if it is missing. Returns None if another process has locked it.

    Raises `PortLeaseError` if the folder or the file is not safe to use.
    """
    for _ in range(_TRIES):
        with _open_folder(path.parent, create=True) as folder, contextlib.ExitStack() as stack:
            file = stack.enter_context(_open_file(path, folder, os.O_CREAT))
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # POSIX allows both
                return None
            except OSError as error:
                raise PortLeaseError(
                    f"the lock file {path} cannot be locked: {error}. Set {FOLDER_VARIABLE} to a folder on a local disk"
                ) from error
            if _is_in_folder(path.name, folder, file):
                _write_owner(path, file)
                stack.pop_all()
                return file
    raise _bad_file(path, f"was removed or replaced {_TRIES} times while it was being locked")


def unlock(path: Path, file: io.FileIO) -> None:
    """Remove the file, then unlock it: a process that has opened it meanwhile will notice that it was removed."""
    try:
        with _open_folder(path.parent) as folder:
            if _is_in_folder(path.name, folder, file):
                os.unlink(path.name, dir_fd=folder)
    except (OSError, PortLeaseError):
        pass  # the folder was removed or replaced, and this file with it
    finally:
        file.close()


def read_owner(path: Path) -> tuple[int, float] | None:
    """The owner's pid and the start of its lease, in seconds since the epoch; None if they are not in the file."""
    try:
        with _open_folder(path.parent) as folder, _open_file(path, folder) as file:
            pid, since = file.read(100).split()
            return int(pid), float(since)
    except (FileNotFoundError, ValueError):  # a file is empty until its owner has locked it
        return None


def _write_owner(path: Path, file: io.FileIO) -> None:
    try:
        file.truncate(0)  # removes the entry of a killed owner
        file.write(f"{os.getpid()} {time.time():.3f}\n".encode())
        os.fchmod(file.fileno(), _FILE_MODE)
    except OSError as error:
        raise PortLeaseError(f"the lock file {path} cannot be written: {error}. Is the disk full?") from error


@contextlib.contextmanager
def _open_folder(path: Path, *, create: bool = False) -> Iterator[int]:
    """A descriptor of the folder. Raises `PortLeaseError` if another user could change what is in it.

    If the folder is missing and `create` is False, it raises `FileNotFoundError`.
    """
    try:
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not create:
            raise
        problem = "is a symbolic link" if os.path.islink(path) else f"cannot be used: {error.strerror}"
        raise _bad_folder(path, problem) from error
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise _bad_folder(path, f"belongs to user {status.st_uid}, but this process runs as user {os.geteuid()}")
        if status.st_mode & 0o077:
            raise _bad_folder(path, f"is open to other users (mode {stat.S_IMODE(status.st_mode):04o}, must be 0700)")
        yield descriptor
    finally:
        os.close(descriptor)


def _open_file(path: Path, folder: int, flags: int = 0) -> io.FileIO:
    flags |= os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path.name, flags, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise _bad_file(path, "is a symbolic link") from error
        if isinstance(error, FileNotFoundError) and not flags & os.O_CREAT:
            raise
        raise PortLeaseError(f"the lock file {path} cannot be opened: {error.strerror}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise _bad_file(path, "is not a regular file of this user with one hard link")
    return os.fdopen(descriptor, "r+b", buffering=0)


def _is_in_folder(name: str, folder: int, file: io.FileIO) -> bool:
    """Whether `file` is the file that other processes find under `name`."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(file.fileno()))


def _bad_folder(path: Path, problem: str) -> PortLeaseError:
    return PortLeaseError(
        f"the folder of lock files {path} {problem}: remove it, or name another folder in the environment variable "
        f"{FOLDER_VARIABLE}, the same for all processes that share ports"
    )


def _bad_file(path: Path, problem: str) -> PortLeaseError:
    return PortLeaseError(
        f"the lock file {path} {problem}, so a lock on it would not protect the port: find out which program did this, "
        "and remove the file"
    )
