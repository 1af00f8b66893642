"""A batched environment of one's own, for several files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from penstock.envs import SameStep

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here


class Batch(SameStep):
    """Counts in a structure. A row's episodes have 2, 3 or 4 steps, as its seed says. `wrong` spoils observations."""

    def __init__(self, num_envs: int, wrong: Callable[[Any], Any] = lambda observation: observation) -> None:
        self.num_envs, self.wrong = num_envs, wrong
        self.single_observation_space = spaces.Dict(
            {"at": spaces.Box(0, 100, (2,), np.float32), "both": spaces.Tuple([spaces.Discrete(100)] * 2)}
        )
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def _observe(self, rows: Any) -> Any:
        count = self.count[rows]
        return {"at": np.stack([count, count], 1).astype(np.float32), "both": (count.copy(), 2 * count)}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.count, self.length = np.zeros(self.num_envs, np.int64), np.array([2 + each % 3 for each in seed])
        return self._observe(slice(None)), {}

    def advance(self, actions: Any) -> Any:
        self.count += 1
        observation, done = self.wrong(self._observe(slice(None))), self.count == self.length
        return observation, self.count * 1.0, done, np.zeros_like(done), {"count": self.count.copy()}

    def reset_rows(self, rows: Any) -> Any:
        self.count[rows] = 0
        return self._observe(rows), {"count": self.count[rows]}
