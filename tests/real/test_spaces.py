"""With any spaces, nested or of unusual types, batches equal the reference loop."""

from __future__ import annotations

import copy
import zlib
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from penstock import ParallelSampler, RandomAgent, SerialSampler
from penstock.testing.reference_envs import row_of

from ..against_loop import compare
from ..envs.space_strategies import any_space, discrete, sample
from ..scale import examples, pairs
from ..support import Diary

pytestmark = pytest.mark.slow

ODD = {
    "float16": spaces.Box(-np.inf, np.inf, (3,), np.float16),
    "float64": spaces.Box(-1, 1, (2, 2), np.float64),
    "no dimensions": spaces.Box(0, 1, (), np.float32),
    "empty": spaces.Box(0, 1, (0, 3), np.float32),
    "picture": spaces.Box(0, 255, (4, 5, 3), np.uint8),
    "flags": spaces.Box(0, 1, (3,), np.bool_),
    "int8": spaces.Box(-128, 127, (2,), np.int8),
    "uint32": spaces.Box(0, 2**32 - 1, (2,), np.uint32),
    "discrete": spaces.Discrete(7, start=-3),
    "small discrete": discrete(250, 5, np.uint8),
    "binary": spaces.MultiBinary((2, 3)),
    "multi": spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[-1, 0], [1, 2]]),
    "tuple": spaces.Tuple([spaces.Dict({"x": spaces.Discrete(3)}), spaces.Box(-9, 9, (1,), np.int16)]),
}


class Drawn(gym.Env[Any, Any]):
    """Observations are elements of the space in turn. Reward and end depend on every bit of the actions."""

    def __init__(self, observation_space: Any, action_space: Any, b: int) -> None:
        # A space has a random generator, which environments must not share.
        self.observation_space, self.action_space = copy.deepcopy((observation_space, action_space))
        self.elements = sample(self.observation_space, 23, seed=b)
        self.count, self.age, self.b = 0, 0, b

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.age = 0
        return self.next_observation(), {}

    def step(self, action: Any) -> Any:
        leaves = row_of(self.action_space, action)  # with the recorded dtype
        arrays = [leaf for _, leaf in leaves.leaves()] if hasattr(leaves, "leaves") else [leaves]
        code = zlib.crc32(b"".join(array.tobytes() for array in arrays))
        self.age += 1
        terminated, truncated = code % 7 == 0, self.age == 5 + self.b
        return self.next_observation(), (code % 1000) / 8, terminated, truncated, {"code": code % 1000}

    def next_observation(self) -> Any:
        self.count += 1
        return self.elements[self.count % len(self.elements)]


def compare_with(sampler_cls: Any, observation_space: Any, action_space: Any, **kwargs: Any) -> None:
    env_fns = [lambda b=b: Drawn(observation_space, action_space, b) for b in range(3)]
    options = {"batch_B": 3, "env_info": {"code": 0}, "n_batches": 3, "traj_info_cls": Diary}
    compare(sampler_cls, env_fns, RandomAgent, **(options | kwargs))


both_modes = pytest.mark.parametrize("wait_reset", [False, True])


@both_modes
@examples(8, 50)
@given(observation_space=any_space, action_space=any_space, T=st.integers(1, 9))
def test_batches_equal_what_a_plain_loop_records(
    wait_reset: bool, observation_space: Any, action_space: Any, T: int
) -> None:
    compare_with(SerialSampler, observation_space, action_space, batch_T=T, wait_reset=wait_reset)


@pytest.mark.parametrize(("name", "wait_reset"), pairs(ODD, [False, True]))
def test_odd_spaces(name: str, wait_reset: bool) -> None:
    compare_with(SerialSampler, ODD[name], ODD[name], batch_T=7, wait_reset=wait_reset)


@both_modes
@pytest.mark.timeout(60)
def test_all_odd_spaces_at_once_in_processes(wait_reset: bool) -> None:
    together = spaces.Dict(ODD)
    n_workers = {"sampler": {"n_workers": 2}}
    compare_with(ParallelSampler, together, together, batch_T=7, wait_reset=wait_reset, **n_workers)
