"""`workers/spinning.py`: looks and waits, compiled and in Python with the same answers, and how long a wait spins."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workers import spinning as native
from penstock.workers.control import ARRIVED, FOR_ANY, KIND_BITS, REQUESTED, URGENT, Command, ControlBlock
from penstock.workers.spinning import SpinTime, is_crowded

BOTH = [pytest.param(False, id="python")]
if native.COMPILED:
    BOTH.append(pytest.param(True, id="compiled"))


def functions(compiled: bool) -> dict[str, Any]:
    return {name: getattr(native, name) if compiled else native.PYTHON[name] for name in native.PYTHON}


def block_of(workers: list[tuple[int, int, int, int, int]]) -> ControlBlock:
    """A control block in which each worker has these numbers: opened, arrived, requested, kind, replied."""
    control = ControlBlock(len(workers), 1, shared=False)
    arrays = control.memory.arrays
    for rank, (opened, arrived, requested, kind, replied) in enumerate(workers):
        arrays.opened[rank], arrays.replied[rank, 0] = opened, replied
        arrays.progress[rank, ARRIVED], arrays.progress[rank, REQUESTED] = arrived, requested << KIND_BITS | kind
    return control


class Asking(np.ndarray[Any, np.dtype[np.int64]]):
    """Rows of workers, in which the next request comes right after each read of the number of the last one."""

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        if isinstance(at, tuple) and at[1] == REQUESTED:
            self[at] = found + (1 << KIND_BITS)
        return found


RUNNING, ARRIVED_ONE = (1, 0, 5, 1, 5), (2, 2, 5, 1, 5)
STEP, VALUE = (1, 0, 6, 1, 5), (1, 0, 6, URGENT, 5)


@pytest.mark.parametrize("compiled", BOTH)
def test_a_look_says_what_every_worker_does(compiled: bool) -> None:
    control, look = block_of([RUNNING, ARRIVED_ONE, STEP, VALUE, STEP]), functions(compiled)["look"]
    urgent, ordinary, busy, numbers, fingerprint = look(*control.block, 5)
    assert (urgent, ordinary, busy, numbers) == ([3], [2, 4], [0], [5, 5, 6, 6, 6])
    assert look(*control.block, 2)[:4] == ([], [], [0], [5, 5])
    assert look(*control.block, 5)[-1] == fingerprint
    control.progress(0).arrived = 1
    assert look(*control.block, 5)[-1] != fingerprint


def test_a_request_that_comes_during_a_look_is_left_to_the_next_look() -> None:
    """The number must be that of the request whose kind was read: the reply repeats it."""
    rows, opened, replied = (np.array(words) for words in block_of([RUNNING]).block)
    replied[0, 0] = 6  # the fingerprint reads the number 5; at the look it is 6, which has its reply
    urgent, ordinary, busy, numbers, _ = native.PYTHON["look"](rows.view(Asking), opened, replied, 1)
    assert (urgent, ordinary, busy, numbers) == ([], [], [0], [6])


@pytest.mark.parametrize("compiled", BOTH)
@pytest.mark.parametrize(
    ("workers", "word", "expected"),
    [
        ([RUNNING], 0, False),
        ([RUNNING], FOR_ANY, True),
        ([RUNNING, STEP], 2, False),
        ([STEP, RUNNING], 1, True),
        ([STEP, ARRIVED_ONE], 2, True),
        ([RUNNING, VALUE], 2, True),
        ([VALUE, RUNNING], 1, True),
    ],
)
def test_who_sleeps_is_woken_for_what_it_waits_for(
    compiled: bool, workers: list[Any], word: int, expected: bool
) -> None:
    control = block_of(workers)
    control.main_asleep[0] = word
    assert functions(compiled)["must_wake"](*control.block, control.main_asleep) is expected


@pytest.mark.parametrize("compiled", BOTH)
def test_with_zero_seconds_it_looks_once(compiled: bool) -> None:
    own = functions(compiled)
    control = block_of([RUNNING, ARRIVED_ONE])
    assert own["spin_for_arrivals"](*control.block, 2, 0.0, False) is False
    seen = own["look"](*control.block, 2)[-1]

    def has_news(needs_all_idle: bool) -> bool:
        found = own["spin_for_requests"](*control.block, 2, seen, needs_all_idle, control.quit_word, 0.0, False)
        assert isinstance(found, bool)
        return found

    assert not has_news(False)
    assert not has_news(True)
    control.open(Command(), [1])
    control.progress(1).request(1)
    assert has_news(False)
    assert not has_news(True), "worker 0 is working"
    control.progress(0).arrived = 1
    assert has_news(True)
    assert own["spin_for_arrivals"](*control.block, 1, 0.0, True) is True
    word = np.array([3])
    for value, expected in ((3, True), (4, False)):
        assert own["spin_for_word"](memoryview(word), value, control.quit_word, 0.0, True) is expected
    control.quit = True
    assert own["spin_for_word"](memoryview(word), 4, control.quit_word, 0.0, True) is True
    seen = own["look"](*control.block, 2)[-1]
    assert has_news(True)


@pytest.mark.parametrize("yields", [True, False])
@pytest.mark.parametrize("compiled", BOTH)
def test_a_spin_ends_when_its_time_is_over_or_its_condition_is_met(compiled: bool, yields: bool) -> None:
    control, spin_for_word = block_of([RUNNING]), functions(compiled)["spin_for_word"]
    word = np.zeros(1, np.int64)
    began = time.monotonic()
    assert spin_for_word(word, 1, control.quit_word, 0.005, yields) is False
    assert time.monotonic() - began >= 0.005
    other = threading.Thread(target=word.fill, args=(1,))  # it needs the interpreter, so the spin must not hold it
    other.start()
    assert spin_for_word(word, 1, control.quit_word, 60.0, yields) is True
    other.join()


_workers = st.lists(
    st.tuples(*[st.integers(0, 3)] * 3, st.sampled_from([1, URGENT]), st.integers(0, 3)), min_size=1, max_size=6
)


@pytest.mark.skipif(not native.COMPILED, reason="was built without a C compiler")
@settings(deadline=None)
@given(workers=_workers, word=st.integers(-1, 6))
def test_compiled_and_python_agree(workers: list[Any], word: int) -> None:
    control, n = block_of(workers), len(workers)
    control.main_asleep[0] = min(word, n)
    compiled, plain = functions(True), functions(False)
    answers = []
    for own in (compiled, plain):
        *looked, seen = own["look"](*control.block, n)
        answers.append([looked, own["must_wake"](*control.block, control.main_asleep)])
        answers[-1].append(own["spin_for_arrivals"](*control.block, n, 0.0, True))
        for known in (seen, seen ^ 1):
            rest = n, known, True, control.quit_word, 0.0, True
            answers[-1].append(own["spin_for_requests"](*control.block, *rest))
    assert answers[0] == answers[1]


@pytest.mark.skipif(not native.COMPILED, reason="was built without a C compiler")
def test_wrong_arguments_are_errors() -> None:
    control, word = block_of([RUNNING]), np.zeros(1, np.int64)
    with pytest.raises(TypeError, match="expected 4 arguments, got 1"):
        native.look(1)  # type: ignore[call-arg, arg-type]
    with pytest.raises(IndexError, match="does not have 2 workers"):
        native.look(*control.block, 2)
    with pytest.raises(IndexError, match="does not have 2 workers"):
        native.must_wake(*control.block, np.array([2]))
    with pytest.raises(TypeError, match="integers of 8 bytes"):
        native.spin_for_word(np.zeros(1, np.int32), 1, word, 0.0, True)
    with pytest.raises(IndexError, match="at least one word"):
        native.spin_for_word(word[:0], 1, word, 0.0, True)
    with pytest.raises((BufferError, ValueError)):
        native.spin_for_word(np.zeros(4, np.int64)[::2], 1, word, 0.0, True)
    with pytest.raises(TypeError):
        native.spin_for_word(word, 1, None, 0.0, True)


# ---- how long the next wait spins, after waits of these lengths ------------------------------------


def after(waits: list[float], spin_time: SpinTime) -> float:
    """The time to spin after waits of these lengths."""
    for seconds in waits:
        spin_time.note(seconds, has_slept=seconds > spin_time.seconds)
    return spin_time.seconds


def test_it_spins_for_about_twice_the_recent_waits() -> None:
    assert after([100e-6] * 50, SpinTime(1e-3)) == pytest.approx(220e-6, rel=0.05)
    assert after([400e-6] * 50, SpinTime(1e-3)) == pytest.approx(820e-6, rel=0.05)
    assert 220e-6 < after([100e-6] * 50 + [10.0], SpinTime(1e-3)) < 260e-6, "one long wait changes little"
    assert after([10.0] * 30 + [400e-6] * 50, SpinTime(1e-3)) == pytest.approx(820e-6, rel=0.05), "many change it"


def test_it_does_not_spin_where_waits_are_long() -> None:
    assert after([0.1] * 4, SpinTime(1e-3)) == 0.0, "the first wait does not spin, the next three are misses"
    assert after([1.5e-3] * 20, SpinTime(1e-3)) == 0.0
    assert after([], SpinTime(0.0)) == after([1e-6] * 9, SpinTime(0.0)) == 0.0


def test_it_spins_again_when_waits_become_short() -> None:
    spin_time = SpinTime(1e-3)
    assert after([0.1] * 1001, spin_time) == 0.0
    assert after([50e-6] * 512, spin_time) > 0.0
    assert after([50e-6] * 50, spin_time) == pytest.approx(120e-6, rel=0.05)


def test_among_long_waits_it_tries_again_ever_more_rarely() -> None:
    spin_time, spins = SpinTime(1e-3), list[int]()
    for i in range(3000):
        if spin_time.seconds > 0:
            spins.append(i)
        spin_time.note(0.1, has_slept=True)
    pauses = [b - a - 1 for a, b in pairwise(spins)]
    assert pauses == [0, 0, 32, 64, 128, 256, 512, 512, 512, 512]


def test_it_sleeps_after_another_program_has_taken_the_cpu_for_long() -> None:
    spin_time = SpinTime(1e-3)
    assert after([50e-6] * 50, spin_time) > 0
    spin_time.note(3e-3, has_slept=False)
    assert spin_time.seconds == 0.0
    assert after([50e-6] * 31, spin_time) == 0.0
    assert after([50e-6], spin_time) > 0, "it tries again"


@pytest.mark.parametrize("cpus", [(0, 3), ()], ids=["two", "a system without a mask"])
def test_processes_are_a_crowd_if_there_are_more_than_cpus(
    monkeypatch: pytest.MonkeyPatch, cpus: tuple[int, ...]
) -> None:
    monkeypatch.setattr(native, "usable_cpus", lambda: cpus)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert [n for n in (1, 2, 3) if is_crowded(n)] == [3]
