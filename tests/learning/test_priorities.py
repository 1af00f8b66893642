"""Draws by priority: probabilities, weights, new steps, and steps that were overwritten."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import ConfigError, SamplerStateError
from penstock.learning import Prioritized, Replay, priorities
from penstock.learning import position_draws as drawing
from penstock.learning.priorities import PriorityDraw
from penstock.learning.ring import Ring

from .streams import DISCOUNT, Stream, storage_of
from .test_drawing import p_value


def prioritized_replay(
    seed: int = 0, *, T: int = 50, n: int = 3, p_end: float = 0.1, **options: float
) -> tuple[Stream, Replay]:
    stream = Stream(seed, 2, p_end=p_end, wait=True)
    replay = Replay(2 * T, n, DISCOUNT, Prioritized(**options), max_truncations=2 * T, seed=seed)
    return stream, replay


def draw_of(replay: Replay) -> PriorityDraw:
    draw = storage_of(replay).draw
    assert isinstance(draw, PriorityDraw)
    return draw


@pytest.mark.parametrize("alphas", [(0.7,), (0.7, 0.3), (0.7, 1.0), (0.7, 0.2, 1.3, 0.5)])
def test_draws_are_in_proportion_to_the_power_of_the_priority(alphas: tuple[float, ...], tmp_path: Path) -> None:
    """An alpha that is set later counts for all steps."""
    stream, replay = prioritized_replay(alpha=alphas[0])
    for _ in range(30):
        replay.append(stream.batch(7))
    index = replay.contents.index
    priority = np.random.default_rng(0).exponential(size=len(index)) + 0.01
    replay.update(index, priority)
    for alpha in alphas[1:]:
        replay.alpha = alpha
    n, alpha = len(index) // 3, alphas[-1]
    priority[:n] *= 2  # some get a new priority after that, the others keep the old one
    replay.update(index[:n], priority[:n])
    replay.save(tmp_path)
    expected = priority**alpha / (priority**alpha).sum()
    for each in (replay, Replay.load(tmp_path)):
        assert each.alpha == alpha
        np.testing.assert_allclose(draw_of(each).leaves()[index - draw_of(each).low], priority**alpha, rtol=1e-12)
        drawn = torch.cat([each.sample(1000).index for _ in range(60)]).numpy()
        counts = np.bincount(drawn, minlength=index.max() + 1)[index]
        assert counts.sum() == 60_000
        assert p_value(counts, expected * 60_000) > 1e-3


def test_an_alpha_of_zero_keeps_the_priorities(tmp_path: Path) -> None:
    stream, replay = prioritized_replay(alpha=0.7)
    replay.alpha = 0.5  # there are no steps yet
    replay.append(stream.batch(40))
    index, draw = replay.contents.index, draw_of(replay)
    replay.update(index, np.arange(1.0, len(index) + 1))
    with pytest.raises(ConfigError, match=r"with alpha=1000.0, some priorities .* choose a smaller alpha"):
        replay.alpha = 1000
    for wrong in (-1, np.nan, "a", None):
        with pytest.raises(ConfigError, match="alpha must be a finite number"):
            replay.alpha = wrong
    assert replay.alpha == 0.5
    assert np.allclose(draw.tree.leaves[index % 100], np.arange(1.0, len(index) + 1) ** 0.5)
    priority = np.arange(1.0, len(index) + 1)
    replay.alpha = 0.0
    assert replay.alpha == 0.0
    np.testing.assert_allclose(replay.contents.probability, 1 / len(index), rtol=1e-8)
    priority[::3] = 1e4 / priority[::3]  # those that are updated now, and the others
    replay.update(index[::3], priority[::3])
    np.testing.assert_allclose(replay.contents.probability, 1 / len(index), rtol=1e-7)
    assert (replay.sample(200).weight == 1).all()
    replay.save(tmp_path)
    for each in (replay, Replay.load(tmp_path)):
        each.alpha = torch.tensor(0.5)  # type: ignore[assignment]
        np.testing.assert_allclose(each.contents.probability, priority**0.5 / (priority**0.5).sum(), rtol=1e-5)


def test_weights_follow_the_formula() -> None:
    stream, replay = prioritized_replay(alpha=0.7, beta=0.4)
    replay.append(stream.batch(50))
    index = replay.contents.index
    priority = np.random.default_rng(0).exponential(size=len(index)) + 0.1
    replay.update(torch.from_numpy(index), torch.from_numpy(priority))
    for beta in (0.4, 1.0):
        replay.beta = beta
        batch = replay.sample(64)
        p = dict(zip(index, priority**0.7 / (priority**0.7).sum(), strict=True))
        weight = np.array([(len(index) * p[i]) ** -beta for i in batch.index.tolist()])
        np.testing.assert_allclose(batch.weight, weight / weight.max(), rtol=1e-5)
        assert batch.weight.dtype == torch.float32


def test_every_eligible_step_and_no_other_has_a_leaf() -> None:
    stream, replay = prioritized_replay(T=23)
    rng = np.random.default_rng(0)
    for _ in range(60):
        for _ in range(int(rng.integers(1, 4))):  # sometimes the whole ring is overwritten
            replay.append(stream.batch(int(rng.integers(1, 20))))
        draw = draw_of(replay)
        draw.catch_up()
        index = replay.contents.index
        leaves = draw.tree.leaves
        assert sorted(np.flatnonzero(leaves)) == sorted(index % len(leaves))
        if len(index):
            replay.update(replay.sample(9).index, rng.random(9) + 0.1)


@pytest.mark.parametrize("name", ["first", "end"])
def test_rows_may_be_written_while_the_bounds_are_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, replay = prioritized_replay(T=20)
    replay.append(stream.batch(20))
    draw, read, waiting = draw_of(replay), getattr(Ring, name).fget, []

    def read_and_write(ring: Ring) -> int:
        value: int = read(ring)
        if waiting:
            replay.append(waiting.pop())
        return value

    monkeypatch.setattr(Ring, name, property(read_and_write))
    for _ in range(20):
        waiting.append(stream.batch(7))
        draw.catch_up()
        assert not waiting
        assert 0 <= draw.high - draw.low <= 2 * 20
        replay.update(np.arange(draw.low, draw.high), np.ones(draw.high - draw.low))
    draw.catch_up()
    leaves = draw.tree.leaves
    assert sorted(np.flatnonzero(leaves)) == sorted(replay.contents.index % len(leaves))


def test_new_steps_get_the_largest_live_priority_which_sinks() -> None:
    stream, replay = prioritized_replay(T=40, n=1, p_end=0.0, alpha=1.0)
    replay.append(stream.batch(20))
    draw = draw_of(replay)
    draw.catch_up()
    assert set(draw.tree.leaves[: 19 * 2]) == {1.0}, "without any priority, the first is 1"
    replay.update(np.arange(38), np.full(38, 2.0))
    replay.update(np.array([5]), np.array([50.0]))
    replay.append(stream.batch(10))
    draw.catch_up()
    assert set(draw.tree.leaves[38:58]) == {50.0}
    replay.update(np.arange(38, 58), np.full(20, 3.0))
    replay.append(stream.batch(13))  # overwrites steps 0 to 2, and with them index 5
    draw.catch_up()
    assert draw.tree.leaves[58] == 3.0
    assert draw.tree.largest == 3.0


def test_an_update_for_overwritten_steps_changes_nothing_and_is_counted() -> None:
    stream, replay = prioritized_replay(T=40, p_end=0.0)
    replay.append(stream.batch(40))
    batch = replay.sample(64)
    replay.append(stream.batch(20))
    draw = draw_of(replay)
    draw.catch_up()
    before = draw.tree.leaves.copy()
    stale = batch.index < 20 * 2
    assert stale.any()
    assert not stale.all()
    replay.update(batch.index[stale], torch.full((int(stale.sum()),), 99.0))
    assert replay.n_stale == int(stale.sum())
    np.testing.assert_array_equal(draw.tree.leaves, before)
    replay.update(batch.index, torch.full((64,), 99.0))
    assert replay.n_stale == 2 * int(stale.sum())
    changed = np.flatnonzero(draw.tree.leaves != before)
    assert set(changed) == {int(i) % 80 for i in batch.index[~stale]}


def test_a_step_with_an_error_of_zero_is_drawn_again() -> None:
    stream, replay = prioritized_replay(T=40, p_end=0.0)
    replay.append(stream.batch(30))
    index = replay.contents.index
    replay.update(index, np.zeros(len(index)))
    assert set(replay.sample(4000).index.tolist()) == set(index.tolist())
    replay.update(index[1:], np.full(len(index) - 1, 1e-3))
    drawn = torch.cat([replay.sample(10_000).index for _ in range(20)])
    share = 1e-6**0.6 / (1e-6**0.6 + 1e-3**0.6 * (len(index) - 1))
    assert 0.5 < (drawn == index[0]).float().mean() / share < 1.5


def test_with_a_least_priority_of_zero_a_priority_of_zero_is_not_drawn_and_can_be_raised_again() -> None:
    stream, replay = prioritized_replay(T=40, p_end=0.0, min_priority=0.0)
    replay.append(stream.batch(30))
    index = replay.contents.index
    replay.update(index, np.zeros(len(index)))
    with pytest.raises(SamplerStateError, match="all priorities are 0"):
        replay.sample(1)
    replay.update(index[3:4], np.ones(1))
    assert set(replay.sample(9).index.tolist()) == {int(index[3])}


def test_lost_final_observations_are_not_drawn() -> None:
    stream = Stream(0, 2, p_end=0.3)
    replay = Replay(200, 2, DISCOUNT, Prioritized(), max_truncations=8, seed=0)
    replay.append(stream.batch(6))
    with pytest.warns(RuntimeWarning, match="max_truncations"):
        replay.append(stream.batch(60))
    for _ in range(20):
        assert set(replay.sample(64).index.tolist()) <= set(replay.contents.index.tolist())


@pytest.mark.parametrize(
    ("index", "priority", "message"),
    [
        ([1], [-1.0], "at least 0"),
        ([1], [np.nan], "finite"),
        ([1], [np.inf], "finite"),
        ([10_000, -1], [1.0, 1.0], "index 10000 was never drawn"),
        ([3, -1], [1.0, 1.0], "index -1 was never drawn"),
        ([1, 2], [1.0], "2 indices and 1 priorities"),
        ([1], "x", r"priority must be a tensor or an array of numbers \[N\], got array\('x'"),
        (["a"], [1.0], "index must be a tensor or an array of numbers"),
    ],
)
def test_wrong_updates_are_refused(index: Any, priority: Any, message: str) -> None:
    stream, replay = prioritized_replay()
    replay.append(stream.batch(2))
    with pytest.raises(ConfigError, match="index 0 was never drawn"):  # no window is complete
        replay.update(np.array([0]), np.ones(1))
    replay.append(stream.batch(20))
    with pytest.raises(ConfigError, match=message):
        replay.update(np.array(index), np.array(priority))


@pytest.mark.parametrize(("alpha", "priority"), [(1.0, 1e308), (1.0, 1e295), (40.0, 1e10)])
def test_priorities_whose_powers_or_sum_would_overflow_are_refused(alpha: float, priority: float) -> None:
    stream, replay = prioritized_replay(alpha=alpha)
    replay.append(stream.batch(20))
    draw_of(replay).catch_up()
    before = draw_of(replay).leaves()
    cause = rf"must be at most 1e\+290, but the priority is {re.escape(f'{priority:g}')} and alpha={alpha:g}: divide"
    with pytest.raises(ConfigError, match=cause):
        replay.update(np.arange(8), np.full(8, priority))
    np.testing.assert_array_equal(draw_of(replay).leaves(), before)
    replay.update(np.arange(8), np.full(8, 1e290 ** (1 / alpha) * (1 - 1e-12)))
    assert len(set(replay.sample(100).index.tolist())) > 1


def test_what_needs_priorities_says_so() -> None:
    stream, replay = Stream(0, 2), Replay(200, max_truncations=200)
    replay.append(stream.batch(9))
    with pytest.raises(ConfigError, match="prioritized=Prioritized"):
        replay.update(np.arange(2), np.ones(2))
    stream, replay = prioritized_replay()
    replay.append(stream.batch(9))
    with pytest.raises(ConfigError, match="without priorities"):
        replay.sample(1, newer_than=0)
    for wrong in (-1.0, "a", np.nan, np.inf, True, 1j, 10**400):
        with pytest.raises(ConfigError, match="beta must be a finite number of at least 0"):
            replay.beta = wrong  # type: ignore[assignment]
    assert replay.beta == 0.4
    for options in ({"alpha": -1.0}, {"beta": "a"}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            Prioritized(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [1.0, 0.0])
def test_the_first_and_the_last_index_that_count_are_exact_and_the_largest_priority_counts(other: float) -> None:
    stream, replay = prioritized_replay(T=40, n=1, p_end=0.0, min_priority=0.0, alpha=1.0)
    for _ in range(5):
        replay.append(stream.batch(10))
    # Steps 10 to 49 are in the ring. Step 49 has no next one yet.
    replay.update(np.array([19, 50]), np.array([1.0, other]))
    assert replay.n_stale == 1
    replay.update(np.array([20, 97, 50]), np.array([1.0, 1.0, other]))
    assert replay.n_stale == 1
    assert (draw_of(replay).tree.leaves == 0).sum() == 2 + (other == 0)
    with pytest.raises(ConfigError, match="never drawn"):
        replay.update(np.array([98, 50]), np.array([1.0, other]))
    replay.update(np.array([24, 27, 24, 24, 50]), np.array([2.0, 1.0, 9.0, 3.0, other]))
    assert draw_of(replay).tree.leaves[[24, 27]].tolist() == [9, 1]


@pytest.mark.parametrize("prioritized", [None, Prioritized()])
def test_places_that_were_overwritten_or_are_not_eligible_are_drawn_again(prioritized: Prioritized | None) -> None:
    stream = Stream(0, 2, p_end=0.1, wait=True)
    replay = Replay(100, 2, DISCOUNT, prioritized, max_truncations=100)
    for _ in range(9):
        replay.append(stream.batch(20))
    storage = storage_of(replay)
    low, high = storage.places.bounds()
    found, rng = replay.contents.index, np.random.default_rng(0)
    bad = np.setdiff1d(np.arange(low - 100, high), found)
    assert (bad >= low).any()
    places = np.concatenate([found, np.resize(bad, 4000)])
    again = storage.draw.redraw(places, rng, None)
    assert again[: len(found)].tolist() == found.tolist(), "these stay as they are"
    assert set(again[len(found) :]) == set(found)


@pytest.mark.parametrize("prioritized", [None, Prioritized()])
def test_a_place_that_was_overwritten_is_not_replaced_by_the_oldest_one(prioritized: Prioritized | None) -> None:
    stream = Stream(0, 2, p_end=0.0)
    replay = Replay(100, 1, DISCOUNT, prioritized)
    for _ in range(3):
        replay.append(stream.batch(40))
    storage = storage_of(replay)
    low, _ = storage.places.bounds()
    found = storage.draw.redraw(np.full(4000, low - 2), np.random.default_rng(0), None)
    assert (found == low).mean() < 0.1


def test_a_writer_may_overwrite_rows_while_others_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, replay = prioritized_replay(T=40, n=1, p_end=0.0)
    replay.append(stream.batch(40))
    draw = draw_of(replay)
    draw.catch_up()
    waiting, draw_more = [stream.batch(10)], draw.draw

    def write_and_draw(*args: Any) -> Any:
        if waiting:
            replay.append(waiting.pop())
        return draw_more(*args)

    monkeypatch.setattr(draw, "draw", write_and_draw)
    # Place 78 has no next step yet. While it is drawn again, places 2 and 4 are overwritten by steps 41 and 42.
    found = draw.redraw(np.array([2, 78, 4]), np.random.default_rng(0), None)
    assert (found >= draw.low).all()
    assert sorted(np.flatnonzero(draw.tree.leaves)) == sorted(replay.contents.index % 80)


@pytest.mark.parametrize("n_at_once", [1, 7, 30])
def test_many_places_are_examined_in_parts(n_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, replay = prioritized_replay(T=23)
    replay.append(stream.batch(23))
    whole = replay.contents.index.tolist()
    for module in (drawing, priorities):
        monkeypatch.setattr(module, "AT_ONCE", n_at_once)
    assert replay.contents.index.tolist() == whole
    draw_of(replay).catch_up()
    assert np.flatnonzero(draw_of(replay).tree.leaves).tolist() == whole


def test_priorities_move_to_the_workers_of_a_sampler() -> None:
    stream, replay = prioritized_replay()
    for _ in range(10):
        replay.append(stream.batch(7))
    index = replay.contents.index
    replay.update(index, np.random.default_rng(0).exponential(size=len(index)))
    before = draw_of(replay)
    replay.feed_from(storage_of(replay), stream.batch(7), [range(1), range(1, 2)], rows_ahead=0)
    after = draw_of(replay)
    assert after is not before
    assert (after.low, after.high) == (before.low, before.high)
    assert np.array_equal(after.leaves(), before.leaves())
    assert len(set(after.leaves())) > 50
