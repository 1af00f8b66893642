"""Waiting awake: looking again and again for a short time, and letting others run in between."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

__all__ = ["SPIN_SECONDS", "let_others_run", "spin"]

#: Longer than a wake-up across cores takes (20 to 50 µs), or a step of a light environment.
SPIN_SECONDS = 200e-6


def _return_at_once() -> None:
    pass


# Whoever spins without this keeps the very process from the core that it waits for, where processes outnumber cores.
# With it, main process and worker on one core take turns faster (1 to 2 µs) than a wake-up could make them.
let_others_run: Callable[[], None] = getattr(os, "sched_yield", _return_at_once)


def spin(has_come: Callable[[], bool], seconds: float) -> bool:
    """Wait for `seconds` at most until `has_come`; returns whether it has."""
    until = time.monotonic() + seconds
    while not has_come():
        if time.monotonic() >= until:
            return False
        let_others_run()
    return True
