"""The rings of a control block: what `tracing` reads from them, also while other processes write."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.workers import control as c
from penstock.workers import tracing
from penstock.workers.control import Command, ControlBlock, Phase, Progress, StopCollecting
from penstock.workers.plan import WorkerPlan
from penstock.workers.tracing import Recorded, _Worker

from ..scale import scaled
from ..support import until
from ..traces import TraceFile

T = 4
PLANS = [
    WorkerPlan(worker_rank=rank, columns=range(rank, rank + 1), env_ranks=range(rank, rank + 1)) for rank in (0, 1)
]


def work(progress: Progress, rows: int = T) -> None:
    """A command, as a worker runs it. With fewer rows, it is not completed."""
    progress.begin_record(progress.enter(Phase.WAITING), time.monotonic_ns())
    progress.begin()
    for t in range(rows):
        progress.begin_acting(t)
        progress.begin_stepping(t)
    if rows == T:
        progress.end_batch(T, 2 * T, time.monotonic_ns())
        progress.enter(Phase.WAITING)
        progress.arrived += 1


def read(block: ControlBlock, **how: Any) -> Recorded:
    return tracing.read(block.memory.arrays, tracing.describe("Test", T, PLANS), **how)


@pytest.fixture
def block() -> ControlBlock:
    return ControlBlock(2, T, shared=False)


@contextmanager
def writing_fork() -> Iterator[ControlBlock]:
    """Another process, in which a worker runs one command after another. Gives the control block that it writes."""
    block = ControlBlock(2, T, shared=True)
    if (pid := os.fork()) == 0:
        code = 1
        try:
            progress = block.progress(0)
            while True:
                work(progress)
        except StopCollecting:
            code = 0
        finally:
            os._exit(code)
    try:
        yield block
    finally:
        block.quit = True
        block.memory.close()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_another_process_reads_no_record_that_is_half_written() -> None:
    """A record may be overwritten while it is copied: then it is not among those that are found."""
    n_records = n_rows = 0
    with writing_fork() as block:
        until(lambda: block.arrived(0) > 2 * c.N_KEPT, 60)
        for _ in range(scaled(10_000, 300)):
            worker = _Worker(block.memory.arrays, 0)
            for k, record in worker.records.items():
                assert (record[c.BEGUN], record[c.BATCHES], record[c.STEPS]) == (k, k, 2 * T * k)
                assert 0 < record[c.CAME] <= record[c.SAW] <= record[c.HEARTBEAT]
                stamps = worker.rows(k, record[c.SAW], record[c.HEARTBEAT])
                assert len(stamps) in (0, 2 * T + 1)
                n_rows += len(stamps) > 0
            n_records += len(worker.records)
    print(f"{n_records:,} records and {n_rows:,} batches with rows, of {block.arrived(0):,}")
    assert n_records > 50 * c.N_KEPT


def test_a_trace_is_read_while_another_process_writes(tmp_path: Path) -> None:
    with writing_fork() as block:
        for i in range(scaled(200, 10)):
            trace = TraceFile(tracing.write(tmp_path / f"{i}.json", [read(block)]))
        assert trace.track("worker 0")
        assert [s["name"] for s in trace.track("worker 1")] == ["start-up"]


def test_rows_are_of_the_last_openings_for_which_there_is_room(block: ControlBlock) -> None:
    progress = block.progress(1)
    n_rows = block.memory.arrays.timeline.shape[1]
    assert n_rows == c.N_KEPT
    assert ControlBlock(1, 128, shared=False).memory.arrays.timeline.shape[1:] == (31, 257)
    assert ControlBlock(1, 10**5, shared=False).memory.arrays.timeline.shape[1] == 2
    for _ in range(n_rows + 10):
        block.open(Command(), [0, 1])
        work(progress)
        block.progress(0).arrived += 1
    worker = _Worker(block.memory.arrays, 1)
    assert list(worker.records) == list(range(12, n_rows + 11)), "the next one may overwrite number 11"
    for k, record in worker.records.items():
        assert len(worker.rows(k, record[c.SAW], record[c.HEARTBEAT])) == 2 * T + 1
        for other in (k - 1, k + 1):
            assert not worker.rows(other, record[c.SAW], record[c.HEARTBEAT]), "these are of another opening"


def test_what_runs_ends_now_and_who_waits_is_told_for_whom(block: ControlBlock) -> None:
    first, second = block.progress(0), block.progress(1)
    for progress in (first, second):
        progress.arrived += 1  # the start
    block.note_opening(Command(), time.monotonic_ns(), 2)
    block.open(Command(itr=7), [0, 1])
    work(first)
    work(second, rows=2)
    before = time.monotonic_ns()
    found = read(block)
    for track, name, _, began, ended, args in found.spans:
        if track == 5 and name in ("itr 7", "stepping") and (args or {}).get("t", 1) == 1:
            assert began < before <= ended
    (wait,) = (s for s in found.spans if s[:2] == (4, "barrier_out") and s[4] >= before)
    assert wait[5] == {"waits_for": "worker 1"}
    over = read(block, is_over=True)
    assert max(s[4] for s in over.spans) < before, "what has ended does not go on"


def test_a_reset_that_hangs_at_the_start_is_shown(block: ControlBlock) -> None:
    block.open(Command(), [0, 1])
    progress = block.progress(0)
    progress.at_env(3)
    began = progress.enter(Phase.RESETTING)
    found = read(block)
    (reset,) = (s for s in found.spans if s[2] == "reset")
    (start,) = (s for s in found.spans if s[:2] == (4, "start-up"))
    assert start[3] < reset[3] < reset[4] == start[4]
    assert (reset[1], reset[3]) == ("reset env_rank 3", began)
    assert reset[4] > began


@pytest.mark.parametrize("read_first", ["progress", "timeline"])
def test_a_reset_that_ends_while_the_rings_are_read_is_within_its_command(
    block: ControlBlock, read_first: str, tmp_path: Path
) -> None:
    progress = block.progress(0)
    work(progress)
    work(progress, rows=1)
    if read_first == "timeline":
        progress.enter(Phase.RESETTING)

    class Arrays:
        """The worker goes on meanwhile."""

        def __getattr__(self, name: str) -> Any:
            found = getattr(block.memory.arrays, name)
            if name == read_first == "progress":  # it begins and ends a reset after its progress was read
                found = found.copy()
                progress.note_long_reset(time.monotonic_ns(), 10**9)
            elif name == read_first == "timeline":  # its reset has ended before its stamps are read
                progress.begin_acting(1)
            return found

    recorded = tracing.read(Arrays(), tracing.describe("Test", T, PLANS))
    trace = TraceFile(tracing.write(tmp_path / "trace.json", [recorded]))  # which looks whether all is nested
    resets = [span for span in trace.track("worker 0") if span["cat"] == "reset"]
    assert len(resets) == (read_first == "timeline")


def test_the_resets_of_a_replaced_worker_stay(block: ControlBlock) -> None:
    for n in (3, 2):  # of two processes
        progress = block.progress(0)
        for _ in range(n):
            progress.note_long_reset(time.monotonic_ns(), c.LONG_RESET_NS)
    assert len([s for s in read(block).spans if s[2] == "reset"]) == 5


def test_what_a_crash_has_written_anywhere_ends_in_a_trace_or_an_error_that_names_it(tmp_path: Path) -> None:
    """Neither in a hang, nor in another error."""
    rng, found = np.random.default_rng(0), set[str]()
    for i in range(scaled(200, 20)):
        block = ControlBlock(2, T, shared=False)
        block.open(Command(), [0, 1])
        for rank in (0, 1):
            block.progress(rank).arrived += 1
        block.open(Command(itr=1), [0, 1])
        for rank in (0, 1):
            work(block.progress(rank))
        arrays = [array.reshape(-1).view(np.uint8) for _, array in block.memory.arrays.leaves()]
        for j in [i % len(arrays), *rng.integers(0, len(arrays), i % 3)]:
            arrays[j][:] = rng.integers(0, 256 if i % 2 else 2, len(arrays[j]))
        try:
            recorded = read(block)
        except ConfigError as error:
            found.add(str(error).partition(":")[0])
        else:
            found.add("trace" * bool(json.loads(tracing.write(tmp_path / "trace.json", [recorded]).read_text())))
    assert found == {"trace", f"no trace can show what process {os.getpid()} has left in its memory"}


def test_a_short_trace_has_the_newest(tmp_path: Path) -> None:
    """That of a failure: the user waits for it."""
    block = ControlBlock(2, T, shared=False)
    rows = [block.progress(rank) for rank in (0, 1)]
    for itr in range(50):
        block.open(Command(itr), [0, 1])
        for progress in rows:
            work(progress)
    block.open(Command(50), [0, 1])
    work(rows[0])
    work(rows[1], rows=2)
    for most, n in ((200, 6), (10, 2), (10**6, 51)):
        found = read(block, most_spans=most)
        TraceFile(tracing.write(tmp_path / "trace.json", [found]))
        for track in (4, 5):
            shown = [s for s in found.spans if s[0] == track]
            assert len([s for s in shown if s[2] == "batch"]) in (n, n + 1)
            assert len([s for s in shown if s[2] == "row"]) <= 3 * most / 2
            assert any(s[1] == "itr 50" for s in shown)
        last = max((s for s in found.spans if s[0] == 5 and s[2] == "row"), key=lambda s: s[4])
        assert (last[1], last[5]) == ("stepping", {"t": 1}), "what runs now"


def test_events_of_many_threads_are_all_kept(block: ControlBlock) -> None:
    names, together = [f"thread {i}" for i in range(8)], threading.Barrier(8)

    def note(name: str) -> None:
        together.wait(10)  # each needs a place for its name now
        for i in range(98):
            with tracing.mark(block, f"{name}, {i % 7}"):
                pass

    threads = [threading.Thread(target=note, args=(name,)) for name in names]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    marks = Counter(s[1] for s in read(block).spans if s[2] == "mark")
    assert marks == {f"{name}, {i}": 14 for name in names for i in range(7)}
