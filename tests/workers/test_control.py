"""The control block: each shared word says what its one writer has written, and to everybody."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SamplerStateError
from penstock.workers import control as progress_module
from penstock.workers.control import PHASE, Command, ControlBlock, Phase, StopCollecting
from penstock.workers.failures import WorkerStatus
from penstock.workers.plan import WorkerPlan

from ..scale import examples

T, WORKERS = 4, 3
quick = examples(20, 40)


class Clock:
    """Stands for the `time` module; moves only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return round(self.now * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_module, "time", clock)
    return clock


@pytest.fixture
def block() -> ControlBlock:
    return ControlBlock(WORKERS, T, shared=False)


# ---- words of the main process -----------------------------------------------------------------

words = st.integers(0, 2**62)
commands = st.builds(Command, words, st.booleans(), st.booleans(), version=words, batch=words)


@quick
@given(st.lists(commands, max_size=30), st.integers(1, 8))
def test_every_opening_has_its_own_command(history: list[Command], ahead: int) -> None:
    """A worker that is up to eight openings behind still reads the command of each."""
    block = ControlBlock(WORKERS, T, shared=False)
    progress, waiting = block.progress(1), []
    for command in history:
        block.open(command, [1])
        waiting.append(command)
        if len(waiting) == ahead:
            for expected in waiting:
                assert progress.command == expected
                progress.arrived += 1
            waiting.clear()
        assert block.command(1, block.opened[1]) == command
    assert [block.opened[rank] for rank in range(WORKERS)] == [0, len(history), 0]


def test_a_ninth_open_command_is_refused_unless_it_is_the_same() -> None:
    block = ControlBlock(1, T, shared=False)
    for _ in range(20):
        block.open(Command(itr=3), [0])
    with pytest.raises(SamplerStateError, match="worker 0 has 8 commands open"):
        block.open(Command(itr=4), [0])


# ---- progress rows -----------------------------------------------------------------------------


@pytest.mark.parametrize("n_workers", [2, 9, 17])
def test_no_two_rows_lie_in_one_pair_of_cache_lines(n_workers: int) -> None:
    block = ControlBlock(n_workers, T, shared=True)
    try:
        rows = [(row.ctypes.data, row.nbytes) for row in block.memory.arrays.progress]
    finally:
        block.memory.close()
    pairs = [{start // 128, (start + nbytes - 1) // 128} for start, nbytes in rows]
    assert len(set.union(*pairs)) == sum(map(len, pairs))


def test_a_row_shows_where_its_worker_is_and_since_when(block: ControlBlock, clock: Clock) -> None:
    first, progress = block.snapshot(1), block.progress(1)
    assert (first.phase, first.t, first.batches, first.steps, first.heartbeat) == (Phase.STARTING, -1, 0, 0, 0)
    for phase in Phase:
        clock.now += 1
        progress.enter(phase)
        assert (block.snapshot(1).phase, block.snapshot(1).heartbeat) == (phase, pytest.approx(clock.now))
    for phase, begin in ((Phase.ACTING, progress.begin_acting), (Phase.STEPPING, progress.begin_stepping)):
        clock.now += 1
        begin(3)
        assert (block.snapshot(1).phase, block.snapshot(1).t) == (phase, 3)
        assert block.snapshot(1).heartbeat == pytest.approx(clock.now)
    progress.words[progress.ENV_RANK] = 11
    progress.words[progress.PHASE] = Phase.RESETTING
    assert (block.snapshot(1).env_rank, block.snapshot(1).phase) == (11, Phase.RESETTING)


def stamps(block: ControlBlock, rank: int) -> Any:
    """Of the last openings, in seconds."""
    return block.memory.arrays.timeline[rank] / 1e9


def test_rows_do_not_touch_one_another(block: ControlBlock, clock: Clock) -> None:
    before = block.snapshot(0), block.snapshot(2), stamps(block, 0).copy(), stamps(block, 2).copy()
    progress = block.progress(1)
    progress.at_env(5)
    progress.begin()
    progress.arrived = 3
    progress.n_results = 4
    for t in range(T):
        clock.now += 1
        progress.begin_acting(t)
        progress.begin_stepping(t)
    progress.end_batch(T, 2, clock.monotonic_ns())
    after = block.snapshot(0), block.snapshot(2), stamps(block, 0), stamps(block, 2)
    np.testing.assert_equal(after, before)


durations = st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 1000)), min_size=1, max_size=T)


@quick
@given(st.lists(durations, min_size=1, max_size=3), st.integers(1, 5))
def test_acting_and_stepping_times_are_totals_of_all_batches(
    batches: list[list[tuple[int, int]]], n_columns: int
) -> None:
    clock, block = Clock(), ControlBlock(1, T, shared=False)
    progress = block.progress(0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(progress_module, "time", clock)
        for batch in batches:
            for t, (acting, stepping) in enumerate(batch):
                progress.begin_acting(t)
                clock.now += acting
                progress.begin_stepping(t)
                clock.now += stepping
            progress.end_batch(len(batch), len(batch) * n_columns, clock.monotonic_ns())
            clock.now += 50  # between batches: counted nowhere
    snapshot, rows = block.snapshot(0), [row for batch in batches for row in batch]
    assert snapshot.acting == pytest.approx(sum(acting for acting, _ in rows))
    assert snapshot.stepping == pytest.approx(sum(stepping for _, stepping in rows))
    assert (snapshot.batches, snapshot.steps) == (len(batches), len(rows) * n_columns)


def test_the_stamps_are_the_beginnings_of_each_row_and_the_end(block: ControlBlock, clock: Clock) -> None:
    progress = block.progress(2)
    expected = []
    for t in range(T):
        for begin in (progress.begin_acting, progress.begin_stepping):
            clock.now += 1 + t
            begin(t)
            expected.append(clock.now)
    clock.now += 1
    progress.end_batch(T, 1, clock.monotonic_ns())
    assert stamps(block, 2)[0].tolist() == [*expected, clock.now]


def test_a_row_outside_a_batch_is_not_stamped(block: ControlBlock, clock: Clock) -> None:
    block.progress(0).begin_row(2)
    assert block.snapshot(0).heartbeat == pytest.approx(clock.now)
    assert (block.snapshot(0).phase, block.snapshot(0).t) == (Phase.ACTING, 2)
    assert not stamps(block, 0).any()


def test_resets_are_counted_where_they_happen(block: ControlBlock, clock: Clock) -> None:
    def reset(seconds: float) -> None:
        began = progress.enter(Phase.RESETTING)
        clock.now += seconds
        progress.add_resetting_since(began)

    progress = block.progress(0)
    reset(1)  # at the start
    progress.arrived += 1
    for seconds in (2, 4):  # in batches, and after them
        progress.begin()
        progress.begin_acting(0)
        clock.now += 64
        progress.begin_stepping(0)
        reset(seconds)
        clock.now += 128
        progress.end_batch(1, 1, clock.monotonic_ns())
        now = clock.monotonic_ns()
        progress.begin_record(now - seconds * 10**9, now)
        progress.arrived += 1
        reset(8 * seconds)
    progress.begin()
    reset(256)  # in an evaluation
    assert block.snapshot(0).resetting == pytest.approx(1 + 9 * (2 + 4) + 256)
    progress.arrived += 1
    block.reset_row(0)
    progress = block.progress(0)  # of another worker
    reset(512)
    progress.begin()
    row = block.snapshot(0)
    assert (row.first_resets, row.resets_within, row.resets_between) == pytest.approx((1 + 512, 2 + 4, 16 + 32))
    assert (row.acting, row.stepping, row.waiting) == pytest.approx((2 * 64, 2 * 128, 2 + 4))


@pytest.mark.parametrize("begin", ["begin_acting", "begin_row"])
def test_a_row_does_not_begin_once_the_sampler_shuts_down(block: ControlBlock, begin: str) -> None:
    progress = block.progress(0)
    getattr(progress, begin)(0)
    block.quit = True
    with pytest.raises(StopCollecting):
        getattr(progress, begin)(1)
    assert block.snapshot(0).t == 1  # it says where it was stopped


def test_trajectories_count_from_the_opening_that_the_worker_has_noticed(block: ControlBlock) -> None:
    progress = block.progress(1)
    for answered, count in enumerate((4, 2)):
        block.open(Command(), [1])
        assert block.n_results_by_rank(2) == [0, 0], "those of the batch before are not of this one"
        progress.begin()
        assert block.n_results_by_rank(2) == [0, 0]
        progress.n_results += count
        assert block.n_results_by_rank(2) == [0, progress.n_results] == [0, count]
        progress.arrived += 1
        assert block.progress(1).arrived == progress.arrived == answered + 1
        assert block.has_arrived(1)
        assert block.n_results_by_rank(2) == [0, count]


@quick
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 20))
def test_the_counts_of_the_last_eight_openings_can_be_read(counts: list[int], earlier: int) -> None:
    block = ControlBlock(WORKERS, T, shared=False)
    progress = block.progress(1)
    for _ in range(earlier):
        block.open(Command(), [1])
        progress.begin()
        progress.n_results = 7
        progress.arrived += 1
    for _ in counts:
        block.open(Command(), [1])
    for done, count in enumerate(counts):
        number = earlier + 1 + done
        assert not block.have_completed(number, 2)
        assert [block.n_results(1, n) for n in range(earlier + 1, number + 1)] == [*counts[:done], 0]
        progress.begin()
        progress.n_results = count
        progress.arrived += 1
    found = [block.n_results(1, earlier + 1 + i) for i in range(len(counts))]
    assert found == counts
    assert block.arrived(1) == earlier + len(counts)
    assert block.have_completed(0, 2)


def test_a_phase_that_does_not_exist_can_be_read() -> None:
    """A crash of C code may write anything. It must not take the place of the worker's error."""
    block = ControlBlock(1, 4, shared=False)
    block.memory.arrays.progress[0, PHASE] = 77
    status = WorkerStatus(WorkerPlan(worker_rank=0, columns=range(2), env_ranks=range(2)), 5, block.snapshot(0))
    assert status.doing == "doing what cannot be read, since a crash has written into the shared memory"
