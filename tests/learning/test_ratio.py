"""Ratio: the number of draws stays near its target, and no setting stalls."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import ConfigError
from penstock.learning import Ratio

from ..scale import examples

RATES = st.one_of(st.sampled_from([0.01, 0.1, 0.3, 1.0, 8.0, 256.0]), st.floats(1e-3, 300.0))


class Counts:
    """A replay as far as the ratio sees it."""

    def __init__(self, n_needed: int) -> None:
        self.n_steps = self.n_drawn = 0
        self.n_needed = n_needed  # steps until there is something to draw

    @property
    def is_ready(self) -> bool:
        return self.n_steps >= self.n_needed


def test_the_limits_hold_from_the_last_of_the_min_steps_on() -> None:
    ratio, replay = Ratio(8.0, batch_steps=10, batch_size=10, min_steps=20, slack=45), Counts(0)
    found = []
    for replay.n_steps in (10, 19, 20, 21):
        found.append((ratio.may_append(replay), ratio.may_sample(replay)))  # type: ignore[arg-type]
    assert found == [(True, False), (True, False), (False, True), (False, True)]


@examples(25, 1000)
@given(data=st.data())
def test_no_setting_stalls_and_the_draws_stay_within_the_slack(data: st.DataObject) -> None:
    """As `AsyncSampler` does it: up to `n_slots` batches are begun, and become complete at any time. With one slot it
    is a loop that appends and samples in turn."""
    bounds = (1, 2000), (1, 2000), (0, 5000), (1, 8), (1, 10), (0, 2**32)
    batch_steps, batch_size, min_steps, n_slots, n_needed, seed = (data.draw(st.integers(*each)) for each in bounds)
    samples_per_step, p_worker = data.draw(RATES), data.draw(st.sampled_from([0.02, 0.5, 0.98]))
    slack = (samples_per_step * batch_steps + batch_size) / 2 + data.draw(st.sampled_from([0.0, 1e-9, 1.0, 1e4]))
    ratio = Ratio(samples_per_step, batch_steps, batch_size, min_steps, slack)
    replay, rng, n_begun = Counts(n_needed * batch_steps), np.random.default_rng(seed), 0
    for _ in range(400):
        n_open = n_begun - replay.n_steps // batch_steps
        while n_open < n_slots and ratio.may_append(replay, n_begun * batch_steps):  # type: ignore[arg-type]
            n_begun, n_open = n_begun + 1, n_open + 1
        may_draw = ratio.may_sample(replay)  # type: ignore[arg-type]
        assert n_open or may_draw, "nobody may go on"
        if n_open and (rng.random() < p_worker or not may_draw):
            replay.n_steps += batch_steps
        else:
            replay.n_drawn += batch_size
        if replay.n_steps > max(min_steps, replay.n_needed) + batch_steps and replay.n_drawn:
            late = max(replay.n_needed - min_steps, 0) * samples_per_step  # while nothing could be drawn
            assert -slack - 1e-6 <= ratio.behind(replay) <= slack + late + 1e-6  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 1), "samples_per_step"),
        ((-1, 1, 1), "samples_per_step"),
        ((1, 0, 1), "batch_steps"),
        ((1, 1, 0), "batch_size"),
        ((1, 1, 1, -1), "min_steps"),
        ((8, 512, 256, 0, 2175.9), "at least half of their sum, 2176"),
        ((1, 1, 1, 0, float("nan")), "slack"),
    ],
)
def test_impossible_settings_are_refused(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Ratio(*arguments)  # type: ignore[arg-type]
    Ratio(8, 512, 256, 0, 2176)


@examples(25, 1000)
@given(RATES, st.integers(1, 2000), st.integers(1, 2000), st.integers(0, 99))
def test_exactly_the_slacks_that_cannot_stall_are_accepted(
    samples_per_step: float, batch_steps: int, batch_size: int, seed: int
) -> None:
    """Whatever the counts are, for example after `Replay.load`, one side may go on. With less slack both would wait."""
    worth, rng = samples_per_step * batch_steps, np.random.default_rng(seed)
    least, middle, replay = (worth + batch_size) / 2, (batch_size - worth) / 2, Counts(0)
    ratio = Ratio(samples_per_step, batch_steps, batch_size, 0, least)
    with pytest.raises(ConfigError, match="slack"):
        replace(ratio, slack=least * (1 - 1e-6))
    for near in (0.0, *rng.uniform(-2, 2, 20)):
        replay.n_steps = int(rng.integers(0, 10**6))
        replay.n_drawn = replay.n_steps * samples_per_step - middle - near * worth  # type: ignore[assignment]
        may = [ratio.may_append(replay), ratio.may_sample(replay)]  # type: ignore[arg-type]
        assert any(may), "nobody may go on"
        # Both may go on at a single point only, so with less slack nobody may go on there.
        assert sum(may) == 1 or abs(ratio.behind(replay) - middle) < 1e-6  # type: ignore[arg-type]


def test_a_ratio_without_the_sizes_is_for_samplers_only() -> None:
    replay = Counts(1)
    for ratio in (Ratio(1), Ratio(1, 10), Ratio(1, batch_size=10)):
        for call in (ratio.may_append, ratio.may_sample):
            with pytest.raises(ConfigError, match="needs batch_steps and batch_size"):
                call(replay)  # type: ignore[arg-type]
