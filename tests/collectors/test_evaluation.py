"""Evaluations: the seeds of their episodes, who plays them, and what cannot be counted."""

from typing import Any

import numpy as np
import pytest

from penstock import (
    Agent,
    AgentStep,
    AlternatingSampler,
    AsyncSampler,
    ConfigError,
    EvalCollector,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    SerialSampler,
    TrajInfo,
)
from penstock.envs import CountingEnv

from ..scale import quick_first

SEED = 4


def seed_of(k: int) -> int:
    """Of episode k of every evaluation."""
    return int(np.random.SeedSequence(SEED, spawn_key=(8, k)).generate_state(1)[0])


class Own(TrajInfo):
    """Goes the other way to the main process: object by object."""


class Drawing(CountingEnv):
    """Draws in each step, so that without a seed the next episode would depend on what was done before."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left, self.seen = 20.0, self.np_random.random(2).astype(np.float32)
        return self.seen, {}

    def step(self, action: Any) -> Any:
        self.left -= self.np_random.random() * (1 + action)
        self.seen = self.np_random.random(2).astype(np.float32)
        return self.seen, float(self.seen[0] * action), self.left < 0, False, {}


class Greedy(Agent):
    """Depends on the observation alone, and on which checkpoint it is."""

    def __init__(self, checkpoint: int) -> None:
        self.checkpoint = checkpoint

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        return AgentStep((observation[:, 1] * 7 + self.checkpoint).astype(np.int64) % 3)


def played(k: int, checkpoint: int) -> tuple[int, float]:
    env = Drawing()
    observation, _ = env.reset(seed=seed_of(k))
    rewards, is_over = list[float](), False
    while not is_over:
        action = int(Greedy(checkpoint).step(observation[None], None, None).action[0])
        observation, reward, is_over, _, _ = env.step(action)
        rewards.append(np.float32(reward).item())
    return len(rewards), pytest.approx(sum(rewards))


@pytest.mark.parametrize(
    ("cls", "eval_n_envs", "n_workers"),
    quick_first(
        [
            (SerialSampler, 3, 1),
            (SerialSampler, 11, 1),
            (ParallelSampler, 4, 2),
            (ParallelSampler, 1, 2),
            (GpuSampler, 5, 2),
            (AlternatingSampler, 4, 2),
            (AsyncSampler, 2, 1),
        ],
        3,
    ),
)
def test_two_checkpoints_meet_the_same_episodes_whatever_plays_them(cls: Any, eval_n_envs: int, n_workers: int) -> None:
    for checkpoint in range(2):
        with cls(
            Drawing, batch_T=2, batch_B=2, n_workers=n_workers, eval_n_envs=eval_n_envs, eval_episodes=10
        ) as sampler:
            sampler.initialize(Greedy(checkpoint), seed=SEED)
            for itr in range(2):
                infos = sampler.evaluate_agent(itr)
                assert [info.episode * eval_n_envs + info.env_rank for info in infos] == list(range(10))
                assert [info.seed for info in infos] == [seed_of(k) for k in range(10)]
                assert [(info.Length, info.Return) for info in infos] == [played(k, checkpoint) for k in range(10)]


def test_machines_share_the_episodes_of_an_evaluation() -> None:
    for rank in range(2):
        with SerialSampler(Drawing, batch_T=2, batch_B=2, eval_n_envs=2, eval_episodes=4) as sampler:
            sampler.initialize(Greedy(0), seed=SEED, rank=rank, world_size=2)
            infos = sampler.evaluate_agent(0)
            mine = [episode * 4 + 2 * rank + b for episode in range(2) for b in range(2)]
            assert [(info.Length, info.Return, info.seed) for info in infos] == [
                (*played(k, 0), seed_of(k)) for k in mine
            ]


class Lives(TrajInfo):
    def traj_done(self, terminated: bool, truncated: bool, env_info: dict[str, Any]) -> bool:
        return bool(self.Length >= 12)


class Noted(CountingEnv):
    def __init__(self) -> None:
        super().__init__()
        self.seeds: list[int | None] = []

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.seeds.append(seed)
        return super().reset(seed=seed)


def test_a_trajectory_of_several_episodes_has_one_seed() -> None:
    sizes = {"batch_T": 2, "batch_B": 1, "eval_n_envs": 1, "eval_episodes": 2, "traj_info_cls": Lives}
    with SerialSampler(Noted, **sizes) as sampler:
        sampler.initialize(Greedy(0), seed=SEED)
        assert [info.Length for info in sampler.evaluate_agent(0)] == [15, 15]
        (seeds,) = sampler.get_attr("seeds", evaluation=True)
        assert seeds == [seed_of(0), None, None, seed_of(1), None, None]


def test_a_batch_says_where_its_trajectories_were() -> None:
    for traj_info_cls in (TrajInfo, Own):
        with SerialSampler(CountingEnv, batch_T=7, batch_B=2, traj_info_cls=traj_info_cls) as sampler:
            sampler.initialize(Greedy(0), seed=SEED, rank=1, world_size=2)
            infos = [info for itr in range(4) for info in sampler.obtain_samples(itr)[1]]
        for env_rank in (2, 3):
            found = [(info.episode, info.seed) for info in infos if info.env_rank == env_rank]
            assert found == [(n, None) for n in range(len(found))]
            assert len(found) >= 5


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


class Once(EvalCollector):
    """A user's own evaluation: one greedy look at every environment, one trajectory each."""

    def collect_evaluation(self, itr: int) -> None:
        self.begin_evaluation()
        reward = np.full((1, len(self.envs)), 100.0 + itr)
        self.progress.n_results = self.tracker.end_rows(reward, np.ones_like(reward, dtype=bool))


def test_a_custom_evaluation_collector_runs() -> None:
    with ParallelSampler(
        CountingEnv, batch_T=2, batch_B=2, eval_n_envs=3, eval_max_steps=9, eval_collector_cls=Once
    ) as sampler:
        sampler.initialize(RandomAgent())
        assert [info.Return for info in sampler.evaluate_agent(7)] == [107.0] * 3
