"""`replay.contents`: the rows that a replay holds, and every batch that it could give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock import ConfigError, SamplerStateError
from penstock.learning import Frames, Prioritized, Replay, ReplayBatch, SequenceBatch, Sequences

from ..support import assert_same
from .streams import DISCOUNT, Stream


def filled(stream: Stream, *, n_batches: int = 9, **options: Any) -> Replay[Any]:
    """The newest 40 rows of 63."""
    replay = Replay(40 * stream.B, 2, DISCOUNT, max_truncations=999, seed=0, **options)
    for _ in range(n_batches):
        replay.append(stream.batch(7))
    return replay


def test_rows_are_those_that_were_appended_last() -> None:
    stream = Stream(0, 3)
    contents = filled(stream).contents
    assert contents.shape == (40, 3)
    assert contents.steps == range(23, 63)
    rows = contents.rows()
    for name in ("action", "reward", "terminated", "truncated", "valid", "begins", "policy_version"):
        assert rows[name].shape == (40, 3), name
    wanted = [[stream.history[b][step] for b in range(3)] for step in contents.steps]
    assert rows.action.tolist() == [[row.number for row in line] for line in wanted]
    assert rows.terminated.tolist() == [[row.terminated for row in line] for line in wanted]
    assert not rows.is_partial.any()
    assert_same(contents.rows(1), rows[:, 1])
    assert_same(contents.rows(slice(1, 3)), rows[:, 1:3])


def test_what_is_read_is_a_copy() -> None:
    replay = filled(Stream(0, 2))
    before = replay.contents.rows()
    replay.contents.rows().reward[:] = -99
    assert_same(replay.contents.rows(), before)


@pytest.mark.parametrize(
    ("options", "batch_cls"),
    [({}, ReplayBatch), ({"frames": Frames(3)}, ReplayBatch), ({"sequences": Sequences(5, 1, 2)}, SequenceBatch)],
    ids=["transitions", "frames", "sequences"],
)
def test_a_batch_that_is_drawn_is_the_one_that_can_be_read(options: dict[str, Any], batch_cls: type) -> None:
    replay = filled(Stream(0, 3, frames=options.get("frames")), **options)
    index = replay.contents.index
    assert index.dtype == np.int64
    assert (np.diff(index) > 0).all()
    drawn = replay.sample(2000)
    assert set(drawn.index.tolist()) == set(index.tolist())
    again = replay.contents.read(drawn.index)
    assert type(again) is batch_cls
    assert_same(again, drawn)
    assert "weight" not in drawn, "there are no priorities"
    assert replay.n_drawn == 2000, "to read is not to draw"


@pytest.mark.parametrize("prioritized", [None, Prioritized(alpha=0.5)])
def test_probabilities_are_those_of_the_next_draw(prioritized: Prioritized | None) -> None:
    replay = filled(Stream(0, 3), prioritized=prioritized)
    contents, priority = replay.contents, np.ones(len(replay.contents.index))
    np.testing.assert_allclose(contents.probability, priority / len(priority))
    if prioritized:
        priority[:10] = 100
        replay.update(contents.index, priority)
        np.testing.assert_allclose(contents.probability, priority**0.5 / (priority**0.5).sum())


def test_positions_that_cannot_be_drawn_are_named() -> None:
    stream = Stream(0, 3)
    contents = filled(stream).contents
    low, high = contents.steps.start * 3, contents.steps.stop * 3
    for position in (-1, low - 1, high - 1, high, 10**9):
        with pytest.raises(ConfigError, match=f"position {position} cannot be drawn"):
            contents.read([contents.index[0], position])
    samples = stream.batch(7)
    samples.env.valid[1:3] = False
    replay = Replay[Any](99)
    replay.append(samples)
    with pytest.raises(ConfigError, match="position 3 cannot be drawn"):
        replay.contents.read([replay.contents.index[0], 3])


def test_there_is_nothing_before_the_first_batch() -> None:
    with pytest.raises(SamplerStateError, match=r"replay\.contents came before the first replay\.append"):
        _ = Replay(100).contents
