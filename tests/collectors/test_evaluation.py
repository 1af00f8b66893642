"""EvalCollector against a plain loop, over several evaluations."""

from typing import Any

import numpy as np
import pytest

from penstock import Agent, AgentStep, BaseEvalCollector, ParallelSampler, SerialSampler, TrajInfo
from penstock.envs import CountingEnv, Purpose
from penstock.envs.seeding import ColumnStreams

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


class Own(TrajInfo):
    """Goes the other way to the main process: object by object."""


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
@pytest.mark.parametrize("traj_info_cls", [TrajInfo, Own])
def test_every_evaluation_equals_a_plain_loop(cls: Any, traj_info_cls: type[TrajInfo]) -> None:
    with cls(
        Paying,
        batch_T=20,
        batch_B=3,
        eval_n_envs=N_ENVS,
        eval_max_steps=MAX_T * N_ENVS,
        n_workers=2,
        traj_info_cls=traj_info_cls,
    ) as sampler:
        sampler.initialize(Attentive(), seed=SEED)
        for evaluation in range(3):
            sampler.obtain_samples(evaluation)  # leaves rewards and actions behind that must not be seen
            infos = sampler.evaluate_agent(evaluation)
            wanted = sorted(row for b in range(N_ENVS) for row in reference(evaluation, b))
            assert [(info.Length, info.Return) for info in infos] == [row[2:] for row in wanted]


class Once(BaseEvalCollector):
    """A user's own evaluation: one greedy look at every environment, one trajectory each."""

    def collect_evaluation(self, itr: int) -> None:
        self.begin_evaluation(itr)
        reward = np.full((1, len(self.envs)), 100.0 + itr)
        self.progress.trajectories = self.tracker.end_rows(reward, np.ones_like(reward, dtype=bool))


def test_a_custom_evaluation_collector_runs() -> None:
    with ParallelSampler(
        Paying, batch_T=2, batch_B=2, eval_n_envs=3, eval_max_steps=9, eval_collector_cls=Once
    ) as sampler:
        sampler.initialize(Attentive())
        assert [info.Return for info in sampler.evaluate_agent(7)] == [107.0] * 3
