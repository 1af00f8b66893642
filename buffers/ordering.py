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
    """Without the compiled part: nothing passes both the release of one lock and the acquisition of another."""
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


#: No store and no load passes it.
fence = _fence()
