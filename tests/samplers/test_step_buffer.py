"""What an agent is given for its next action, whoever calls it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from penstock import AgentStep, GpuSampler, ParallelSampler, RandomAgent, Sampler, SerialSampler
from penstock.envs import CountingEnv

from .started import started


class Thirds(CountingEnv):
    """Its observations have more digits than float16."""

    step_into = None

    def observe(self) -> Any:
        return super().observe() / 3


class Telling(RandomAgent):
    """Reports what it was given."""

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        info = {"given": observation.copy(), "size": np.full(len(observation), observation.dtype.itemsize)}
        return AgentStep(super().step(observation, prev_action, prev_reward).action, info)


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler, GpuSampler])
def test_an_agent_acts_on_observations_in_the_dtype_in_which_they_are_recorded(cls: type[Sampler]) -> None:
    options: dict[str, Any] = {"observation_dtype": np.float16, "n_workers": 2}
    with started(partial(Thirds, dtype=np.float64), Telling(), cls, **options) as sampler:
        sampler.obtain_samples(0)
        info, observation = sampler.samples_np.agent.agent_info, sampler.samples_np.env.observation
        assert info.given.dtype == observation.dtype == np.float16
        np.testing.assert_array_equal(info.given, observation)
        assert (info.size == observation.dtype.itemsize).all()
