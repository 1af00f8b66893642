"""When the inference server acts, and for which workers: for all at once, for the ready ones, or for halves in turn."""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.arguments import must_be, seconds
from penstock.samplers.sampler_plan import SamplerPlan


class Readiness(Protocol):
    """Chooses the workers that the inference server acts for. Workers are given by rank."""

    needs_all_idle: bool = False  #: whether it chooses workers only if none is working
    due: float = math.inf  #: when to call `choose` again even if nothing has come, by `time.monotonic`

    def choose(self, requesting: Sequence[int], working: Sequence[int]) -> Sequence[int]:
        """The workers to act for now, out of the workers that are `requesting` actions. The others that run the command
        are `working`. The server calls this after every request, until the result is empty."""

    def choose_values(self, requesting: Sequence[int], working: Sequence[int]) -> Sequence[int]:
        """The same for the workers that are `requesting` values: by default all of them, at once."""
        return requesting

    def may_reply(self, working: Sequence[int]) -> bool:
        """Whether workers may get their computed actions while these others are `working`."""
        return True


class LockStep(Readiness):
    """All together: the agent acts when the slowest worker has finished its step."""

    needs_all_idle: bool = True

    def choose(self, requesting: Sequence[int], working: Sequence[int]) -> Sequence[int]:
        return () if working else requesting

    choose_values = choose  # how many rows a model gets may change the last bit of its output


class FirstReady(Readiness):
    """The workers with a request, as soon as they have `min_columns` columns together, or no other worker is working.
    With `max_wait`, also when the first of these requests was seen so many seconds ago.

    All workers with a request are served together, so none has to wait while another is served twice.
    """

    def __init__(self, min_columns: int, n_columns: Callable[[int], int], max_wait: float | None = None) -> None:
        self._min_columns, self._n_columns = min_columns, n_columns
        self._max_wait = math.inf if max_wait is None else max_wait

    def choose(self, requesting: Sequence[int], working: Sequence[int]) -> Sequence[int]:
        is_enough = sum(map(self._n_columns, requesting)) >= self._min_columns
        if requesting and working and not is_enough and self._max_wait < math.inf:
            now = time.monotonic()
            self.due = min(self.due, now + self._max_wait)
            is_enough = now >= self.due
        if is_enough or not (requesting and working):
            self.due = math.inf
            return requesting
        return ()


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

    def choose_values(self, requesting: Sequence[int], working: Sequence[int]) -> Sequence[int]:
        whole = [half.intersection(requesting) for half in self._halves if not half.intersection(working)]
        return sorted(next(filter(None, whole), ()))

    def may_reply(self, working: Sequence[int]) -> bool:
        return self._overlap or not working


@dataclass(frozen=True)
class Halves:
    """Makes an `Alternating` for the workers of some plans."""

    overlap: bool

    def __call__(self, plans: Sequence[SamplerPlan]) -> Alternating:
        ranks, middle = range(len(plans)), first_half(len(plans))
        return Alternating((ranks[:middle], ranks[middle:]), overlap=self.overlap)


def first_half(n_workers: int) -> int:
    """How many workers the first half has."""
    return n_workers - n_workers // 2


def readiness_maker(min_ready: Any, max_wait: Any, batch_B: int) -> Callable[[Sequence[SamplerPlan]], Readiness]:
    """A function that makes the rule for the workers of some plans: `LockStep` if all are wanted and `max_wait` is
    None, else `FirstReady`.

    Raises `ConfigError` if one of them is not valid.
    """
    if max_wait is not None:
        max_wait = seconds("max_wait", max_wait)
    wanted = batch_B if min_ready is None else columns_wanted(min_ready, batch_B)
    if wanted == batch_B and max_wait is None:
        return lambda plans: LockStep()
    return lambda plans: FirstReady(wanted, [len(plan.columns) for plan in plans].__getitem__, max_wait)


def columns_wanted(min_ready: Any, batch_B: int) -> int:
    """`min_ready` as a number of columns: an integer counts environments, a float is a fraction of `batch_B`.

    Raises `ConfigError` for anything else.
    """
    is_number = isinstance(min_ready, numbers.Real) and not isinstance(min_ready, bool)
    is_count = isinstance(min_ready, numbers.Integral)
    fits = is_number and (1 <= int(min_ready) <= batch_B if is_count else 0 < float(min_ready) <= 1)
    wanted = f"a number of environments from 1 to batch_B={batch_B}, a fraction above 0 and up to 1.0, or None for all"
    must_be("min_ready", min_ready, fits, wanted)
    # 0.1 * 30 is a little more than 3 in floats
    return int(min_ready) if is_count else max(1, math.ceil(float(min_ready) * batch_B - 1e-6))
