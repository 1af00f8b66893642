"""Environments that use their arrays again, change what they get, or return what does not fit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from penstock import RepeatError, evaluate

from ..support import assert_same


class Drifts(gym.Env[Any, Any]):
    """Its info is the same array in each step, its reset takes no options, and it changes the action in place."""

    observation_space, action_space = gym.spaces.Box(-9, 9, (1,)), gym.spaces.Box(-9, 9, (2,), np.float64)

    def reset(self, *, seed: int | None = None) -> Any:  # type: ignore[override]
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1, 2)
        self.t = 0
        return np.zeros(1, np.float32), {"place": self.place}

    def step(self, action: Any) -> Any:
        action *= 2
        self.place += action
        self.t += 1
        return np.zeros(1, np.float32), self.place[0], False, self.t == 6, {"place": self.place}


def follows(observation: Any, states: Any, infos: Any) -> Any:
    """Acts on how far the place has moved since the last step, which it keeps as it is given."""
    moved = [info["place"] - (0 if state is None else state) for state, info in zip(states, infos, strict=True)]
    return np.array(moved) / 8, [info["place"] for info in infos]


def plain_return(seed: int) -> float:
    env, last, total, is_over = Drifts(), np.zeros(2), 0.0, False
    _, info = env.reset(seed=seed)
    while not is_over:
        place = info["place"].copy()
        _, reward, _, is_over, info = env.step((place - last) / 8)
        last, total = place, total + float(reward)
    return total


@pytest.mark.parametrize("act_in", ["caller", "workers"])
def test_arrays_that_are_used_again(act_in: str) -> None:
    found = evaluate(follows, Drifts, episodes=4, n_workers=1, batch_B=2, act_in=act_in)  # type: ignore[arg-type]
    assert [r.metrics["return"] for r in found.episodes] == pytest.approx(
        [plain_return(r.seed) for r in found.episodes]
    )
    episode = found.episode("policy", "", 0)
    steps = list(episode.steps())
    assert_same([step.action for step in steps], list(episode.actions))
    assert sum(step.reward for step in steps) == pytest.approx(found.episodes[0].metrics["return"])


class Moves(gym.Env[Any, Any]):
    """It walks from the place that its options give, and writes into them. The last reward is the prize."""

    observation_space, action_space = gym.spaces.Discrete(2), gym.spaces.Discrete(2)

    def __init__(self, prize: float = 5.0) -> None:
        self.prize = prize

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.place, self.t = options["start"], 0
        return 0, {}

    def step(self, action: Any) -> Any:
        self.place += 1
        self.t += 1
        return 0, float(self.place[0]) if self.t < 4 else self.prize, self.t == 4, False, {}


def zeros(observation: Any) -> Any:
    return np.zeros(len(observation), np.int64)


def starts(task: str, k: int) -> Any:
    return {"start": np.full(1, 10 * k)}


def test_the_options_of_an_episode_stay_as_they_are() -> None:
    found = evaluate(zeros, Moves, options=starts, episodes=2, n_workers=1)
    episode = found.episode("policy", "", 1)
    for _ in range(3):
        assert [step.reward for step in episode.steps()] == [11, 12, 13, 5]


def test_the_last_step_of_a_repeated_episode_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is a relative one, and the program goes to another folder."""
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {"options": starts, "episodes": 1, "n_workers": 1}
    found = evaluate(zeros, Moves, folder="found", **given)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    episode = found.episode("policy", "", 0)
    assert len(list(episode.steps())) == 4
    another = replace(episode, factory=replace(episode.factory, fn=partial(Moves, prize=1.0)))
    with pytest.raises(RepeatError, match=r"the reward of its last step is 1.0, recorded was 5.0"):
        list(another.steps())
