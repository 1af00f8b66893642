"""Ratio: the number of draws stays near its target, and no setting stalls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import ConfigError
from penstock.replays import Ratio, Replay

from .streams import Stream


class Counts:
    """A replay as far as the ratio sees it."""

    def __init__(self, n_needed: int) -> None:
        self.n_steps = self.n_drawn = 0
        self.n_needed = n_needed  # steps until there is something to draw

    @property
    def is_ready(self) -> bool:
        return self.n_steps >= self.n_needed


@given(
    samples_per_step=st.sampled_from([0.01, 0.3, 1.0, 8.0, 256.0]),
    batch_steps=st.integers(1, 2000),
    batch_size=st.integers(1, 2000),
    min_steps=st.integers(0, 5000),
    extra=st.sampled_from([0.0, 1.0, 1e4]),
    preference=st.sampled_from(["append", "sample", "random"]),
)
@settings(max_examples=300, deadline=None)
def test_no_setting_stalls_and_the_draws_stay_within_the_slack(
    samples_per_step: float, batch_steps: int, batch_size: int, min_steps: int, extra: float, preference: str
) -> None:
    slack = samples_per_step * batch_steps + batch_size + extra
    ratio = Ratio(samples_per_step, batch_steps, batch_size, min_steps, slack)
    replay, rng = Counts(3 * batch_steps), np.random.default_rng(0)
    for _ in range(400):
        may = [ratio.may_append(replay), ratio.may_sample(replay)]  # type: ignore[arg-type]
        assert any(may), "nobody may go on"
        wants_append = preference == "append" or (preference == "random" and bool(rng.integers(2)))
        if may[0] and (wants_append or not may[1]):
            replay.n_steps += batch_steps
        else:
            replay.n_drawn += batch_size
        if replay.n_steps > max(min_steps, replay.n_needed) + batch_steps and replay.n_drawn:
            late = max(replay.n_needed - min_steps, 0) * samples_per_step  # while nothing could be drawn
            assert -slack - 1e-6 <= ratio.behind(replay) <= slack + late + 1e-6  # type: ignore[arg-type]


def test_a_loop_with_a_replay_keeps_the_ratio() -> None:
    stream, replay = Stream(0, 4), Replay(400, 3, max_truncations=400)
    ratio = Ratio(2.0, 20, 16, min_steps=100)
    while replay.n_steps < 4000:
        if ratio.may_append(replay):
            replay.append(stream.batch(5))
        if ratio.may_sample(replay):
            assert replay.n_steps >= 100
            replay.sample(16)
    assert abs(replay.n_drawn - (4000 - 100) * 2) <= 2 * 20 + 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 1), "samples_per_step"),
        ((-1, 1, 1), "samples_per_step"),
        ((1, 0, 1), "batch_steps"),
        ((1, 1, 0), "batch_size"),
        ((1, 1, 1, -1), "min_steps"),
        ((8, 512, 256, 0, 4351.9), "at least 4352"),
        ((1, 1, 1, 0, float("nan")), "slack"),
    ],
)
def test_impossible_settings_are_refused(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Ratio(*arguments)  # type: ignore[arg-type]
    Ratio(8, 512, 256, 0, 4352)
