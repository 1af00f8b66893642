"""Spinning: check a condition again and again for a short time, and yield the CPU in between."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

#: Longer than a wake-up across cores takes (20 to 50 µs), or a step of a light environment.
SPIN_SECONDS = 200e-6


# Where processes outnumber CPUs, a spinning process may hold the CPU that the awaited process needs. If it yields, two
# processes on one CPU take turns in 1 to 2 µs, faster than a wake-up.
yield_cpu: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


def spin(is_done: Callable[[], bool], seconds: float) -> bool:
    """Wait at most `seconds` until `is_done` returns True; returns whether it has."""
    deadline = time.monotonic() + seconds
    while not is_done():
        if time.monotonic() >= deadline:
            return False
        yield_cpu()
    return True
