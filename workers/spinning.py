"""Spinning: how long a process spins before it sleeps, and the waits, compiled or in Python."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.buffers.native import load
from penstock.buffers.ordering import full_fence
from penstock.workers.affinity import usable_cpus
from penstock.workers.control import ARRIVED, KIND_BITS, REPLIED, REQUESTED, ROW_WORDS, URGENT

_Words = npt.NDArray[np.int64]
_KIND = (1 << KIND_BITS) - 1

#: What `look` returns: the ranks with an urgent request, with another request, and that are not idle; the number of
#: each worker's last request; and the fingerprint, a number that changes with each arrival and each request.
Look = tuple[list[int], list[int], list[int], list[int], int]

# If there are more processes than CPUs, a process that spins may hold the CPU that the other one needs. If it yields,
# two processes on one CPU take turns in 1 to 2 µs, faster than a wake-up.
yield_cpu: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


def spin(is_met: Callable[[], bool], seconds: float) -> bool:
    """Wait at most `seconds` until `is_met` returns True; returns whether it has."""
    deadline = time.monotonic() + seconds
    while not is_met():
        if time.monotonic() >= deadline:
            return False
        yield_cpu()
    return True


def _spin_for_word(
    word: _Words | memoryview, value: int, stop: _Words | memoryview, seconds: float, yields: bool
) -> bool:
    return spin(lambda: word[0] >= value or stop[0] != 0, seconds)


def _has_arrived(rows: _Words, opened: _Words, rank: int) -> bool:
    return bool(rows[rank, ARRIVED] == opened[rank])


def _open_request(rows: _Words, replied: _Words, rank: int) -> tuple[int, int]:
    """The number of this worker's last request, and its kind if it is open; the kind is 0 otherwise."""
    word: int = rows[rank, REQUESTED]  # read once: the next request may come at any moment
    number = word >> KIND_BITS
    return number, 0 if number == replied[rank, REPLIED] else word & _KIND


def _is_urgent_or_all_idle(rows: _Words, opened: _Words, replied: _Words, n_workers: int) -> bool:
    kinds = [_open_request(rows, replied, rank)[1] for rank in range(n_workers)]
    return URGENT in kinds or all(kind or _has_arrived(rows, opened, rank) for rank, kind in enumerate(kinds))


def _fingerprint(rows: _Words, n_workers: int) -> int:
    return hash(tuple((rows[rank, ARRIVED], rows[rank, REQUESTED]) for rank in range(n_workers)))


def _spin_for_arrivals(
    rows: _Words, opened: _Words, replied: _Words, n_workers: int, seconds: float, yields: bool
) -> bool:
    return spin(lambda: all(_has_arrived(rows, opened, rank) for rank in range(n_workers)), seconds)


def _spin_for_requests(
    rows: _Words,
    opened: _Words,
    replied: _Words,
    n_workers: int,
    fingerprint: int,
    needs_all_idle: bool,
    stop: _Words | memoryview,
    seconds: float,
    yields: bool,
) -> bool:
    def is_met() -> bool:
        if stop[0]:
            return True
        if needs_all_idle and not _is_urgent_or_all_idle(rows, opened, replied, n_workers):
            return False
        return _fingerprint(rows, n_workers) != fingerprint

    return spin(is_met, seconds)


def _must_wake(rows: _Words, opened: _Words, replied: _Words, sleeper: _Words | memoryview) -> bool:
    full_fence()
    word: int = sleeper[0]
    return word < 0 or (word > 0 and _is_urgent_or_all_idle(rows, opened, replied, word))


def _look(rows: _Words, opened: _Words, replied: _Words, n_workers: int) -> Look:
    fingerprint = _fingerprint(rows, n_workers)  # first: what comes during the look changes the next one
    urgent, ordinary, busy, numbers = list[int](), list[int](), list[int](), list[int]()
    for rank in range(n_workers):
        number, kind = _open_request(rows, replied, rank)
        numbers.append(number)
        if kind:
            (urgent if kind == URGENT else ordinary).append(rank)
        elif not _has_arrived(rows, opened, rank):
            busy.append(rank)
    return urgent, ordinary, busy, numbers, fingerprint


#: `spin_for_word(word, value, stop, seconds, yields)`: until `word[0] >= value` or `stop[0] != 0`.
spin_for_word: Callable[[Any, int, Any, float, bool], bool]
#: `spin_for_arrivals(rows, opened, replied, n_workers, seconds, yields)`: until the first `n_workers` have arrived.
spin_for_arrivals: Callable[[Any, Any, Any, int, float, bool], bool]
#: `spin_for_requests(rows, opened, replied, n_workers, fingerprint, needs_all_idle, stop, seconds, yields)`: until a
#: request or an arrival has changed the `fingerprint`, or until `stop[0] != 0`. With `needs_all_idle`, all workers must
#: be idle too, or one must have an urgent request.
spin_for_requests: Callable[[Any, Any, Any, int, int, bool, Any, float, bool], bool]
#: `must_wake(rows, opened, replied, sleeper)`: whether the process whose sleeping word is `sleeper[0]` must be woken,
#: after something was published. Contains a full fence. See `AWAKE` in control.py.
must_wake: Callable[[Any, Any, Any, Any], bool]
#: `look(rows, opened, replied, n_workers)`: what the first `n_workers` do, in one pass.
look: Callable[[Any, Any, Any, int], Look]

#: The functions that are used if nothing is compiled.
PYTHON: dict[str, Callable[..., Any]] = {
    "spin_for_word": _spin_for_word,
    "spin_for_arrivals": _spin_for_arrivals,
    "spin_for_requests": _spin_for_requests,
    "must_wake": _must_wake,
    "look": _look,
}

_LAYOUT = (
    f"ARRIVED:{ARRIVED} REQUESTED:{REQUESTED} ROW_WORDS:{ROW_WORDS} KIND_BITS:{KIND_BITS} URGENT:{URGENT} "
    f"REPLIED:{REPLIED}"
)

#: Why the compiled functions are not in use; empty if they are.
_functions, WHY_NOT_COMPILED = load("penstock.workers._native", PYTHON, _LAYOUT)
spin_for_word, spin_for_arrivals, spin_for_requests, must_wake, look = _functions.values()
#: Whether the compiled functions are in use.
COMPILED = not WHY_NOT_COMPILED


#: The longest time. A wake-up takes some microseconds or some tens, and much longer where other programs run.
SPIN_SECONDS = 1e-3

_WEIGHT = 1 / 8  # of the last wait in the moving averages
_MARGIN_SECONDS = 20e-6  # added to twice the average wait
_FIRST_SECONDS = 100e-6  # the average before the first wait
_MOST_MISSES = 0.3  # with a larger share of misses, pause: after three misses in a row, for example
_MISSES_IN_TRIAL = 0.25  # the share at the end of a pause, so that one more miss begins the next pause
_PAUSES = (32, 512)  # how many waits a pause lasts: the first one, and at most


class SpinTime:
    """How long to spin in the next wait: about twice the moving average of the recent waits of the same kind.

    A spin is a *miss* if the process must sleep after it: because the wait is longer than `most_seconds`, or because
    another program takes the CPU. After too many misses there is a *pause*: the next waits do not spin. If the first
    spin after the pause is a miss too, another pause follows, which is twice as long. The first wait does not spin: it
    is for the start of all processes.

    If a spin ends much too late, another program got the CPU when this process yielded. A process that sleeps gets its
    CPU back sooner. So a pause begins at once.
    """

    def __init__(self, most_seconds: float) -> None:
        self._most, self._average, self._misses = most_seconds, min(most_seconds, _FIRST_SECONDS), 0.0
        self._longest = min(most_seconds, 2 * self._average + _MARGIN_SECONDS)  # how long a spin may be now
        self._pause, self._left = _PAUSES[0], 1  # the length of the next pause, and the waits left of this one
        self.seconds = 0.0  #: how long to spin in the next wait; 0.0: sleep at once

    def note(self, seconds: float, has_slept: bool) -> None:
        """After each wait: it took `seconds`. `has_slept`: spinning was not enough."""
        is_late = not has_slept and seconds > self.seconds + self._most
        # A longer wait counts as one that a spin would just have covered. Otherwise one very long wait, for a learner
        # or because another program ran, would make the next spins much longer.
        self._average += (min(seconds, self._longest) - self._average) * _WEIGHT
        self._longest = min(self._most, 2 * self._average + _MARGIN_SECONDS)
        if self._left:
            self._left -= 1
        else:
            self._misses = 1.0 if is_late else self._misses + (has_slept - self._misses) * _WEIGHT
            if self._misses > _MOST_MISSES:
                self._misses, self._left = _MISSES_IN_TRIAL, self._pause
                self._pause = min(2 * self._pause, _PAUSES[1])
            elif self._misses < _MISSES_IN_TRIAL / 2:
                self._pause = _PAUSES[0]
        self.seconds = 0.0 if self._left else self._longest


def is_crowded(n_processes: int) -> bool:
    """Whether there are fewer CPUs than processes. Then each process that spins yields the CPU after each look."""
    return n_processes > (len(usable_cpus()) or os.cpu_count() or 1)
