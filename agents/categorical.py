"""Policy-gradient agent for Discrete and MultiDiscrete actions: categorical distributions over the model's logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from torch import nn

from penstock.agents.distributions import choose
from penstock.agents.model_outputs import output_array
from penstock.agents.policy_gradient import PgAgent, PolicyHead
from penstock.errors import SpaceError

__all__ = ["CategoricalHead", "CategoricalPgAgent"]


class CategoricalHead(PolicyHead):
    """One categorical distribution per component of the action: one for Discrete, `nvec.size` for MultiDiscrete."""

    outputs = (("logits",),)

    def __init__(self, action_space: gym.Space[Any], agent: str) -> None:
        if not isinstance(action_space, spaces.Discrete | spaces.MultiDiscrete):
            raise SpaceError(
                f"{agent} needs a Discrete or MultiDiscrete action space, the environment has {action_space}: "
                "use an agent made for it, or discretize the actions with a wrapper"
            )
        self._is_multi = isinstance(action_space, spaces.MultiDiscrete)
        n = action_space.nvec if isinstance(action_space, spaces.MultiDiscrete) else action_space.n
        sizes = np.asarray(n, np.int64).ravel()
        self._shape: tuple[int, ...] = tuple(action_space.shape or ())
        self._dtype, self._start = action_space.dtype, np.asarray(action_space.start)
        self._n_components, self._n_logits, self._widest = len(sizes), int(sizes.sum()), int(sizes.max())
        # Components of different sizes are padded, so that one pass over the table does for all.
        is_even = bool((sizes == self._widest).all())
        self._filled = None if is_even else (np.arange(self._widest) < sizes[:, None]).ravel()

    def draw(self, rng: np.random.Generator, n: int) -> npt.NDArray[Any]:
        return rng.random((n, self._n_components) if self._is_multi else n)

    def act(
        self, model: nn.Module, outputs: Sequence[Any], rows: int, noise: npt.NDArray[Any] | None
    ) -> tuple[npt.NDArray[Any], dict[str, Any]]:
        logits = output_array(outputs[0], "logits", (rows, self._n_logits))
        if self._filled is not None:
            padded = np.full((rows, self._filled.size), -np.inf, logits.dtype)
            padded[:, self._filled] = logits
            logits = padded
        if self._is_multi:
            logits = logits.reshape(-1, self._widest)
            noise = None if noise is None else noise.reshape(-1)
        index, log_prob = choose(logits, noise)
        if self._is_multi:
            index = index.reshape(rows, *self._shape)
            log_prob = log_prob.reshape(rows, -1).sum(axis=1)
        action = (index + self._start).astype(self._dtype, copy=False)
        return action, {"log_prob": log_prob.astype(np.float32, copy=False)}


class CategoricalPgAgent(PgAgent):
    """Samples from the categorical distribution of the model's logits.

    `model(observation)` returns `(logits, value)`, value `[B]` or `[B, 1]`. For a `Discrete(n)` action space
    logits are `[B, n]`. For a `MultiDiscrete` they are `[B, nvec.sum()]`: those of the first component, then
    those of the second, and so on; the components are independent, and log_prob is their sum. A space that
    starts elsewhere than at 0 shifts the actions: logit 0 is that of the action `start`.

    Recorded in `agent_info`: `log_prob` and `value`, float32 `[T, B]`.

    `greedy_eval=True` takes the most probable action in evaluation. Each column's noise comes from its
    own stream, one uniform number a step and component; drawing by inversion keeps a column's actions
    independent of how many columns a worker has, up to the last bit of the model's matrix products.
    """

    head_cls = CategoricalHead
