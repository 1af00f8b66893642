"""Policy-gradient agent for Discrete actions: a categorical distribution over the model's logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from torch import nn

from penstock.agents.base import AgentStep
from penstock.agents.noise import ColumnNoise
from penstock.agents.torch_agent import TorchAgent
from penstock.buffers.named import NamedArrays
from penstock.errors import SpaceError

__all__ = ["CategoricalPgAgent"]


class CategoricalPgAgent(TorchAgent):
    """Samples from the categorical distribution of the model's logits.

    `model(observation)` returns `(logits, value)`: logits `[B, n]` for a `Discrete(n)` action space,
    value `[B]` or `[B, 1]`. Recorded in `agent_info`: `log_prob` and `value`, float32 `[T, B]`.

    `greedy_eval=True` takes the most probable action in evaluation. Each column's noise comes from its
    own stream, one uniform number a step; drawing by inversion keeps a column's actions independent of
    how many columns a worker has, up to the last bit of the model's matrix products.
    """

    action_space: spaces.Discrete

    def __init__(self, model: nn.Module | Callable[..., nn.Module], *, greedy_eval: bool = False) -> None:
        super().__init__(model)
        self.greedy_eval = greedy_eval
        self._greedy = False

    def initialize(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any], *, seed: int | None = None
    ) -> None:
        if not isinstance(action_space, spaces.Discrete):
            raise SpaceError(
                f"CategoricalPgAgent needs a Discrete action space, the environment has {action_space}: "
                "use an agent made for it, or discretize the actions with a wrapper"
            )
        super().initialize(observation_space, action_space, seed=seed)

    def seed_columns(self, rngs: Sequence[np.random.Generator]) -> None:
        self._noise = ColumnNoise(rngs, lambda rng, n: rng.random(n))

    def sample_mode(self, itr: int) -> None:
        super().sample_mode(itr)
        self._greedy = False

    def eval_mode(self, itr: int) -> None:
        super().eval_mode(itr)
        self._greedy = self.greedy_eval

    def step(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> AgentStep:
        logits, value = self._logits_and_value(observation, prev_action, prev_reward)
        # Sampled in numpy: on a row of a few columns a torch operator costs two to three times as much.
        largest = logits.max(axis=1, keepdims=True)
        if not np.isfinite(largest).all():  # NaN, inf, or no action that is possible at all
            bad = logits[~np.isfinite(largest[:, 0])][0]
            raise FloatingPointError(f"the model gave logits that are not finite: {bad}")
        shifted = logits - largest
        cumulative = np.exp(shifted).cumsum(axis=1)
        total = cumulative[:, -1]
        if self._greedy:
            index = logits.argmax(axis=1)
        else:
            threshold = self._noise.next_row() * total
            index = (cumulative <= threshold[:, None]).sum(axis=1)
        log_prob = shifted[np.arange(len(index)), index] - np.log(total)
        return AgentStep(index + self.action_space.start, NamedArrays(log_prob=log_prob, value=value))

    def value(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> Any:
        return self._logits_and_value(observation, prev_action, prev_reward)[1]

    def _logits_and_value(
        self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        output = self.forward(observation, prev_action, prev_reward)
        if not isinstance(output, tuple) or len(output) != 2:
            raise SpaceError(
                f"the model must return a tuple (logits, value), got {type(output).__name__}: see CategoricalPgAgent"
            )
        logits = output[0].float().numpy()
        value = output[1].float().numpy()
        rows, n = len(prev_reward), int(self.action_space.n)
        if logits.shape != (rows, n):
            raise SpaceError(f"the model's logits must have shape {(rows, n)}, got {logits.shape}")
        if value.shape not in ((rows,), (rows, 1)):
            raise SpaceError(f"the model's value must have shape {(rows,)} or {(rows, 1)}, got {value.shape}")
        return logits, value.reshape(rows)
