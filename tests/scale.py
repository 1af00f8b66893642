"""The two scales of the tests: daily, a matrix keeps a case of each kind; `make faults` and `make cases` run all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from heapq import heapify, heapreplace
from itertools import combinations, cycle, islice, product
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
Cell = TypeVar("Cell", bound=tuple[object, ...])

FULL = os.environ.get("PENSTOCK_FAULTS") == "full"
START_METHODS = ("fork", "forkserver", "spawn")
#: Daily without spawn: such a worker takes 0.4 s of CPU time to import modules, with torch 2 s, and then runs the same
#: code. A test of something that a new interpreter may do differently asks for all `START_METHODS`.
USUAL_METHODS = START_METHODS if FULL else ("fork", "forkserver")


def scaled(full: T, daily: T) -> T:
    return full if FULL else daily


def some(cases: Iterable[T], n: int, first: int = 0) -> list[T]:
    """All cases at full scale. Daily `n` cases, from index `first` on; after the last case comes the first."""
    every = list(cases)
    return every if FULL else list(islice(cycle(every), first, first + n))


def examples(daily: int, full: int) -> Any:
    """The settings of hypothesis for a test; `make quick` has its own, smaller number."""
    from hypothesis import settings

    return settings(max_examples=scaled(full, min(daily, settings.default.max_examples)), deadline=None)


def methods(*daily: str) -> Any:
    """All start methods at full scale; daily those where it is most likely to go wrong."""
    return pytest.mark.parametrize("start_method", scaled(START_METHODS, daily))


def pairs(first: Iterable[Any], second: Iterable[Any]) -> list[tuple[Any, Any]]:
    """All pairs at full scale; daily as few as have each value of both."""
    left, right = list(first), list(second)
    if FULL:
        return list(product(left, right))
    return list(islice(zip(cycle(left), cycle(right), strict=False), max(len(left), len(right))))


def with_start_methods(name: str, values: Iterable[Any], of: Iterable[str] = USUAL_METHODS) -> Any:
    """Parametrizes `name` and `start_method` with `pairs`."""
    return pytest.mark.parametrize((name, "start_method"), pairs(values, of))


def mostly_first(kinds: Iterable[Any], cases: Iterable[Any]) -> list[tuple[Any, Any]]:
    """All pairs at full scale; daily the first kind with each case, and each other kind with one of them."""
    first, *others = kinds
    every = list(cases)
    few = every[:: max(1, len(every) // max(1, len(others)))]
    return [*product([first], every), *(product(others, every) if FULL else zip(others, few, strict=False))]


def covering(cells: Sequence[Cell], always: Sequence[Cell] = ()) -> list[Cell]:
    """`always`, and some of these cells of a table, so that each two values of two axes meet, where they can.

    Greedy: each time the cell that has most of the pairs that are missing; of equal ones the first.
    """
    numbers: dict[object, int] = {}
    pairs = {  # as bits
        cell: sum(1 << numbers.setdefault(pair, len(numbers)) for pair in combinations(enumerate(cell), 2))
        for cell in cells
    }
    missing, chosen = (1 << len(numbers)) - 1, list(always)
    for cell in chosen:
        missing &= ~pairs[cell]
    # How many each cell had, which only falls: a cell whose number is the highest, and still right, is the best.
    heap = [(-pairs[cell].bit_count(), index) for index, cell in enumerate(cells)]
    heapify(heap)
    while missing:
        index = heap[0][1]
        now = (-(pairs[cells[index]] & missing).bit_count(), index)
        if now == heap[0]:
            chosen.append(cells[index])
            missing &= ~pairs[cells[index]]
        else:
            heapreplace(heap, now)
    return chosen
