"""The random agent. It needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.agents.base import Agent, AgentStep
from penstock.agents.drawing import draw
from penstock.agents.noise import ColumnNoise


class RandomAgent(Agent):
    """Draws random actions from the action space, with the distribution of `space.sample()`. Its values are zero.

    Supports every action space that can be recorded. Each column has its own random stream, so that its actions do
    not depend on the sampler or on the number of workers.
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
