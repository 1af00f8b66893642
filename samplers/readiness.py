"""When the inference server acts, and for which workers: for all at once, for the ready ones, or for halves in turn."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from penstock.errors import ConfigError


class Readiness(Protocol):
    """Chooses the workers that the inference server acts for. Workers are given by rank."""

    needs_all_idle: bool = False  #: whether it chooses workers only if none is working

    def choose(self, requesting: Sequence[int], working: Sequence[int]) -> Sequence[int]:
        """The workers to act for now, out of the workers that are `requesting` actions. The others that run the command
        are `working`. The server calls this after every request, until the result is empty."""

    def may_reply(self, working: Sequence[int]) -> bool:
        """Whether workers may get their computed actions while these others are `working`."""
        return True


class LockStep(Readiness):
    """All together: the agent acts when the slowest worker has finished its step."""

    needs_all_idle: bool = True

    def choose(self, requesting: Sequence[int], working: Sequence[int]) -> Sequence[int]:
        return () if working else requesting


class FirstReady(Readiness):
    """The workers with a request, as soon as they have `min_columns` columns together, or no other worker is working.

    All workers with a request are served together, so none has to wait while another is served twice.
    """

    def __init__(self, min_columns: int, n_columns: Callable[[int], int]) -> None:
        self._min_columns, self._n_columns = min_columns, n_columns

    def choose(self, requesting: Sequence[int], working: Sequence[int]) -> Sequence[int]:
        is_enough = sum(map(self._n_columns, requesting)) >= self._min_columns
        return requesting if is_enough or not working else ()


class Alternating(Readiness):
    """Two halves of the workers: one steps its environments while the actions of the other are computed.

    With `overlap`, a half continues as soon as its actions are computed. Without it, only one half steps at a time: the
    server holds the computed actions of a half until the other half has finished its step.
    """

    def __init__(self, halves: Sequence[Sequence[int]], *, overlap: bool) -> None:
        self._halves, self._overlap = [frozenset(half) for half in halves], overlap
        self._turn = 0

    def choose(self, requesting: Sequence[int], working: Sequence[int]) -> Sequence[int]:
        for turn in (self._turn, 1 - self._turn):
            half = self._halves[turn]
            ready = [rank for rank in requesting if rank in half]
            if ready and not half.intersection(working):
                self._turn = 1 - turn
                return ready
        return ()

    def may_reply(self, working: Sequence[int]) -> bool:
        return self._overlap or not working


def columns_wanted(min_ready: Any, batch_B: int) -> int:
    """`min_ready` as a number of columns: an integer counts environments, a float is a fraction of `batch_B`.

    Raises `ConfigError` for anything else.
    """
    is_number = isinstance(min_ready, numbers.Real) and not isinstance(min_ready, bool)
    if is_number and isinstance(min_ready, numbers.Integral):
        if 1 <= int(min_ready) <= batch_B:
            return int(min_ready)
    elif is_number and 0 < float(min_ready) <= 1:
        return max(1, math.ceil(float(min_ready) * batch_B - 1e-6))  # 0.1 * 30 is a little more than 3 in floats
    raise ConfigError(
        f"min_ready must be a number of environments from 1 to batch_B={batch_B}, a fraction above 0 and up to 1.0, or "
        f"None for all, got {min_ready!r}"
    )
