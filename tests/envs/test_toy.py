"""The toy environments: their results can be predicted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import PassiveEnvChecker
from hypothesis import given
from hypothesis import strategies as st

from penstock.envs import CountingEnv, NestedEnv, SlowEnv, toy

from ..scale import examples

quick = examples(15, 30)


@pytest.mark.filterwarnings("ignore::UserWarning")  # the checker's advice about the shapes of spaces
def test_gymnasiums_checker_finds_no_error() -> None:
    check_env(NestedEnv(), skip_render_check=True)


@pytest.mark.parametrize(
    "make",
    [CountingEnv, lambda: CountingEnv(truncate=True, dtype=np.int64), NestedEnv, SlowEnv],
    ids=["CountingEnv", "CountingEnv of integers", "NestedEnv", "SlowEnv"],
)
def test_an_episode_passes_gymnasiums_checks_step_by_step(make: Any) -> None:
    env = PassiveEnvChecker(make())
    env.action_space.seed(0)
    env.reset(seed=0)
    done = False
    while not done:
        observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
        assert env.observation_space.contains(observation)
        done = terminated or truncated


@quick
@given(st.integers(1, 6), st.booleans(), st.sampled_from([1.0, -0.5, 0.0]), st.integers(1, 4))
def test_counting_env_returns_the_predicted_values(length: int, truncate: bool, scale: float, episodes: int) -> None:
    env = CountingEnv(length, truncate, scale, dtype=np.float64)
    for episode in range(episodes):
        observation, info = env.reset(seed=episode)
        assert (observation.tolist(), observation.dtype, info) == ([episode, 0], np.float64, {})
        for step in range(1, length + 1):
            observation, reward, terminated, truncated, info = env.step(0)
            over = step == length
            assert observation.tolist() == [episode, step]
            assert reward == scale * step
            assert (terminated, truncated) == (over and not truncate, over and truncate)
            assert info == {"count": step}


@pytest.mark.parametrize("length", [7, 300])
def test_nested_env_returns_its_actions_within_its_space(length: int) -> None:
    env = NestedEnv(length)
    env.action_space.seed(0)
    observation, _ = env.reset(seed=1)
    assert env.observation_space.contains(observation)
    for step in range(1, length + 1):
        action = env.action_space.sample()
        observation, reward, terminated, truncated, _ = env.step(action)
        assert env.observation_space.contains(observation)
        assert observation["position"].tolist() == action["move"].tolist()
        assert observation["goal"][1][0] == action["mode"][0]
        assert reward == pytest.approx(action["move"].sum())
        assert (terminated, truncated) == (step == length, False)


def test_nested_envs_first_observation_depends_on_its_seed() -> None:
    positions = [NestedEnv().reset(seed=seed)[0]["position"].tolist() for seed in (3, 3, 4)]
    assert positions[0] == positions[1] != positions[2]


def test_slow_env_counts_and_sleeps_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(toy.time, "sleep", naps.append)
    env = SlowEnv(0.25, length=2)
    env.reset()
    assert env.step(0)[0].tolist() == [0, 1]
    assert env.step(0)[2] is True
    assert naps == [0.25, 0.25]
