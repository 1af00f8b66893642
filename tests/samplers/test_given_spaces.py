"""The argument `spaces`: no example environment is built."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from penstock import (
    CategoricalPgAgent,
    ConfigError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    SerialSampler,
    SpaceError,
    WorkerError,
)
from penstock.envs import BatchedCartPole, CountingEnv, EnvContext
from penstock.vector import ShmVectorEnv

from ..scale import quick_first

SIZE: dict[str, Any] = {"batch_T": 8, "batch_B": 2, "n_workers": 1}
SPACES = CountingEnv().observation_space, CountingEnv().action_space
REFUSED = r"observation_space of env_rank 0 is .* or of the argument `spaces`"
OTHER = spaces.Box(0, 1, (3,)), SPACES[1]


def env_in_a_worker(context: EnvContext, main: int = -1) -> CountingEnv:
    assert context.worker_rank >= 0, "an example environment"
    assert os.getpid() != main
    return CountingEnv()


@pytest.mark.parametrize("cls", quick_first([ParallelSampler, SerialSampler, GpuSampler]))
def test_no_example_environment_is_built_and_the_batch_is_the_same(cls: Any) -> None:
    batches = []
    for env_fn, given in ((CountingEnv, None), (env_in_a_worker, SPACES)):
        with cls(env_fn, spaces=given, **SIZE) as sampler:
            sampler.initialize(RandomAgent(), seed=0)
            assert (sampler.observation_space, sampler.action_space) == SPACES
            batches.append(sampler.obtain_samples(0)[0].copy())
    assert batches[0].env.observation.tolist() == batches[1].env.observation.tolist()
    assert batches[0].agent.action.tolist() == batches[1].agent.action.tolist()


@pytest.mark.slow
def test_a_vector_environment(start_method: str) -> None:
    envs = ShmVectorEnv([partial(env_in_a_worker, main=os.getpid())] * 2, spaces=SPACES, context=start_method)
    assert (envs.single_observation_space, envs.single_action_space) == SPACES
    assert envs.reset()[0].tolist() == [[0, 0], [0, 0]]
    assert (envs.spec, envs.render_mode) == (None, None)
    envs.close()


def test_a_batched_environment() -> None:
    env = BatchedCartPole(num_envs=1)
    for given in (None, (env.single_observation_space, env.single_action_space)):
        with SerialSampler(BatchedCartPole, batched=True, spaces=given, **SIZE) as sampler:
            sampler.initialize(RandomAgent(), seed=0)
            sampler.obtain_samples(0)
    with SerialSampler(BatchedCartPole, batched=True, spaces=OTHER, **SIZE) as sampler:
        check_spaces_are_compared(sampler)


@pytest.mark.parametrize("cls", quick_first([ParallelSampler, SerialSampler, GpuSampler]))
def test_environments_with_other_spaces_are_refused(cls: Any) -> None:
    with cls(CountingEnv, spaces=OTHER, **SIZE) as sampler:
        check_spaces_are_compared(sampler)


def check_spaces_are_compared(sampler: Any) -> None:
    with pytest.raises(WorkerError, match=REFUSED) as error:
        sampler.initialize(RandomAgent(), seed=0)
    assert isinstance(error.value.__cause__, SpaceError)


def test_a_vector_environment_with_other_spaces_is_refused() -> None:
    with pytest.raises(WorkerError, match=REFUSED):
        ShmVectorEnv([CountingEnv], spaces=OTHER)


@pytest.mark.parametrize("given", [(), SPACES[:1], (*SPACES, 1), (SPACES[0], 2), SPACES[0], "x"], ids=repr)
def test_anything_but_two_spaces_is_refused(given: Any) -> None:
    text = r"^spaces must be \(observation_space, action_space\), two gymnasium spaces, or None, got "
    with pytest.raises(ConfigError, match=text):
        SerialSampler(CountingEnv, spaces=given, **SIZE)
    with pytest.raises(ConfigError, match=text):
        ShmVectorEnv([CountingEnv], spaces=given)


class Noted(CountingEnv):
    """It reports a number and an action mask."""

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0], {"legal": np.ones(3)}

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {"speed": 2.0, "legal": np.ones(3)}


@pytest.mark.parametrize("wanted", [True, ["speed"]], ids=repr)
def test_env_info_needs_examples(wanted: Any) -> None:
    with pytest.raises(ConfigError, match=r"with spaces, no example .*: give examples of the values, env_info="):
        SerialSampler(Noted, spaces=SPACES, env_info=wanted, **SIZE)
    with SerialSampler(Noted, spaces=SPACES, env_info={"speed": 0.0}, **SIZE) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        assert set(sampler.obtain_samples(0)[0].env.env_info.speed.flatten().tolist()) <= {0.0, 2.0}


def test_a_mask_in_info_is_added_to_the_spaces() -> None:
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(2, 3)

        def forward(self, observation: Any) -> Any:
            return self.body(observation.observation.float()), torch.zeros(len(observation.observation))

    agent = CategoricalPgAgent(lambda *_: Model(), mask_key="info.legal")
    with SerialSampler(Noted, spaces=SPACES, **SIZE) as sampler:
        sampler.initialize(agent, seed=0)
        assert set(sampler.observation_space) == {"observation", "action_mask"}
        sampler.obtain_samples(0)
