"""The ports that this process holds, taken once each, given back once each, and not inherited by forks."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path

from penstock.errors import PortLeaseError
from penstock.ports.files import PortFile, lock_folder, ports_noted
from penstock.ports.names import reserve_name
from penstock.workers import cleanup

__all__ = ["Holding", "claimed", "hold", "holding_of", "release_leases", "sweep_lock_files"]

# By port, whatever the folder and the address: a POSIX lock does not keep a process from itself. Nothing here takes
# a lock, since garbage collection and a signal's handler may come here in the midst of anything; each step is one
# operation on a dict, which is atomic.
_held: dict[int, Holding] = {}
_prepared_pid = 0  # of the process that will release its leases when it ends


class Holding:
    """One port, held by this process in the system's name space and in the lock folder. Nothing is bound to it."""

    def __init__(self, port: int) -> None:
        self.port, self.since = port, time.time()
        self._dropping = threading.Lock()  # taken once, never waited for, never released
        self._name: socket.socket | None = None
        self._file: PortFile | None = None

    @property
    def is_held(self) -> bool:
        """False once it has been dropped, and in a fork of the process that took it."""
        return not self._dropping.locked()

    def take(self, folder: Path) -> bool:
        """Take it, system-wide first; False if another process has it."""
        self._name = reserve_name(self.port)
        if self._name is not None:
            self._file = PortFile.lock(folder, self.port)
        return self._file is not None

    def drop(self) -> None:
        """Give it back; again is harmless."""
        if not self._dropping.acquire(blocking=False):
            return
        try:
            if self._file is not None:
                self._file.unlock()
        finally:
            if self._name is not None:
                self._name.close()
            _held.pop(self.port, None)  # last: only now may this process open the file again

    def abandon(self) -> None:
        """In a fork of the owner: let go of the descriptors, without harm to the owner."""
        self._dropping.acquire(blocking=False)
        if self._name is not None:
            self._name.close()  # or the name would outlive its owner
        if self._file is not None:
            self._file.abandon()


def hold(port: int, folder: Path) -> Holding | None:
    """Hold `port`; None if this process or another holds it. Raises `PortLeaseError`: see `PortFile.lock`."""
    _prepare(folder)
    holding = Holding(port)
    if _held.setdefault(port, holding) is not holding:
        return None
    taken = False
    try:
        taken = holding.take(folder)
    finally:
        if not taken:
            holding.drop()
    return holding if taken else None


def holding_of(port: int) -> Holding | None:
    """How this process holds `port`; None if it does not."""
    return _held.get(port)


def release_leases() -> None:
    """Release all leases of this process, as its end does where it is an ordinary one. Never waits."""
    for holding in list(_held.values()):
        holding.drop()


@contextlib.contextmanager
def claimed(port: int) -> Iterator[Holding | None]:
    """For a moment, the sole right within this process to touch the lock file of `port`; None if another has it."""
    holding = Holding(port)
    if _held.setdefault(port, holding) is not holding:
        yield None
        return
    try:
        yield holding
    finally:
        holding.drop()


def sweep_lock_files(folder: Path | None = None) -> None:
    """Remove the lock files of owners that were killed and could not do it themselves.

    They keep nobody from their ports; but nothing is to be left of a run. Raises `PortLeaseError` if the folder
    cannot be trusted.
    """
    folder = folder or lock_folder()
    for port in ports_noted(folder):
        with claimed(port) as holding:
            if holding is not None:
                holding.take(folder)  # and dropping it removes the file


def remove_stale() -> None:
    """`sweep_lock_files`, unless the folder cannot be trusted."""
    with contextlib.suppress(PortLeaseError, OSError):  # whoever takes a lease is told of it
        sweep_lock_files()


def _prepare(folder: Path) -> None:
    """Before the first lease of a process: see to its end, and remove what others have left."""
    global _prepared_pid  # noqa: PLW0603 - a property of the process
    if _prepared_pid != os.getpid():
        _prepared_pid = os.getpid()
        # Not atexit, without which multiprocessing's processes end. Below 0: after their own children have ended.
        util.Finalize(None, release_leases, exitpriority=-10)
        cleanup.register(release_leases, remove_stale="penstock.ports.holdings:remove_stale")
        sweep_lock_files(folder)


def _abandon_all() -> None:
    for holding in list(_held.values()):
        holding.abandon()
    _held.clear()


os.register_at_fork(after_in_child=_abandon_all)
