"""The base of policy-gradient agents: a model with a value output, and a policy head that draws actions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from penstock.agents.action_masks import ActionMask, mask_of
from penstock.agents.agent import AgentStep, Space
from penstock.agents.inference import Inference
from penstock.agents.noise import ColumnNoise
from penstock.agents.torch_agent import Device, ModelSource, TorchAgent, output_array, output_tuple, value_array
from penstock.buffers.named import NamedArrays, map_leaves
from penstock.buffers.samples import Samples
from penstock.errors import ConfigError


@dataclass(frozen=True)
class EvaluatedSteps:
    """What the present parameters make of recorded steps: see `PgAgent.evaluate`. All tensors have gradients."""

    log_prob: Tensor  #: `[...]`, of the recorded actions; comparable with `agent_info.log_prob`
    _value: Tensor | None
    _entropy: Callable[[], Tensor]
    _distribution: Callable[[], Distribution]

    @property
    def value(self) -> Tensor:
        """`[...]`, as the model returns it."""
        if self._value is None:
            raise ConfigError("the model of this agent returns no value: use your critics, on part.env.observation")
        return self._value

    @cached_property
    def entropy(self) -> Tensor:
        """`[...]`, of the action distribution. For a `GaussianPgAgent`: before the actions are clipped."""
        return self._entropy()

    @property
    def distribution(self) -> Distribution:
        """The action distribution `[...]`. It is made when you ask for it: `log_prob` and `entropy` do not need it."""
        return self._distribution()


class PolicyHead(ABC):
    """The action distribution for one action space. The copies of an agent share it, so it has no changing state.
    The constructor raises `SpaceError` with the name of `agent` for a space that it does not support.
    """

    #: Names of the model's outputs before the value. One tuple for each form that the head accepts.
    outputs: ClassVar[tuple[tuple[str, ...], ...]]

    @abstractmethod
    def __init__(self, action_space: Space, agent: str) -> None: ...

    def prepare_model(self, model: nn.Module) -> None:
        """Add missing parameters to the model. Called once, in the main process."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, n: int) -> npt.NDArray[Any]:
        """Noise `[n, ...]` for the next n steps of one column."""

    @abstractmethod
    def act(
        self, model: nn.Module, outputs: Sequence[Any], rows: int, noise: npt.NDArray[Any] | None
    ) -> tuple[npt.NDArray[Any], dict[str, Any]]:
        """Actions `[B, ...]` and agent_info for the model's `outputs`. Without `noise`, the most probable actions."""

    def parameters(self, model: nn.Module, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The parameters of the distribution, with gradients, for the model's `outputs` `[N, ...]`. `log_prob`,
        `entropy` and `distribution` get them. A head of your own defines these three if its agent has `evaluate`."""
        return outputs

    def log_prob(self, parameters: Sequence[Tensor], action: Tensor, agent_info: NamedArrays) -> Tensor:
        """Of the recorded actions `[..., *shape]`, on the device of the parameters. `agent_info` is as recorded."""
        raise ConfigError(f"{type(self).__name__} has no log_prob: define log_prob and entropy for agent.evaluate")

    def entropy(self, parameters: Sequence[Tensor]) -> Tensor:
        """`[...]`"""
        raise ConfigError(f"{type(self).__name__} has no entropy: define log_prob and entropy for agent.evaluate")

    def distribution(self, parameters: Sequence[Tensor]) -> Distribution:
        """As an object of torch."""
        raise ConfigError(f"{type(self).__name__} has no distribution: define it, or use log_prob and entropy")


class PgAgent(TorchAgent):
    """Base of policy-gradient agents. The model returns the parameters of the action distribution, then the value
    `[B]` or `[B, 1]`.

    `record_distribution=True` records all parameters of the distribution in `agent_info`, by the names of the model's
    outputs. `mask_key` is for heads of discrete actions (see `Agent.mask_key`).

    Subclasses set `head_cls`. Each column has its own random stream. So the actions of a column do not depend on the
    number of columns in a worker, except where rounding in the model decides.
    """

    head_cls: ClassVar[type[PolicyHead]]  #: subclasses set this
    _head: PolicyHead
    _mask: ActionMask | None
    _extra_outputs: ClassVar[tuple[str, ...]] = ("value",)

    def __init__(
        self,
        model: ModelSource,
        *,
        greedy_eval: bool = False,
        record_distribution: bool = False,
        mask_key: str | None = None,
        inference: Inference = "torch",
        device: Device = None,
    ) -> None:
        super().__init__(model, inference=inference, device=device)
        self.greedy_eval, self.record_distribution, self.mask_key = greedy_eval, record_distribution, mask_key

    def initialize(self, observation_space: Space, action_space: Space, *, seed: int | None = None) -> None:
        self._head = self._make_head(action_space)
        self._forms = tuple(form + self._extra_outputs for form in self._head.outputs)
        super().initialize(observation_space, action_space, seed=seed)
        self._head.prepare_model(self.model)
        self._mask = mask_of(self)

    def _make_head(self, action_space: Space) -> PolicyHead:
        return self.head_cls(action_space, type(self).__name__)

    def seed_columns(self, rngs: Sequence[np.random.Generator]) -> None:
        self._noise = ColumnNoise(rngs, self._head.draw)

    def step(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> AgentStep:
        *outputs, value = self._outputs(observation, prev_action, prev_reward)
        return AgentStep(*self._choose(observation, outputs, value, len(prev_reward)))

    def value(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> Any:
        return value_array(self._outputs(observation, prev_action, prev_reward)[-1], len(prev_reward))

    def _outputs(self, *inputs: Any) -> tuple[Any, ...]:
        return output_tuple(self.forward(*inputs), self._forms, type(self).__name__)

    # ---- for learners ----------------------------------------------------------------------

    def evaluate(self, part: Samples) -> EvaluatedSteps:
        """`log_prob`, `entropy` and `value` of recorded steps with the present parameters, with gradients.

        `part` are samples of any dimensions: a whole batch `[T, B]`, a minibatch `[N]`. A recurrent agent needs rows in
        their order, `[T, B]` or sequences `[length, N]`, which begin with a recorded state. Masks are applied as when
        the agent acted. The samples may be on another device than the model: they are moved there.

        With unchanged parameters, `log_prob` and `value` equal those in `agent_info`, except for rounding. For the loss
        of PPO: `ratio = (agent.evaluate(part).log_prob - part.agent.agent_info.log_prob).exp()`.

        Raises `ConfigError` for anything but samples. Samples that lack a field (after `select`) raise an
        `AttributeError` that names it.
        """
        require_samples(part)
        *outputs, value = self._replayed(part)
        lead, head = part.env.valid.shape, self._head
        if self._mask is not None:
            legal = self._mask.legal_tensor(as_rows(part.env.observation, len(lead))).to(outputs[0].device)
            # Not -inf: the entropy would have no gradient.
            outputs[0] = outputs[0].masked_fill(~legal, torch.finfo(outputs[0].dtype).min)
        params = head.parameters(self.model, outputs)
        if len(lead) != 1:
            params = [param.reshape(*lead, *param.shape[1:]) for param in params]
        action = torch.as_tensor(part.agent.action)
        action = action if action.device == value.device else action.to(value.device)
        log_prob = head.log_prob(params, action, part.agent.agent_info)
        value = value if value.shape == lead else value.reshape(lead)
        return EvaluatedSteps(log_prob, value, partial(head.entropy, params), partial(head.distribution, params))

    def _replayed(self, part: Samples) -> tuple[Tensor, ...]:
        """The model's outputs for recorded steps, as rows `[N, ...]`."""
        return replayed_rows(self, part, self._forms)

    def _choose(
        self, observation: object, outputs: Sequence[Any], value: object, rows: int, **more: Any
    ) -> tuple[Any, NamedArrays]:
        """Actions, and agent_info: what the head reports, the value, and `more`."""
        if self._link is not None:
            *outputs, value = self.fetched([*outputs, value])
        if self._mask is not None:
            logits = output_array(outputs[0], "logits", (rows, self._mask.n))
            outputs = [np.where(self._mask.legal(observation), logits, -np.inf)]
        noise = None if self._greedy else self._noise.next_row(self.selected)
        action, info = self._head.act(self.model, outputs, rows, noise)
        if self.record_distribution:
            (form,) = (form for form in self._head.outputs if len(form) == len(outputs))
            for name, output in zip(form, outputs, strict=True):
                if name not in info:  # some heads always report it
                    more[name] = output_array(output, name, tuple(output.shape))
        return action, NamedArrays(info, value=value_array(value, rows), **more)


def require_samples(part: Any) -> None:
    """`evaluate` takes nothing else."""
    if not isinstance(part, Samples):
        raise ConfigError(f"evaluate takes samples, or a part of them such as a minibatch, got {type(part).__name__}")


def replayed_rows(agent: TorchAgent, part: Samples, forms: tuple[tuple[str, ...], ...]) -> tuple[Tensor, ...]:
    """The outputs of a model without a state for recorded steps, as rows `[N, ...]`."""
    env = part.env
    inputs = [env.observation, *(previous_inputs(part) if agent._takes_previous else ())]
    rows = [agent.learner_tensor(field) for field in inputs]
    if (n_lead := env.valid.ndim) != 1:
        rows = [as_rows(field, n_lead) for field in rows]
    return output_tuple(agent.model(*rows), forms, type(agent).__name__)


def previous_inputs(part: Samples) -> tuple[Any, Any]:
    """The previous actions and rewards that the agent got: zero at the first step of an episode."""
    starts = part.env.prev_done

    def without_starts(leaf: Any) -> Any:
        kept = (~starts).reshape(*starts.shape, *(1,) * (leaf.ndim - starts.ndim))
        return leaf * kept

    return map_leaves(without_starts, part.agent.prev_action), without_starts(part.env.prev_reward)


def as_rows(value: object, n_lead: int) -> Any:
    """`value`, whose first `n_lead` dimensions are those of the samples, as rows `[N, ...]`."""
    return map_leaves(lambda leaf: leaf.reshape(-1, *leaf.shape[n_lead:]), value)
