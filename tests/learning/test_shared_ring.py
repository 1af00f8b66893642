"""Several processes write into one ring, and are killed, while another reads: no row is torn."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import numpy as np
import pytest

from penstock.learning import Replay
from penstock.learning import ring as ring_module
from penstock.learning.position_draws import DrawIndex
from penstock.learning.replay_batches import TransitionReader, move, of_one_writer
from penstock.learning.ring import TRUNCATED, VALID, Ring, Shape
from penstock.learning.windows import WindowReader

from ..scale import FULL
from .streams import Stream, storage_of

N_READ = 100_000_000 if FULL else 80_000  # rows
AT_ONCE = 1024 if FULL else 64
WIDTH = 16 if FULL else 64  # numbers in a row
N_WRITERS = 3 if FULL else 2

pytestmark = pytest.mark.timeout(3600 if FULL else 60)


def make_ring(n_writers: int, T: int = 4096 if FULL else 64, **finals: int) -> Ring:
    finals = {"max_finals": 8 * T, **finals}
    return Ring(Shape(T, 4, np.zeros(WIDTH), np.zeros((), np.int64), n_writers=n_writers, **finals), shared=True)


def rows_of(ring: Ring, writer: int, start: int, t: int) -> tuple[tuple[Any, ...], Any]:
    """Rows of which every number tells the step and the column."""
    columns = ring.columns(writer)
    b = np.arange(columns.start, columns.stop)
    number = (start + np.arange(t))[:, None] * ring.B + b
    flags = np.full(number.shape, VALID, np.uint8)
    flags[number % 5 == 0] |= TRUNCATED
    observation = np.repeat(number[..., None].astype(np.float64), WIDTH, -1)
    rows = (flags, number.astype(np.float32), np.zeros(number.shape, np.int32), observation, number)
    return rows, -observation[flags == VALID | TRUNCATED]


def _write_for_ever(ring: Ring, writer: int) -> None:
    while True:
        start = int(ring.arrays.done[writer, 0])
        # No writer runs ahead of another by more than a batch.
        if start <= ring.end:
            ring.write(*rows_of(ring, writer, start, 8), writer)


@pytest.mark.slow
@pytest.mark.parametrize("n_kills", [0, 200] if FULL else [10])
def test_no_row_is_torn(n_kills: int) -> None:
    ring, context = make_ring(N_WRITERS), multiprocessing.get_context("fork")
    transitions = TransitionReader(ring, WindowReader(ring, 1, 1.0, resumes=True), None)
    places, rng = DrawIndex(ring, transitions), np.random.default_rng(0)

    def start(writer: int) -> Any:
        process = context.Process(target=_write_for_ever, args=(ring, writer), daemon=True)
        process.start()
        return process

    writers, n_read, n_redrawn = [start(writer) for writer in range(N_WRITERS)], 0, 0
    try:
        kill_at = [int(n) for n in np.linspace(0, N_READ, n_kills + 2)[1:-1]]
        while n_read < N_READ:
            if kill_at and n_read >= kill_at[0]:
                writer = kill_at.pop(0) % N_WRITERS
                os.kill(writers[writer].pid, signal.SIGKILL)
                writers[writer].join()
                writers[writer] = start(writer)
            low, high = places.bounds()
            if high <= low:
                continue
            index = rng.integers(low, high, AT_ONCE)
            fields = transitions.read(index)
            if fields is None or not transitions.eligible(index).all() or ring.first * ring.B > index.min():
                n_redrawn += 1
                continue
            n_read += len(index)
            assert (fields["observation"] == index[:, None]).all()
            assert (fields["action"] == index).all()
            after = np.where(index % 5 == 0, -index, index + ring.B)
            assert (fields["next_observation"] == after[:, None]).all()
    finally:
        for process in writers:
            process.kill()
            process.join()
            process.close()
    assert n_redrawn > 0, "otherwise nothing was tested"


def test_each_writer_owns_whole_columns() -> None:
    ring_of = make_ring(3)
    for n_writers in (1, 2, 3, 4):
        ring = make_ring(n_writers)
        owned = [ring.columns(writer) for writer in range(n_writers)]
        assert [b for columns in owned for b in range(ring.B)[columns]] == [0, 1, 2, 3]
    assert [columns.stop - columns.start for columns in (ring_of.columns(0), ring_of.columns(2))] == [2, 1]


def test_what_a_dead_writer_has_begun_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = make_ring(2)
    T, most = ring.T, ring.shape.max_finals
    for start in range(0, T, 8):
        for writer in range(2):
            ring.write(*rows_of(ring, writer, start, 8), writer)
    flags = ring.flags[: 20 * ring.B]
    truncated = np.flatnonzero(flags & TRUNCATED)
    assert ring.has_final(truncated).all()
    ring.arrays.done[1, 1] = ring.arrays.begun[1, 1] = most  # as if it had written so many final observations
    ring.final[truncated[truncated % 4 >= 2]] = 0

    def die(*_: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(ring_module, "copy_rows", die)
    with pytest.raises(KeyboardInterrupt):
        ring.write(*rows_of(ring, 1, T, 8), 1)
    assert (ring.first, ring.end) == (8, T)
    assert ring.has_final(truncated).tolist() == (truncated % 4 < 2).tolist()


def test_final_observations_that_a_dead_writer_has_overwritten_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(Shape(64, 1, np.zeros(1), np.zeros((), np.int64), max_finals=4), shared=True)
    fences, fence = [0], ring_module.fence

    def write(n_truncated: int) -> None:
        """Eight rows, of which the first ones are truncated."""
        flags = np.full((8, 1), VALID, np.uint8)
        flags[:n_truncated] |= TRUNCATED
        step = ring.written(0) + np.arange(8)[:, None]
        rows = flags, step.astype(np.float32), np.zeros((8, 1), np.int32), step[..., None].astype(np.float64), step
        ring.write(rows, -rows[3][:n_truncated, 0])

    def die_before_done() -> None:
        fence()
        fences[0] += 1
        if fences[0] == 2:
            raise KeyboardInterrupt

    write(4)
    at = np.arange(4)
    assert ring.has_final(at).all()
    monkeypatch.setattr(ring_module, "fence", die_before_done)
    with pytest.raises(KeyboardInterrupt):
        write(3)  # in place of the first three
    monkeypatch.undo()
    assert ring.has_final(at).tolist() == [False, False, False, True]
    write(1)  # what the writer does that takes its place
    assert ring.has_final(at).tolist() == [False, False, False, True]
    assert ring.has_final(np.array([8])).all()
    assert ring.final_obs(np.array([3, 8])).tolist() == [[-3], [-8]]
    arrays, n_finals, most = of_one_writer(ring)
    kept = arrays.final.reshape(-1)[[0, 1, 2, 3, 8]]
    assert (kept >= n_finals - most).tolist() == [False, False, False, True, True]


@pytest.mark.parametrize("n_after", [0, 1, 5])
def test_what_a_dead_writer_has_begun_is_never_counted_as_lost(n_after: int) -> None:
    """`n_after` truncations are in the batch that another writer collects in its place."""
    ring = Ring(Shape(90, 2, np.zeros(3, np.float32), np.int64(0), max_finals=180))

    def write(n_truncated: int) -> None:
        flags = np.full((8, 2), VALID, np.uint8)
        flags.reshape(-1)[:n_truncated] |= TRUNCATED
        zeros = (np.zeros((8, 2, *of), kind) for kind, of in (("f4", ()), ("i4", ()), ("f4", (3,)), ("i8", ())))
        ring.write((flags, *zeros), np.zeros((n_truncated, 3), np.float32) if n_truncated else None)

    for _ in range(60):
        write(4)
    done = ring.arrays.done.copy()
    write(5)
    ring.arrays.done[...] = done  # as if it had been killed before it said so
    for n_truncated in (n_after, *[4] * 60):
        write(n_truncated)
        assert ring.n_lost == 0, "there is room for every step of the ring"


def test_what_one_writer_lacks_nobody_reads() -> None:
    ring = make_ring(2)
    ring.write(*rows_of(ring, 0, 0, 8), 0)
    assert (ring.first, ring.end) == (0, 0)
    ring.write(*rows_of(ring, 1, 0, 5), 1)
    assert (ring.first, ring.end) == (0, 5)
    for start in range(8, ring.T + 8, 8):
        ring.write(*rows_of(ring, 0, start, 8), 0)
    assert (ring.first, ring.end) == (8, 5)


def test_a_final_observation_that_is_not_drawn_any_more_is_counted_as_lost() -> None:
    ring = make_ring(1, T=64, max_finals=10, spare_finals=4)
    for start in range(0, 32, 2):
        ring.write(*rows_of(ring, 0, start, 2), 0)
        n_truncated = len(range(0, ring.end * ring.B, 5))  # every fifth step, see rows_of
        assert ring.n_lost == max(0, n_truncated - 6)
    ring.memory.close()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4)])
def test_the_newest_final_observations_move_to_other_writers(before: int, after: int) -> None:
    old, new = make_ring(before, T=64, max_finals=12), make_ring(after, T=64, max_finals=4)
    for start in range(0, 80, 8):
        for writer in range(before):
            old.write(*rows_of(old, writer, start, 8), writer)
    move(old, new)
    assert (new.first, new.end) == (old.first, old.end) == (16, 80)
    positions = np.arange(16 * 4, 80 * 4)
    truncated = positions[positions % 5 == 0]
    kept = truncated[old.has_final(truncated % old.size)]
    assert len(kept) == 12 * before
    if before > 1:
        assert of_one_writer(old)[1:] == (len(kept), 12 * before)
    columns = [new.columns(writer) for writer in range(after)]
    own = [[int(at) for at in kept if at % 4 in range(4)[part]][-4:] for part in columns]
    found = truncated[new.has_final(truncated % new.size)]
    assert found.tolist() == sorted(at for part in own for at in part)
    assert (new.final_obs(found % new.size) == -found[:, None]).all()
    for ring in (old, new):
        ring.memory.close()


def test_a_writer_knows_which_batches_it_has_written() -> None:
    """A worker that replaces another collects only the batches that are missing."""
    stream, replay = Stream(0, 2), Replay(100)
    for n_batches in range(3):
        if n_batches:
            replay.append(stream.batch(5))
            appender = storage_of(replay).appender
            assert [appender.has_batch(number, 5) for number in range(3)] == [number < n_batches for number in range(3)]
