"""Evaluations: the seeds of their episodes, who plays them, and what cannot be counted."""

from typing import Any

import numpy as np
import pytest

from penstock import (
    AlternatingSampler,
    AsyncSampler,
    ConfigError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    SerialSampler,
    TrajInfo,
)
from penstock.envs import CountingEnv

SEED = 4


def seed_of(k: int) -> int:
    """Of episode k of every evaluation."""
    return int(np.random.SeedSequence(SEED, spawn_key=(8, k)).generate_state(1)[0])


class Seeded(CountingEnv):
    """Its return shows its seed."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds: list[int | None] = []

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.seeds.append(seed)
        self.reward_scale = 0.0 if seed is None else seed % 1000
        return super().reset(seed=seed)


def assert_episodes(infos: Any, numbers: list[int]) -> None:
    assert [info.seed for info in infos] == [seed_of(k) for k in numbers]
    assert [info.Return for info in infos] == [15 * (seed_of(k) % 1000) for k in numbers]


@pytest.mark.parametrize(
    ("cls", "eval_n_envs", "n_workers"),
    [
        (SerialSampler, 3, 1),
        (SerialSampler, 11, 1),
        (ParallelSampler, 4, 2),
        (ParallelSampler, 1, 2),
        (GpuSampler, 5, 2),
        (AlternatingSampler, 4, 2),
        (AsyncSampler, 2, 1),
    ],
)
def test_evaluations_have_the_same_episodes_whatever_plays_them(cls: Any, eval_n_envs: int, n_workers: int) -> None:
    evaluation = {"eval_n_envs": eval_n_envs, "eval_episodes": 10}
    with cls(Seeded, batch_T=2, batch_B=2, n_workers=n_workers, **evaluation) as sampler:
        sampler.initialize(RandomAgent(), seed=SEED)
        for itr in range(2):
            infos = sampler.evaluate_agent(itr)
            assert [info.number * eval_n_envs + info.env_rank for info in infos] == list(range(10))
            assert_episodes(infos, list(range(10)))


def test_machines_share_the_episodes_of_an_evaluation() -> None:
    for rank in range(2):
        with SerialSampler(Seeded, batch_T=2, batch_B=2, eval_n_envs=2, eval_episodes=4) as sampler:
            sampler.initialize(RandomAgent(), seed=SEED, rank=rank, world_size=2)
            assert_episodes(
                sampler.evaluate_agent(0), [episode * 4 + 2 * rank + b for episode in range(2) for b in range(2)]
            )


class Lives(TrajInfo):
    def traj_done(self, terminated: bool, truncated: bool, env_info: dict[str, Any]) -> bool:
        return bool(self.Length >= 12)


def test_a_trajectory_of_several_episodes_has_one_seed() -> None:
    sizes = {"batch_T": 2, "batch_B": 1, "eval_n_envs": 1, "eval_episodes": 2, "traj_info_cls": Lives}
    with SerialSampler(Seeded, **sizes) as sampler:
        sampler.initialize(RandomAgent(), seed=SEED)
        assert [info.Length for info in sampler.evaluate_agent(0)] == [15, 15]
        (seeds,) = sampler.get_attr("seeds", evaluation=True)
        assert seeds == [seed_of(0), None, None, seed_of(1), None, None]


def test_episodes_that_are_cut_short_are_counted_in_a_warning() -> None:
    with SerialSampler(
        CountingEnv, batch_T=2, batch_B=1, eval_n_envs=2, eval_max_steps=94, eval_episodes=20
    ) as sampler:
        sampler.initialize(RandomAgent(), seed=SEED)
        with pytest.warns(RuntimeWarning, match="itr=5: 2 of 20 episodes had not ended after eval_max"):
            assert [info.Length for info in sampler.evaluate_agent(5)] == [5] * 18


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eval_episodes": 3}, "give eval_n_envs too"),
        ({"eval_episodes": 3, "eval_n_envs": 1, "eval_max_trajectories": 3}, "exclude each other"),
        ({"eval_episodes": 0, "eval_n_envs": 1}, "eval_episodes must be an integer of at least 1"),
    ],
)
def test_what_cannot_be_counted(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SerialSampler(CountingEnv, batch_T=2, batch_B=1, **arguments)
