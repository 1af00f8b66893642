"""Memory ordering: other processes must see data before the word that announces the data.

A writer calls `fence()` between the two stores, and a reader between the two loads. An x86 processor keeps both orders
by itself. Other processors, such as ARM, do not.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable

#: Whether the processor itself keeps the order of stores, and the order of loads.
IS_ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")

_first, _second = threading.Lock(), threading.Lock()


def no_fence() -> None:
    """The processor needs none."""


def fence_of_locks() -> None:
    """The fence without the compiled part. A store before it stays before the release of the first lock; a store after
    it stays after the acquisition of the second."""
    with _first:
        pass
    with _second:
        pass


def _fence() -> Callable[[], None]:
    if IS_ORDERED:
        return no_fence
    try:
        from penstock.buffers._native import fence as compiled
    except ImportError:
        return fence_of_locks
    return compiled


#: No store passes an earlier store, and no load passes an earlier load. A load may still pass an earlier store.
fence = _fence()
