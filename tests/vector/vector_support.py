"""What the tests of the vector environment share: environments that tell all of themselves, and comparison."""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium import spaces

from ..envs.space_strategies import sample

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here


def talkative(observation_space: Any, action_space: Any) -> partial[Talkative]:
    """Builds one."""
    return partial(Talkative, observation_space, action_space, sample(copy.deepcopy(observation_space), 17, seed=3))


class Talkative(gym.Env[Any, Any]):
    """Observations are elements of the space; episodes of uneven length, infos of every kind, drawn from the seed."""

    def __init__(self, observation_space: Any, action_space: Any, elements: Any) -> None:
        self.observation_space, self.action_space = copy.deepcopy((observation_space, action_space))
        self.elements = elements

    def _observe(self) -> Any:
        return self.elements[int(self.np_random.integers(len(self.elements)))]

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.age, self.length = 0, int(self.np_random.integers(1, 5))
        return self._observe(), {"length": self.length, "options": str(options)}

    def step(self, action: Any) -> Any:
        flat = np.nan_to_num(spaces.flatten(self.action_space, action)).astype(np.float64)
        self.age += 1
        over, kind = self.age >= self.length, int(self.np_random.integers(3))
        info: dict[str, Any] = {}
        if kind:
            info = {"age": self.age, "nested": {"x": float(kind), "list": [1, "two"]}, "array": np.arange(3) + kind}
        return (
            self._observe(),
            float(np.arange(1, 1 + flat.size) @ flat.ravel()),
            over and kind < 2,
            over and kind > 0,
            info,
        )
