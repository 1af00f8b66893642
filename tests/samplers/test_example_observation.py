"""`initialize` tries the agent on zeros, and on a real observation if the agent does not take zeros."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn

from penstock import CategoricalPgAgent, FunctionAgent, ParallelSampler, SerialSampler, SpaceError


class Masked(gym.Env[Any, Any]):
    """Two of three actions are allowed at a time."""

    observation_space = spaces.Dict({"mask": spaces.MultiBinary(3), "x": spaces.Box(-1, 1, (2,), np.float32)})
    action_space = spaces.Discrete(3)

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def _observe(self) -> Any:
        mask = np.ones(3, np.int8)
        mask[self.t % 3] = 0
        return {"mask": mask, "x": np.zeros(2, np.float32)}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if self.fails:
            raise OSError("no simulator")
        self.t = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        assert action != self.t % 3, "a forbidden action"
        self.t += 1
        return self._observe(), 1.0, self.t == 5, False, {}


class MaskedModel(nn.Module):
    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        self.out = nn.Linear(2, 3)

    def forward(self, observation: Any) -> Any:
        logits = self.out(observation["x"]).masked_fill(observation["mask"] == 0, -torch.inf)
        return logits, torch.zeros(len(logits))


def legal(observation: Any) -> Any:
    """The first legal action; there must be one."""
    return np.array([np.flatnonzero(mask)[0] for mask in observation["mask"]])


@pytest.mark.parametrize("make_agent", [partial(CategoricalPgAgent, MaskedModel), partial(FunctionAgent, legal)])
def test_agents_that_do_not_take_a_mask_of_zeros(make_agent: Any) -> None:
    with SerialSampler(Masked, batch_T=12, batch_B=2, max_decorrelation_steps=0) as sampler:
        sampler.initialize(make_agent(), seed=0)
        samples, infos = sampler.obtain_samples(0)
    assert [info.Length for info in infos] == [5] * 4
    assert (samples.env.reward == 1).all()


@pytest.mark.slow
def test_batched_environments_too() -> None:
    def env_fn(num_envs: int) -> Any:
        return SyncVectorEnv([Masked] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)

    with ParallelSampler(env_fn, batch_T=12, batch_B=2, batched=True) as sampler:
        sampler.initialize(FunctionAgent(legal), seed=0)
        assert len(sampler.obtain_samples(0)[1]) == 4


def test_the_agents_own_error_stands_if_there_is_no_observation() -> None:
    with SerialSampler(partial(Masked, fails=True), batch_T=12, batch_B=2) as sampler, pytest.raises(SpaceError) as e:
        sampler.initialize(FunctionAgent(legal), seed=0)
    assert "FunctionAgent failed on example observations" in str(e.value)
    assert "IndexError" in str(e.value)


def test_an_agent_that_fails_on_both_is_reported_with_the_real_observation() -> None:
    def broken(observation: Any) -> Any:
        return [][int(observation["mask"].sum())]

    with SerialSampler(Masked, batch_T=12, batch_B=2) as sampler, pytest.raises(SpaceError, match="list index"):
        sampler.initialize(FunctionAgent(broken), seed=0)
