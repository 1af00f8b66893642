"""The base of policy-gradient agents: a model with a value output, and a policy head that draws actions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from torch import nn

from penstock.agents.action_masks import ActionMask, mask_of
from penstock.agents.agent import AgentStep, Space
from penstock.agents.inference import Inference
from penstock.agents.model_outputs import output_array, output_tuple, value_array
from penstock.agents.noise import ColumnNoise
from penstock.agents.torch_agent import ModelSource, TorchAgent
from penstock.buffers.named import NamedArrays


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


class PgAgent(TorchAgent):
    """Base of policy-gradient agents. The model returns the parameters of the action distribution, then the value
    `[B]` or `[B, 1]`.

    `record_distribution=True` records all parameters of the distribution in `agent_info`, by the names of the model's
    outputs.

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
        inference: Inference = "torch",
    ) -> None:
        super().__init__(model, inference=inference)
        self.greedy_eval, self.record_distribution = greedy_eval, record_distribution
        self._greedy = False

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

    def reseed_columns(self, columns: npt.NDArray[np.intp], rngs: Sequence[np.random.Generator]) -> None:
        self._noise.reseed(columns, rngs)

    def sample_mode(self, itr: int) -> None:
        super().sample_mode(itr)
        self._greedy = False

    def eval_mode(self, itr: int) -> None:
        super().eval_mode(itr)
        self._greedy = self.greedy_eval

    def _set_greedy(self, greedy: bool) -> None:
        self._greedy = greedy

    def step(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> AgentStep:
        *outputs, value = self._outputs(observation, prev_action, prev_reward)
        return AgentStep(*self._choose(observation, outputs, value, len(prev_reward)))

    def value(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> Any:
        return value_array(self._outputs(observation, prev_action, prev_reward)[-1], len(prev_reward))

    def _outputs(self, *inputs: Any) -> tuple[Any, ...]:
        return output_tuple(self.forward(*inputs), self._forms, type(self).__name__)

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
