"""Policy-gradient agent for Discrete and MultiDiscrete actions: categorical distributions over the model's logits."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent

from penstock.agents.agent import Space
from penstock.agents.distributions import choose
from penstock.agents.policy_gradient import PgAgent, PolicyHead
from penstock.agents.torch_agent import output_array
from penstock.buffers.named import NamedArrays
from penstock.errors import SpaceError


class CategoricalHead(PolicyHead):
    """One categorical distribution per component of the action: one for Discrete, `nvec.size` for MultiDiscrete."""

    outputs = (("logits",),)

    def __init__(self, action_space: Space, agent: str) -> None:
        if not isinstance(action_space, spaces.Discrete | spaces.MultiDiscrete):
            raise SpaceError(
                f"{agent} needs a Discrete or MultiDiscrete action space, the environment has {action_space}: "
                "use an agent for this space, or discretize the actions with a wrapper"
            )
        self._is_multi = isinstance(action_space, spaces.MultiDiscrete)
        n = action_space.nvec if isinstance(action_space, spaces.MultiDiscrete) else action_space.n
        self._n_actions = np.asarray(n, np.int64)
        sizes = self._n_actions.ravel()
        self._shape: tuple[int, ...] = tuple(action_space.shape or ())
        self._dtype, self._start = action_space.dtype, np.asarray(action_space.start)
        self._is_index = self._dtype == np.int64 and not self._start.any()  # the action is the index of its logit
        self._n_components, self._n_logits, self._widest = len(sizes), int(sizes.sum()), int(sizes.max())
        # Pad components of different sizes, so that one table holds the logits of all of them.
        is_even = bool((sizes == self._widest).all())
        self._has_logit = None if is_even else (np.arange(self._widest) < sizes[:, None]).ravel()
        self._first_of_component = np.cumsum(sizes) - sizes
        self._is_checked = False  # whether the outputs of the model have been looked at: once, when the agent is tried

    def draw(self, rng: np.random.Generator, n: int) -> npt.NDArray[Any]:
        return rng.random((n, self._n_components) if self._is_multi else n)

    def act(
        self, model: nn.Module, outputs: Sequence[Any], rows: int, noise: npt.NDArray[Any] | None
    ) -> tuple[npt.NDArray[Any], dict[str, Any]]:
        logits = output_array(outputs[0], "logits", (rows, self._n_logits))
        if not self._is_checked:
            self._is_checked = True
            self._warn_of_probabilities(logits)
        if self._has_logit is not None:
            padded = np.full((rows, self._has_logit.size), -np.inf, logits.dtype)
            padded[:, self._has_logit] = logits
            logits = padded
        if self._is_multi:
            logits = logits.reshape(-1, self._widest)
            noise = None if noise is None else noise.reshape(-1)
        index, log_prob = choose(logits, noise)
        if self._is_multi:
            index = index.reshape(rows, *self._shape)
            log_prob = log_prob.reshape(rows, -1).sum(axis=1)
        action = index if self._is_index else (index + self._start).astype(self._dtype, copy=False)
        return action, {"log_prob": log_prob if log_prob.dtype == np.float32 else log_prob.astype(np.float32)}

    # For learners: the parameters are the log-probabilities `[..., n]`, or `[..., components, n]`.

    def parameters(self, model: nn.Module, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        (logits,) = outputs
        if self._has_logit is not None:
            least = torch.finfo(logits.dtype).min
            padded = logits.new_full((len(logits), self._has_logit.size), least)
            padded[:, torch.from_numpy(self._has_logit).to(logits.device)] = logits
            logits = padded
        if self._is_multi:
            logits = logits.reshape(len(logits), self._n_components, self._widest)
        return [logits.log_softmax(-1)]

    def log_prob(self, parameters: Sequence[Tensor], action: Tensor, agent_info: NamedArrays) -> Tensor:
        (log_probs,) = parameters
        index = action
        if not self._is_index:  # rows that are not valid have zeros, which the space may not have
            index = action.long() - torch.as_tensor(self._start, device=action.device)
            n_actions = torch.as_tensor(self._n_actions, device=action.device)
            index = index.where((index >= 0) & (index < n_actions), 0)
        index = index.reshape(*log_probs.shape[:-1], 1)
        chosen = log_probs.gather(-1, index).squeeze(-1)
        return chosen.sum(-1) if self._is_multi else chosen

    def entropy(self, parameters: Sequence[Tensor]) -> Tensor:
        (log_probs,) = parameters
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return entropy.sum(-1) if self._is_multi else entropy

    def distribution(self, parameters: Sequence[Tensor]) -> Distribution:
        categorical = Categorical(logits=parameters[0], validate_args=False)
        return Independent(categorical, 1, validate_args=False) if self._is_multi else categorical

    def _warn_of_probabilities(self, logits: npt.NDArray[Any]) -> None:
        sums = np.add.reduceat(logits, self._first_of_component, axis=1)
        if self._widest > 1 and (logits > 0).all() and (np.abs(sums - 1) < 1e-5).all():
            warnings.warn(
                "the model seems to return probabilities: its outputs for the actions are positive and sum to 1. They "
                "are taken as logits, so the policy would stay nearly uniform. Leave out the softmax, or return "
                "torch.log(probabilities)",
                RuntimeWarning,
                stacklevel=2,
            )


class CategoricalPgAgent(PgAgent):
    """Samples from the categorical distribution of the model's logits.

    `model(observation)` returns `(logits, value)`, value `[B]` or `[B, 1]`. Logits are unnormalized log-probabilities,
    as the last layer of a network gives them without a softmax. For a `Discrete(n)` action space
    logits are `[B, n]`. For a `MultiDiscrete` they are `[B, nvec.sum()]`: first the logits of the first component,
    then of the second, and so on. The components are independent, and log_prob is the sum over them. Logit 0 belongs
    to the action `start` of the space.

    Recorded in `agent_info`: `log_prob` and `value`, float32 `[T, B]`. With `record_distribution=True`, also the
    `logits` of the model, for losses that compare whole distributions (a KL divergence, for example).

    `greedy_eval=True` takes the most probable action in evaluations. Each column has its own random stream, with one
    uniform number per step and component. So the actions of a column do not depend on the number of columns in a
    worker, except where rounding in the model decides.

    With `mask_key`, illegal actions have probability 0, and `log_prob` is that among the legal ones. The mask has the
    layout of the logits (see `Agent.mask_key` and `ActionMask`).
    """

    head_cls = CategoricalHead
