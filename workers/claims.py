"""Claims on ports and CPUs. Among the processes of a user, each port and each CPU has at most one owner.

A claim is a `fasteners.InterProcessLock` on a file that holds the owner's pid. It is a POSIX lock: it ends with its
process, and a fork does not inherit it. It protects against other processes only, and this process loses it when it
closes any descriptor of the file. So `held` decides within the process, and a file is opened only for a claim in it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain, islice
from pathlib import Path
from weakref import WeakKeyDictionary

from fasteners import InterProcessLock

from penstock.workers.plan import Affinity, assign_cpus

Owner = tuple[int, float]  # the pid (0 if unknown), and since when (seconds since the epoch)
# The garbage collector may call `release` at any moment. So it waits for no lock, and each change here is atomic.
#: What this process owns, by kind and number.
held: dict[tuple[str, int], Claim] = {}
_swept: set[str] = set()  # the kinds of which this process has removed the files of killed processes
_cpu_users: WeakKeyDictionary[CpuClaims, Collection[int]] = WeakKeyDictionary()
_cpu_lock = threading.RLock()


class Claim:
    """What this process owns until `release` or its end. `claim` makes it."""

    def __init__(self, kind: str, number: int) -> None:
        self.kind, self.number, self.since = kind, number, time.time()
        self._path = lock_folder(kind) / f"{number}.lock"
        self._lock = InterProcessLock(self._path)
        self._release_lock = threading.Lock()  # the first call of `release` takes it and keeps it

    @property
    def is_active(self) -> bool:
        """False after `release`, and in a fork of the process that made the claim."""
        return not self._release_lock.locked()

    def release(self) -> None:
        """End the claim, and remove the lock file. A second call does nothing."""
        if self._release_lock.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError):  # a file that stays is harmless
                    if self._lock.acquired and self._is_in_folder():
                        self._path.unlink()  # while it is locked: see `take`
            finally:
                if self._lock.lockfile is not None:
                    self._lock.lockfile.close()  # ends the lock
                del held[self.kind, self.number]  # last: only now may this process open the file again

    def take(self) -> Owner | None:
        """Lock the file. Returns the owner if another process has locked it."""
        with contextlib.suppress(FileNotFoundError):  # the owner has just removed it
            # The file may be removed after this process has opened it. Then the lock protects nothing.
            if self._lock.acquire(blocking=False) and self._is_in_folder():
                os.truncate(self._lock.lockfile.fileno(), 0)
                os.write(self._lock.lockfile.fileno(), b"%d" % os.getpid())
                return None
            return int(self._path.read_text() or 0), self._path.stat().st_mtime
        return 0, self.since

    def _is_in_folder(self) -> bool:
        return os.path.samestat(self._path.stat(), os.fstat(self._lock.lockfile.fileno()))


def claim(kind: str, number: int) -> Claim | Owner:
    """Claim the "port" or "cpu" of this number. Returns the owner if this or another process has claimed it.

    The first claim of a process removes the files of killed ones. Raises `OSError` or, from fasteners, `RuntimeError`.
    """
    if kind not in _swept:
        _swept.add(kind)
        for old in [int(path.stem) for path in lock_folder(kind).glob("*.lock") if path.stem.isdecimal()]:
            if isinstance(stale := claim(kind, old), Claim):
                stale.release()
    new = Claim(kind, number)
    if (own := held.setdefault((kind, number), new)) is not new:
        return os.getpid(), own.since
    with contextlib.ExitStack() as undo:
        undo.callback(new.release)
        if (owner := new.take()) is None:
            undo.pop_all()
    return owner or new


def lock_folder(kind: str) -> Path:
    """The folder of lock files, whatever TMPDIR is; created if missing. Raises `OSError` if others could use it."""
    folder = Path(os.environ.get(f"PENSTOCK_{kind.upper()}_FOLDER") or f"/tmp/penstock-{kind}s-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder that only this user can open (mode 0700)")
    return folder.absolute()


class CpuClaims:
    """The CPUs to which one sampler or vector environment pins workers. Several of one process may share a CPU."""

    def assign(self, affinity: Affinity, n_workers: int, mask: Sequence[int]) -> list[tuple[int, ...]]:
        """The CPUs of every worker, which it claims; see `assign_cpus`. Without `affinity.cpus`, no other process
        has claimed them, and those that this process does not use come first. If too few are left, none is pinned."""
        with _cpu_lock:
            if affinity.cpus is None and affinity.pin:
                n_users = Counter(chain.from_iterable(_cpu_users.values()))
                free = list(islice(filter(_is_ours, sorted(mask, key=lambda cpu: n_users[cpu])), n_workers))
                mask = sorted(free) if len(free) == min(n_workers, len(mask)) else ()
            cpus = assign_cpus(affinity, n_workers, mask)
            self._hold(set(filter(_is_ours, chain.from_iterable(cpus))))
        return cpus

    def close(self) -> None:
        """Give the CPUs back; harmless when repeated."""
        self._hold(())

    def _hold(self, cpus: Collection[int]) -> None:
        with _cpu_lock:
            _cpu_users[self] = cpus
            for each in list(held.values()):
                if each.kind == "cpu" and each.number not in chain.from_iterable(_cpu_users.values()):
                    each.release()


def _is_ours(cpu: int) -> bool:
    """Claim the CPU if no other process has claimed it. Returns whether this process may use it."""
    try:
        return ("cpu", cpu) in held or isinstance(claim("cpu", cpu), Claim)
    except (OSError, RuntimeError):  # files cannot be locked here: every process may use every CPU
        return True


def _forget_in_fork() -> None:
    global _cpu_lock  # noqa: PLW0603 - another thread of the parent may hold it
    _cpu_lock = threading.RLock()
    for each in list(held.values()):
        each._lock.acquired = False  # the file is the parent's; an open one could later end a lock of this process
        each.release()
    for table in (held, _swept, _cpu_users):
        table.clear()


os.register_at_fork(after_in_child=_forget_in_fork)
