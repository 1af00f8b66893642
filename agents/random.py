"""The random agent: actions drawn uniformly from the space. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.agents.base import Agent, AgentStep
from penstock.agents.drawing import draw
from penstock.agents.noise import ColumnNoise

__all__ = ["RandomAgent"]


class RandomAgent(Agent):
    """Draws every action from the action space, whatever the observation; its values are zero.

    Works on every action space that can be recorded. Column b's actions come from its own stream, so
    they are the same in every sampler and with any number of workers.
    """

    _noise: ColumnNoise

    def seed_columns(self, rngs: Sequence[np.random.Generator]) -> None:
        self._noise = ColumnNoise(rngs, partial(draw, self.action_space))

    def reseed_columns(self, columns: npt.NDArray[np.intp], rngs: Sequence[np.random.Generator]) -> None:
        self._noise.reseed(columns, rngs)

    def step(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> AgentStep:
        return AgentStep(self._noise.next_row(self.selected))

    def value(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> Any:
        return np.zeros(len(prev_reward), np.float32)
