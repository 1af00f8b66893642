"""Objects that belong to the process that has made them. A fork inherits their connections, and must not use them: a
reply that it takes is missing in its parent."""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakSet

#: The name of a thread that holds nothing which a fork needs, so that a fork beside it is safe.
HARMLESS_THREAD = "penstock game logs"

_owned: WeakSet[Any] = WeakSet()
_own_pid = os.getpid()


def leave_in_forks(owned: Any) -> None:
    """Call `owned.leave_to_parent(pid)` in each fork of this process, where `pid` is this process. It must wait for no
    lock, since a thread that does not exist there may hold it, and must send nothing."""
    _owned.add(owned)


def _leave() -> None:
    global _own_pid
    parent, _own_pid = _own_pid, os.getpid()
    left = list(_owned)
    _owned.clear()
    for each in left:
        each.leave_to_parent(parent)


os.register_at_fork(after_in_child=_leave)
