"""What a replay holds, and its draws: every eligible position, with the same probability, and only these."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from penstock import ConfigError, SamplerStateError
from penstock.learning import Frames, Prioritized, Replay, ReplayBatch, SequenceBatch, Sequences

from ..support import assert_same
from .streams import DISCOUNT, Stream


def p_value(counts: Any, expected: Any) -> float:
    """Of the chi-square test that `counts` were drawn in proportion to `expected`, by Wilson and Hilferty's formula."""
    degrees = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    spread = 2 / (9 * degrees)
    return 0.5 * math.erfc(((statistic / degrees) ** (1 / 3) - 1 + spread) / math.sqrt(2 * spread))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("n_batches", "wait"), [(2, False), (30, False), (30, True)])
def test_draws_are_uniform_over_the_eligible_positions(seed: int, n_batches: int, wait: bool) -> None:
    stream = Stream(seed, 3, wait=wait, p_end=0.1, p_restart=0.1)
    replay = Replay(300, 3, DISCOUNT, max_truncations=300, seed=seed)
    for _ in range(n_batches):
        replay.append(stream.batch(7))
    eligible = replay.contents.index
    drawn = torch.cat([replay.sample(1000).index for _ in range(60)]).numpy()
    found, counts = np.unique(drawn, return_counts=True)
    assert found.tolist() == eligible.tolist()
    assert p_value(counts, 60_000 / len(eligible)) > 1e-3
    assert replay.n_drawn == 60_000


def test_a_single_eligible_position_is_found_among_many() -> None:
    stream = Stream(0, 1, p_end=0.0)
    replay = Replay(5000)
    for k in range(49):
        samples = stream.batch(100)
        samples.env.valid[:] = False
        if k == 20:
            samples.env.valid[50] = samples.env.terminated[50] = True
        replay.append(samples)
    assert set(replay.sample(10).index.tolist()) == {2050}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_first_and_the_last_of_few_eligible_positions_are_drawn_as_often(seed: int) -> None:
    """Most draws must be repeated here."""
    replay, samples = Replay(60, seed=seed), Stream(0, 1, p_end=0.0).batch(40)
    samples.env.valid[:] = False
    for t in (0, 20, 38):
        samples.env.valid[t] = samples.env.terminated[t] = True
    replay.append(samples)
    found, counts = np.unique(replay.sample(30_000).index.numpy(), return_counts=True)
    assert found.tolist() == [0, 20, 38]
    assert p_value(counts, 10_000) > 1e-3


def test_only_newer_versions_are_drawn_if_asked() -> None:
    stream, replay = Stream(0, 2, p_end=0.1), Replay(400, 2, max_truncations=400, seed=0)
    for version in range(30):
        # Column 1 is one version behind.
        replay.append(stream.batch(10), policy_version=np.array([version + 1, version]))
    eligible = replay.contents.index
    for newer_than in (0, 15, 20, 28):
        index = replay.sample(4000, newer_than=newer_than).index.numpy()
        version = index // 2 // 10 + 1 - index % 2
        wanted = [i for i in eligible if i // 2 // 10 + 1 - i % 2 > newer_than]
        assert (version > newer_than).all()
        assert set(index) == set(wanted)
    with pytest.raises(SamplerStateError, match="newer than version 30"):
        replay.sample(1, newer_than=30)
    with pytest.raises(ConfigError, match="must not fall"):
        replay.append(stream.batch(10), policy_version=3)


def test_a_batch_can_reuse_the_memory_of_another() -> None:
    stream = Stream(0, 2, nested=True)
    replay, twin = (Replay(200, 2, max_truncations=200, seed=1) for _ in range(2))
    samples = stream.batch(40)
    for each in (replay, twin):
        each.append(samples)
    first, again = replay.sample(8), None
    twin.sample(8)
    address = first.observation.x.data_ptr()
    again, wanted = replay.sample(8, out=first), twin.sample(8)
    assert again.observation.x.data_ptr() == address
    assert_same(again, wanted)


def test_a_batch_is_not_overwritten() -> None:
    stream, replay = Stream(0, 2), Replay(20, max_truncations=20, seed=0)
    replay.append(stream.batch(10))
    batch = replay.sample(8)
    kept = batch.copy()
    for _ in range(10):
        replay.append(stream.batch(7))
        replay.sample(8)
    assert_same(batch, kept)


def test_too_early_calls_name_the_one_that_is_missing() -> None:
    replay = Replay(100, 3, max_truncations=9)
    with pytest.raises(SamplerStateError, match="before the first replay"):
        replay.sample(1)
    with pytest.raises(SamplerStateError, match=r"replay\.contents came before the first replay\.append"):
        _ = replay.contents
    assert (len(replay), replay.n_steps, replay.is_ready, replay.nbytes) == (0, 0, False, 0)
    stream = Stream(0, 2)
    replay.append(stream.batch(3))
    assert not replay.is_ready
    with pytest.raises(SamplerStateError, match="nothing is complete"):
        replay.sample(1)
    replay.append(stream.batch(1))
    assert replay.is_ready
    assert (len(replay), replay.n_steps) == (8, 8)
    replay.sample(1)


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
