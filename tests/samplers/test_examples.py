"""The example environment that `initialize` builds, or does not if it gets `spaces`; and the example observation."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn

from penstock import (
    CategoricalPgAgent,
    ConfigError,
    FunctionAgent,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    SerialSampler,
    SpaceError,
    WorkerError,
)
from penstock.envs import BatchedCartPole, CountingEnv, EnvContext
from penstock.testing import Fault, faulty_env
from penstock.vector import ShmVectorEnv

from ..support import assert_same
from .started import check_refused, started

SIZE: dict[str, Any] = {"batch_T": 8, "batch_B": 2, "n_workers": 1}
SPACES = CountingEnv().observation_space, CountingEnv().action_space
REFUSED = r"observation_space of env_rank 0 is .* or of the argument `spaces`"
OTHER = spaces.Box(0, 1, (3,)), SPACES[1]


def env_in_a_worker(context: EnvContext, main: int = -1) -> CountingEnv:
    assert context.worker_rank >= 0, "an example environment"
    assert os.getpid() != main
    return CountingEnv()


@pytest.mark.parametrize("cls", [ParallelSampler, SerialSampler, GpuSampler])
def test_no_example_environment_is_built_and_the_batch_is_the_same(cls: Any) -> None:
    batches = []
    for env_fn, given in ((CountingEnv, None), (env_in_a_worker, SPACES)):
        with started(env_fn, cls=cls, spaces=given) as sampler:
            assert (sampler.observation_space, sampler.action_space) == SPACES
            batches.append(sampler.obtain_samples(0)[0].copy())
    assert_same(*batches)


@pytest.mark.slow
def test_a_vector_environment(start_method: str) -> None:
    envs = ShmVectorEnv([partial(env_in_a_worker, main=os.getpid())] * 2, spaces=SPACES, context=start_method)
    assert (envs.single_observation_space, envs.single_action_space) == SPACES
    assert envs.reset()[0].tolist() == [[0, 0], [0, 0]]
    assert (envs.spec, envs.render_mode) == (None, None)
    envs.close()


def test_a_batched_environment() -> None:
    env = BatchedCartPole(num_envs=1)
    with started(BatchedCartPole, batched=True, spaces=(env.single_observation_space, env.single_action_space)) as own:
        own.obtain_samples(0)


@pytest.mark.parametrize(
    ("cls", "env_fn"),
    [
        (ParallelSampler, CountingEnv),
        (SerialSampler, CountingEnv),
        (GpuSampler, CountingEnv),
        (SerialSampler, BatchedCartPole),
    ],
)
def test_environments_with_other_spaces_are_refused(cls: Any, env_fn: Any) -> None:
    with cls(env_fn, spaces=OTHER, batched=env_fn is BatchedCartPole, **SIZE) as sampler:
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
    check_refused(
        Noted, "with spaces, no example .*: give examples of the values, env_info=", spaces=SPACES, env_info=wanted
    )
    with started(Noted, spaces=SPACES, env_info={"speed": 0.0}) as sampler:
        assert set(sampler.obtain_samples(0)[0].env.env_info.speed.flatten().tolist()) <= {0.0, 2.0}


def test_a_mask_in_info_is_added_to_the_spaces() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(2, 3)

        def forward(self, observation: Any) -> Any:
            return self.body(observation.observation.float()), torch.zeros(len(observation.observation))

    agent = CategoricalPgAgent(lambda *_: Model(), mask_key="info.legal")
    with started(Noted, agent, spaces=SPACES) as sampler:
        assert set(sampler.observation_space) == {"observation", "action_mask"}
        sampler.obtain_samples(0)


# ---- the agent is tried on zeros, and on a real observation if it does not take zeros ----------


class Masked(gym.Env[Any, Any]):
    """Two of three actions are allowed at a time."""

    observation_space = spaces.Dict({"mask": spaces.MultiBinary(3), "x": spaces.Box(-1, 1, (2,), np.float32)})
    action_space = spaces.Discrete(3)

    def _observe(self) -> Any:
        mask = np.ones(3, np.int8)
        mask[self.t % 3] = 0
        return {"mask": mask, "x": np.zeros(2, np.float32)}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
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
    with started(Masked, make_agent(), batch_T=12) as sampler:
        samples, infos = sampler.obtain_samples(0)
    assert [info.Length for info in infos] == [5] * 4
    assert (samples.env.reward == 1).all()


@pytest.mark.slow
def test_batched_environments_too() -> None:
    def env_fn(num_envs: int) -> Any:
        return SyncVectorEnv([Masked] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)

    with started(env_fn, FunctionAgent(legal), ParallelSampler, batch_T=12, batched=True) as sampler:
        assert len(sampler.obtain_samples(0)[1]) == 4


def test_the_agents_own_error_stands_if_there_is_no_observation() -> None:
    message = "(?s)FunctionAgent failed on example observations.*IndexError"
    check_refused(faulty_env(Masked, Fault("raise"), "reset"), message, FunctionAgent(legal), error=SpaceError)


def test_an_agent_that_fails_on_both_is_reported_with_the_real_observation() -> None:
    def broken(observation: Any) -> Any:
        return [][int(observation["mask"].sum())]

    check_refused(Masked, "list index", FunctionAgent(broken), error=SpaceError)
