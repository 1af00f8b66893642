"""Values that would change in the recorded dtype are refused, with field, environment and both dtypes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from penstock import Agent, AgentStep, GpuSampler, ParallelSampler, SerialSampler, SpaceError, WorkerError
from penstock.envs import BatchedCartPole, CountingEnv

from ..scale import mostly_first
from ..support import sampler_of

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {"batch_T": 4, "batch_B": 3}
SAMPLERS: dict[str, Any] = {
    "serial": SerialSampler,
    "parallel": ParallelSampler,
    "gpu": GpuSampler,
    "gpu parts": partial(GpuSampler, min_ready=1),
}


class Reporting(Agent):
    """Reports `first` in its first step, and later `later` for the last environment."""

    def __init__(self, first: Any, later: Any) -> None:
        self.first, self.later, self.n_steps = first, later, 0

    def seed_columns(self, rngs: Any) -> None:
        self.n_steps = 0

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        self.n_steps += 1
        B = len(prev_reward)
        columns = range(B) if self.selected is None else self.selected
        assert self.env_ranks is not None
        is_last = [self.n_steps > 2 and self.env_ranks[b] == 2 for b in columns]
        values = np.array([self.later if last else self.first for last in is_last])
        return AgentStep(np.zeros(B, np.int64), {"eps": values})


CHANGED = [
    (0, 0.5, r"agent_info.eps of env_rank 2 must have dtype int64, as in the agent's first step, got float64 0.5"),
    (np.int8(1), np.int64(300), r"agent_info.eps of env_rank 2 must have dtype int8, .* got int64 300"),
    (np.uint8(0), np.int64(-1), r"agent_info.eps of env_rank 2 must have dtype uint8, .* got int64 -1"),
    (False, 2, r"agent_info.eps of env_rank \d must have dtype bool, .* got int64 \d"),
    (np.float32(0), np.float64(1e300), r"agent_info.eps of env_rank 2 must have dtype float32, .* float64 1e\+300"),
    (0.0, 1j, r"agent_info.eps of env_rank \d must have dtype float64, .* got complex128"),
]


@pytest.mark.parametrize(("kind", "changed"), mostly_first(SAMPLERS, CHANGED))
def test_agent_info(kind: str, changed: Any) -> None:
    first, later, message = changed
    with sampler_of(SAMPLERS[kind], CountingEnv, **SIZES) as sampler:
        sampler.initialize(Reporting(first, later))
        with pytest.raises(WorkerError, match=message) as caught:
            sampler.obtain_samples(0)
        assert isinstance(caught.value.__cause__, SpaceError)


@pytest.mark.parametrize(
    ("first", "later", "recorded"),
    [(np.float64(0), 7, 7.0), (np.float32(0), 0.1, np.float32(0.1)), (5, np.int8(3), 3), (np.int8(5), 7, 7)],
)
def test_agent_info_that_fits_is_converted(first: Any, later: Any, recorded: Any) -> None:
    with sampler_of(SAMPLERS["serial"], CountingEnv, **SIZES) as sampler:
        sampler.initialize(Reporting(first, later))
        samples, _ = sampler.obtain_samples(0)
        assert sampler.samples_np.agent.agent_info.eps[-1, 2] == recorded
        assert samples.agent.agent_info.eps.shape == (4, 3)


class Acting(CountingEnv):
    def __init__(self, space: Any) -> None:
        super().__init__()
        self.action_space = space

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        return super().step(0)


class Fixed(Agent):
    def __init__(self, action: Any) -> None:
        self.action = action

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        good = np.zeros((len(prev_reward), 2), self.action.dtype)
        assert self.env_ranks is not None
        columns = range(len(good)) if self.selected is None else self.selected
        for row, b in enumerate(columns):
            if self.env_ranks[b] == 2:
                good[row] = self.action
        return AgentStep(good)


WRONG = [
    (spaces.MultiBinary(2), np.array([1, 300]), r"action of env_rank 2 must have dtype int8, .* int64 \[1, 300\]"),
    (spaces.MultiDiscrete([2, 2]), np.array([0, 2**63], np.uint64), r"env_rank 2 must have dtype int64, .* uint64"),
    (spaces.Box(-1, 1, (2,)), np.array([0.0, 1e300]), r"action of env_rank 2 must have dtype float32, .* float64"),
]


@pytest.mark.parametrize(("kind", "wrong"), mostly_first(SAMPLERS, WRONG))
def test_actions(kind: str, wrong: Any) -> None:
    space, action, message = wrong
    with sampler_of(SAMPLERS[kind], lambda: Acting(space), **SIZES) as sampler:
        sampler.initialize(Fixed(action))
        with pytest.raises(WorkerError, match=message):
            sampler.obtain_samples(0)


class Informing(CountingEnv):
    """Its info has `n`: `first`, and from its third step on `later`."""

    def __init__(self, first: Any, later: Any) -> None:
        super().__init__(length=100)
        self.first, self.later, self.n_steps = first, later, 0

    def step(self, action: Any) -> Any:
        self.n_steps += 1
        *result, _ = super().step(action)
        return (*result, {"n": self.first if self.n_steps < 3 else self.later})


@pytest.mark.parametrize(
    ("first", "later", "dtypes"),
    [
        (np.int8(1), 300, "int8, as the example, .* int64 300"),
        (np.float32(0), 1e300, r"float32, as the example, .* float64 1e\+300"),
        (0, 0.5, "int64, as the example, .* float64 0.5"),
        (0, "text", "int64"),
    ],
)
@pytest.mark.parametrize("env_rank", [0, 2])
def test_env_info(first: Any, later: Any, dtypes: str, env_rank: int) -> None:
    factories = [partial(Informing, first, later if b == env_rank else first) for b in range(3)]
    with sampler_of(SAMPLERS["parallel"], factories, n_workers=1, env_info=["n"], **SIZES) as sampler:
        sampler.initialize(Reporting(0, 0))
        misfit = rf"info\['n'\] of env_rank {env_rank} must have shape \(\) and dtype {dtypes}"
        with pytest.raises(WorkerError, match=rf"while stepping env_rank {env_rank}, t=\d \(.*\): {misfit}"):
            sampler.obtain_samples(0)


class Wrapping(BatchedCartPole):
    """A batched environment that returns integers which its space cannot hold."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.single_observation_space = spaces.Box(0, 100, (4,), np.int8)

    def reset(self, **kwargs: Any) -> Any:
        _, info = super().reset(**kwargs)
        return np.full((self.num_envs, 4), 300), info


def test_observations_of_batched_environments() -> None:
    arguments = {"batch_T": 4, "batch_B": 2, "batched": True}
    with SerialSampler(Wrapping, **arguments) as sampler:
        message = r"observation of the batched environment .* must have .* dtype int8, got \(2, 4\) int64"
        with pytest.raises(WorkerError, match=message):
            sampler.initialize(Reporting(0, 0))
            sampler.obtain_samples(0)
