"""Columns of a batched environment that belong together, such as the players of one game."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from penstock import AlternatingSampler, ConfigError, GpuSampler, ParallelSampler, RandomAgent, SerialSampler
from penstock.envs import SameStep

from ..scale import some
from ..support import assert_same, collect_with

pytestmark = pytest.mark.slow


class Games(SameStep):
    """Games of three players. Everybody sees all actions and the place in the game, and all play to the same end."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.games = num_envs - num_envs % 3 or 3, num_envs // 3
        self.single_observation_space = spaces.Box(0, 99, (4,), np.float32)
        self.single_action_space = spaces.Discrete(5)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.rngs = [np.random.default_rng(each) for each in seed[::3]]
        self.left = np.array([rng.integers(3, 9) for rng in self.rngs])
        return self._observe(np.zeros(self.num_envs)), {}

    def _observe(self, actions: Any) -> Any:
        shared = np.repeat(np.reshape(actions, (-1, 3)), 3, axis=0)
        return np.column_stack([shared, np.arange(self.num_envs) % 3]).astype(np.float32)

    def advance(self, actions: Any) -> Any:
        self.left -= 1
        done = np.repeat(self.left == 0, 3)
        return self._observe(actions), actions.astype(np.float64), done, np.zeros_like(done), {}

    def reset_rows(self, rows: Any) -> Any:
        games = np.unique(rows // 3)
        assert len(rows) == 3 * len(games)
        for game in games:
            self.left[game] = self.rngs[game].integers(3, 9)
        return self._observe(np.zeros(self.num_envs))[rows], {}


THREES: dict[str, Any] = {"batched": True, "rows_per_env": 3}


SIZES: dict[str, Any] = {"batch_T": 25, "batch_B": 12, "eval_n_envs": 6, "eval_max_steps": 240}


@pytest.mark.parametrize(
    ("cls", "kwargs"),
    some(
        [
            (ParallelSampler, {"n_workers": 3}),
            (GpuSampler, {"n_workers": 2}),
            (AlternatingSampler, {"n_workers": 2}),
            (ParallelSampler, {"n_workers": 1}),
            (ParallelSampler, {"n_workers": 2}),
            (ParallelSampler, {"n_workers": 4}),
            (GpuSampler, {"n_workers": 3}),
        ],
        3,
    ),
)
def test_rows_that_belong_together_are_never_cut(cls: Any, kwargs: Any) -> None:
    found = collect_with(SerialSampler, Games, None, 3, range(3), **THREES, **SIZES)
    assert_same(found, collect_with(cls, Games, None, 3, range(3), **THREES, **SIZES, **kwargs))
    for samples, infos in found:
        assert infos
        if samples is not None:
            assert (samples.env.observation[1:, :, :3].reshape(24, 4, 3, 3).std(axis=2) == 0).all()
            assert (samples.env.done.reshape(25, 4, 3).std(axis=2) == 0).all()


def test_there_are_no_more_workers_than_games(caplog: Any) -> None:
    with ParallelSampler(Games, batch_T=2, batch_B=6, n_workers=3, **THREES) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        assert [len(worker.env_ranks) for worker in sampler.stats().workers] == [3, 3]
    assert "2 are enough" in caplog.text


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batch_B": 8}, "batch_B must be a multiple of rows_per_env=3, got 8"),
        ({"eval_n_envs": 4}, "eval_n_envs must be a multiple of rows_per_env=3, got 4"),
        ({"batched": False}, "rows_per_env is for batched environments"),
        ({"rows_per_env": 0}, "rows_per_env must be an integer of at least 1"),
    ],
)
def test_other_sizes_are_refused(kwargs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SerialSampler(Games, **{**SIZES, **THREES, **kwargs})


def test_without_it_the_error_says_what_to_do() -> None:
    with (
        pytest.raises(ConfigError, match=r"got Games.*rows_per_env"),
        SerialSampler(Games, batch_T=2, batch_B=6, batched=True) as sampler,
    ):
        sampler.initialize(RandomAgent())
