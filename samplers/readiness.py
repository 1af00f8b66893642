"""When the inference server acts, and for whom: for all at once, for those who are ready, or for halves in turn."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from penstock.errors import ConfigError

__all__ = ["Alternating", "FirstReady", "LockStep", "Readiness", "columns_wanted"]


class Readiness(Protocol):
    """Decides whom to serve."""

    def choose(self, asking: Sequence[int], working: Sequence[int]) -> Sequence[int]:
        """Of the ranks `asking` for actions, those to be served now; `working` are in their batch and do not
        ask. Called again whenever someone has asked, until it chooses no one."""

    def may_go(self, working: Sequence[int]) -> bool:
        """Whether those whose actions have been computed may have them, while these are `working`."""


class LockStep:
    """All together: the next step begins when the slowest worker has ended the last one."""

    def may_go(self, working: Sequence[int]) -> bool:
        return True

    def choose(self, asking: Sequence[int], working: Sequence[int]) -> Sequence[int]:
        return () if working else asking


class FirstReady:
    """Whoever asks, as soon as they have `min_columns` columns between them, or nobody else is left to ask.

    All who ask are served together, so nobody is served twice before another who has waited longer.
    """

    def __init__(self, min_columns: int, n_columns: Callable[[int], int]) -> None:
        self._min_columns, self._n_columns = min_columns, n_columns

    def may_go(self, working: Sequence[int]) -> bool:
        return True

    def choose(self, asking: Sequence[int], working: Sequence[int]) -> Sequence[int]:
        enough = sum(map(self._n_columns, asking)) >= self._min_columns
        return asking if enough or not working else ()


class Alternating:
    """Two halves of the workers: one steps its environments while the other's actions are computed.

    With `overlap`, a half goes on as soon as it has its actions. Without, only one half steps at a time: a
    half's actions are computed while the other steps, but kept until that one has come back.
    """

    def __init__(self, halves: Sequence[Sequence[int]], *, overlap: bool) -> None:
        self._halves, self._overlap = [frozenset(half) for half in halves], overlap
        self._turn = 0

    def choose(self, asking: Sequence[int], working: Sequence[int]) -> Sequence[int]:
        for turn in (self._turn, 1 - self._turn):
            half = self._halves[turn]
            ready = [rank for rank in asking if rank in half]
            if ready and not half.intersection(working):
                self._turn = 1 - turn
                return ready
        return ()

    def may_go(self, working: Sequence[int]) -> bool:
        return self._overlap or not working


def columns_wanted(min_ready: Any, batch_B: int) -> int:
    """`min_ready` environments, or at least that fraction of `batch_B`, as a number of columns.

    Raises `ConfigError` if it is neither.
    """
    is_number = isinstance(min_ready, numbers.Real) and not isinstance(min_ready, bool)
    if is_number and isinstance(min_ready, numbers.Integral):
        if 1 <= int(min_ready) <= batch_B:
            return int(min_ready)
    elif is_number and 0 < float(min_ready) <= 1:
        return max(1, math.ceil(float(min_ready) * batch_B - 1e-6))  # 0.1 of 30 is 3, though not to a computer
    raise ConfigError(
        f"min_ready must be a number of environments from 1 to batch_B={batch_B}, a fraction above 0 and up to 1.0, or "
        f"None for all, got {min_ready!r}"
    )
