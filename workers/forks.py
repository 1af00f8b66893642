"""What a fork of the main process must release: it owns no worker, no guardian and no fork server."""

from __future__ import annotations

import os
import weakref
from multiprocessing import forkserver
from typing import Any, Protocol


class Abandonable(Protocol):
    """Something that belongs to one process."""

    def abandon(self) -> None:
        """In a fork of that process: release it here, and leave it alone there."""


_owned: weakref.WeakSet[Abandonable] = weakref.WeakSet()


def abandon_in_forks(thing: Abandonable) -> None:
    """Let every fork of this process call `thing.abandon()`, as long as `thing` exists."""
    _owned.add(thing)


def _after_fork() -> None:
    for thing in list(_owned):
        thing.abandon()
    _owned.clear()
    # The fork server is the parent's child. This process cannot wait for it, and an open copy of its pipe would keep it
    # alive after the parent.
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_pid = server._forkserver_alive_fd = server._forkserver_address = None


os.register_at_fork(after_in_child=_after_fork)
