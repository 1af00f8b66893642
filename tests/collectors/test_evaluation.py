"""Both kinds of evaluation against a plain loop, several times over."""

from itertools import product
from typing import Any

import gymnasium as gym
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
from penstock.envs import CountingEnv, Purpose
from penstock.envs.seeding import ColumnStreams

from ..scale import pairs, quick_first

SEED, MAX_T, N_ENVS = 4, 300, 3


class Attentive(Agent):
    """Its actions depend on observation, previous action, previous reward and a stream per column."""

    def seed_columns(self, rngs: Any) -> None:
        self.rngs = list(rngs)

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        noise = np.array([rng.integers(0, 100) for rng in self.rngs])
        mixed = observation[:, 1] * 7 + prev_action * 3 + prev_reward * 5 + noise
        return AgentStep(mixed.astype(np.int64) % 3, {"noise": noise})


class Paying(CountingEnv):
    """Pays the action, over episodes of random length."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        observation, info = super().reset(seed=seed)
        self.length = int(self.np_random.integers(3, 40))
        return observation, info

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, float(action), *rest


def seed_of(k: int) -> int:
    """Of episode k of every evaluation."""
    return int(np.random.SeedSequence(SEED, spawn_key=(8, k)).generate_state(1)[0])


def reference(evaluation: int, b: int, n_envs: int = N_ENVS) -> list[tuple[int, int, int, float, int]]:
    """Episode, environment, length, return and last step of each trajectory."""
    env, agent = Paying(), Attentive()
    streams = ColumnStreams(SEED, range(b, b + 1))
    agent.seed_columns(streams.rngs(Purpose.EVAL_ACTION, evaluation))
    observation, _ = env.reset(seed=seed_of(b))
    prev_action, prev_reward, rewards, finished = 0, 0.0, [], []
    for t in range(MAX_T):
        step = agent.step(np.array([observation]), np.array([prev_action]), np.array([prev_reward], np.float32))
        observation, prev_reward, terminated, truncated, _ = env.step(prev_action := int(step.action[0]))
        rewards.append(prev_reward)
        if terminated or truncated:
            finished.append((len(finished), b, len(rewards), sum(rewards), t))
            observation, prev_action, prev_reward = env.reset(seed=seed_of(len(finished) * n_envs + b))[0], 0, 0.0
            rewards = []
    return finished


SIZES = {"batch_T": 20, "batch_B": 3, "eval_n_envs": N_ENVS, "eval_max_steps": MAX_T * N_ENVS}


class Own(TrajInfo):
    """Goes the other way to the main process: object by object."""


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
@pytest.mark.parametrize("traj_info_cls", quick_first([Own, TrajInfo]))
def test_every_evaluation_equals_a_plain_loop(cls: Any, traj_info_cls: type[TrajInfo]) -> None:
    with cls(Paying, n_workers=2, traj_info_cls=traj_info_cls, **SIZES) as sampler:
        sampler.initialize(Attentive(), seed=SEED)
        for evaluation in range(3):
            sampler.obtain_samples(evaluation)  # leaves rewards and actions behind that must not be seen
            infos = sampler.evaluate_agent(evaluation)
            wanted = sorted(row for b in range(N_ENVS) for row in reference(evaluation, b))
            assert [(info.episode, info.env_rank, info.Length, info.Return) for info in infos] == [
                r[:4] for r in wanted
            ]
            assert [info.seed for info in infos] == [seed_of(row[0] * N_ENVS + row[1]) for row in wanted]


@pytest.mark.parametrize(
    ("kind", "how"),
    quick_first(
        pairs(product([TrajInfo, Own], [2, 3, 10]), [(SerialSampler, 1), (ParallelSampler, 1), (ParallelSampler, 3)]), 1
    ),
)
def test_exactly_so_many_episodes_each_environment_its_share(
    kind: tuple[type[TrajInfo], int], how: tuple[Any, int]
) -> None:
    (traj_info_cls, episodes), (cls, n_workers) = kind, how
    with cls(Paying, eval_episodes=episodes, n_workers=n_workers, traj_info_cls=traj_info_cls, **SIZES) as sampler:
        sampler.initialize(Attentive(), seed=SEED)
        shares = [episodes // N_ENVS + (b < episodes % N_ENVS) for b in range(N_ENVS)]
        for evaluation in range(3):
            infos = sampler.evaluate_agent(evaluation)
            wanted = sorted(row for b in range(N_ENVS) for row in reference(evaluation, b)[: shares[b]])
            assert [(info.Length, info.Return) for info in infos] == [row[2:4] for row in wanted]
            assert [info.seed for info in infos] == [seed_of(k) for k in range(episodes)]


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


def test_a_batched_environment_has_seeds_for_its_first_episodes_only() -> None:
    with SerialSampler(
        lambda num_envs: gym.make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode="sync"),
        batch_T=2,
        batch_B=2,
        eval_n_envs=2,
        eval_episodes=5,
        batched=True,
    ) as sampler:
        sampler.initialize(RandomAgent(), seed=SEED)
        infos = sampler.evaluate_agent(0)
    assert [info.seed for info in infos] == [seed_of(0), seed_of(1), None, None, None]


def test_episodes_that_are_cut_short_are_counted_in_a_warning() -> None:
    with SerialSampler(Paying, batch_T=2, batch_B=1, eval_n_envs=2, eval_max_steps=90, eval_episodes=20) as sampler:
        sampler.initialize(Attentive(), seed=SEED)
        finished = sum(row[-1] < 45 for b in range(2) for row in reference(0, b, 2))
        with pytest.warns(RuntimeWarning, match=rf"itr=5: {20 - finished} of 20 episodes had not ended after eval_max"):
            assert len(sampler.evaluate_agent(5)) == finished


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
        SerialSampler(Paying, batch_T=2, batch_B=1, **arguments)


class Once(EvalCollector):
    """A user's own evaluation: one greedy look at every environment, one trajectory each."""

    def collect_evaluation(self, itr: int) -> None:
        self.begin_evaluation()
        reward = np.full((1, len(self.envs)), 100.0 + itr)
        self.progress.n_results = self.tracker.end_rows(reward, np.ones_like(reward, dtype=bool))


def test_a_custom_evaluation_collector_runs() -> None:
    with ParallelSampler(
        Paying, batch_T=2, batch_B=2, eval_n_envs=3, eval_max_steps=9, eval_collector_cls=Once
    ) as sampler:
        sampler.initialize(Attentive())
        assert [info.Return for info in sampler.evaluate_agent(7)] == [107.0] * 3
