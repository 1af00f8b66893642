"""Memory ordering: other processes must see data before the word that announces the data.

A writer calls `fence()` between the two stores, and a reader between the two loads. An x86 processor keeps both orders
by itself. Other processors, such as ARM, do not.

`full_fence()` also keeps a load behind an earlier store. No processor does this by itself. Two processes that each
store one word and then load the other's need it. Both names are one function: the compiled fence takes less time than
a function of Python that does nothing.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable

#: Whether the processor itself keeps the order of stores, and the order of loads.
IS_ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")

_first, _second = threading.Lock(), threading.Lock()


def fence_of_locks() -> None:
    """The fence without the compiled part. A store before it stays before the release of the first lock; a store after
    it stays after the acquisition of the second."""
    with _first:
        pass
    with _second:
        pass


#: No store or load passes an earlier store or load. Without the compiled part this is certain on x86 only, where taking
#: a lock is a full fence.
full_fence: Callable[[], None]
try:
    from penstock.buffers._native import fence as full_fence
except ImportError:
    full_fence = fence_of_locks
#: Whether `full_fence` is one.
HAS_FULL_FENCE = IS_ORDERED or full_fence is not fence_of_locks
#: Where only stores must not pass earlier stores, and loads not earlier loads.
fence = full_fence
