"""The random agent. It needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.agents.action_masks import ActionMask, mask_of
from penstock.agents.agent import Agent, AgentStep, Space
from penstock.agents.noise import ColumnNoise
from penstock.agents.space_draws import draw


class RandomAgent(Agent):
    """Draws random actions from the action space, with the distribution of `space.sample()`. Its values are zero.

    Supports every action space that can be recorded. Each column has its own random stream, so that its actions do
    not depend on the sampler or on the number of workers.

    With `mask_key`, only legal actions are drawn, all with the same probability (see `Agent.mask_key`).
    """

    _noise: ColumnNoise
    _mask: ActionMask | None = None

    def __init__(self, *, mask_key: str | None = None) -> None:
        self.mask_key = mask_key

    def initialize(self, observation_space: Space, action_space: Space, *, seed: int | None = None) -> None:
        super().initialize(observation_space, action_space, seed=seed)
        self._mask = mask_of(self)

    def seed_columns(self, rngs: Sequence[np.random.Generator]) -> None:
        mask = self._mask
        if mask is None:
            self._noise = ColumnNoise(rngs, partial(draw, self.action_space))
        else:
            self._noise = ColumnNoise(rngs, lambda rng, n: rng.random((n, mask.n_components)))

    def step(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> AgentStep:
        drawn = self._noise.next_row(self.selected)
        return AgentStep(drawn if self._mask is None else self._mask.draw(self._mask.legal(observation), drawn))

    def value(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> Any:
        return np.zeros(len(prev_reward), np.float32)
