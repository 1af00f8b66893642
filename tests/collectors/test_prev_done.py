"""`env.prev_done`: where episodes begin, from the first row of the first batch on; and what the agent gets there."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from penstock import (
    AgentStep,
    Collector,
    ParallelSampler,
    RandomAgent,
    ResetCollector,
    Sampler,
    SerialSampler,
    WaitResetCollector,
)
from penstock.envs import CountingEnv

from ..scale import quick_first
from ..support import sampler_of


@pytest.mark.parametrize("max_decorrelation_steps", quick_first([12, 0]))
@pytest.mark.parametrize("collector_cls", [ResetCollector, WaitResetCollector])
@pytest.mark.parametrize("sampler_cls", [SerialSampler, ParallelSampler])
def test_an_episode_begins_where_prev_done_says(
    sampler_cls: type[Sampler], collector_cls: type[Collector], max_decorrelation_steps: int
) -> None:
    how = {"collector_cls": collector_cls, "max_decorrelation_steps": max_decorrelation_steps}
    env_kwargs = [{"length": 3 + b} for b in range(6)]
    with sampler_of(sampler_cls, batch_B=6, env_kwargs=env_kwargs, **how) as sampler:
        sampler.initialize(RandomAgent(), seed=1)
        for itr in range(6):
            env = sampler.obtain_samples(itr)[0].env.numpy()
            begins = (env.observation[..., 1] == 0) & env.valid
            np.testing.assert_array_equal(env.prev_done & env.valid, begins)
            np.testing.assert_array_equal(env.prev_done[1:], env.done[:-1])
            assert env.valid[0].all()


class Telling(RandomAgent):
    """Reports what it gets."""

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        action = super().step(observation, prev_action, prev_reward).action
        return AgentStep(action, {"prev_action": prev_action.copy(), "prev_reward": prev_reward.copy()})


def batched(mode: AutoresetMode, num_envs: int) -> Any:
    return SyncVectorEnv([partial(CountingEnv, 3)] * num_envs, autoreset_mode=mode)


@pytest.mark.parametrize("mode", [None, *AutoresetMode])
def test_the_agent_gets_no_action_and_reward_of_the_episode_before(mode: AutoresetMode | None) -> None:
    env_fn, how = (partial(CountingEnv, 3), {}) if mode is None else (partial(batched, mode), {"batched": True})
    with sampler_of(SerialSampler, env_fn, batch_T=10, **how) as sampler:
        sampler.initialize(Telling(), seed=1)
        for itr in range(3):
            samples = sampler.obtain_samples(itr)[0].numpy()
            valid, begins, told = samples.env.valid, samples.env.prev_done, samples.agent.agent_info
            for found, recorded in (
                (told.prev_action, samples.agent.prev_action),
                (told.prev_reward, samples.env.prev_reward),
            ):
                np.testing.assert_array_equal(found[valid], np.where(begins, 0, recorded)[valid])
