"""Both kinds of evaluation against a plain loop, several times over."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from penstock import Agent, AgentStep, BaseEvalCollector, ConfigError, ParallelSampler, SerialSampler, TrajInfo
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


def reference(evaluation: int, b: int) -> list[tuple[int, int, int, float]]:
    env, agent = Paying(), Attentive()
    streams = ColumnStreams(SEED, range(b, b + 1))
    agent.seed_columns(streams.rngs(Purpose.EVAL_ACTION, evaluation))
    observation, _ = env.reset(seed=streams.env_seeds(Purpose.EVAL, evaluation)[0])
    prev_action, prev_reward, rewards, finished = 0, 0.0, [], []
    for t in range(MAX_T):
        step = agent.step(np.array([observation]), np.array([prev_action]), np.array([prev_reward], np.float32))
        observation, prev_reward, terminated, truncated, _ = env.step(prev_action := int(step.action[0]))
        rewards.append(prev_reward)
        if terminated or truncated:
            finished.append((t, b, len(rewards), sum(rewards)))
            observation, prev_action, prev_reward, rewards = env.reset()[0], 0, 0.0, []
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
            assert [(info.Length, info.Return) for info in infos] == [row[2:] for row in wanted]


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
            assert [(info.Length, info.Return) for info in infos] == [row[2:] for row in wanted]
            assert len(infos) == episodes


def test_episodes_that_are_cut_short_are_counted_in_a_warning() -> None:
    with SerialSampler(Paying, batch_T=2, batch_B=1, eval_n_envs=2, eval_max_steps=90, eval_episodes=20) as sampler:
        sampler.initialize(Attentive(), seed=SEED)
        finished = sum(row[0] < 45 for b in range(2) for row in reference(0, b))
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


class Once(BaseEvalCollector):
    """A user's own evaluation: one greedy look at every environment, one trajectory each."""

    def collect_evaluation(self, itr: int) -> None:
        self.begin_evaluation(itr)
        reward = np.full((1, len(self.envs)), 100.0 + itr)
        self.progress.n_results = self.tracker.end_rows(reward, np.ones_like(reward, dtype=bool))


def test_a_custom_evaluation_collector_runs() -> None:
    with ParallelSampler(
        Paying, batch_T=2, batch_B=2, eval_n_envs=3, eval_max_steps=9, eval_collector_cls=Once
    ) as sampler:
        sampler.initialize(Attentive())
        assert [info.Return for info in sampler.evaluate_agent(7)] == [107.0] * 3
