"""Recurrent agents: the model passes a state from step to step."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.agents.agent import AgentStep, Space
from penstock.agents.categorical import CategoricalHead
from penstock.agents.epsilon_greedy import EpsilonGreedyAgent
from penstock.agents.gaussian import GaussianHead
from penstock.agents.inference import Inference
from penstock.agents.model_outputs import output_tuple, value_array
from penstock.agents.policy_gradient import PgAgent, PolicyHead, previous_inputs
from penstock.agents.recurrent_state import RecurrentState
from penstock.agents.schedules import Setting
from penstock.agents.torch_agent import Device, ModelSource, TorchAgent
from penstock.buffers.named import NamedArrays
from penstock.buffers.samples import Samples
from penstock.errors import ConfigError

_RecordState = Literal["step", "batch"] | None


class _RecurrentAgent(TorchAgent):
    """The state of each column, from step to step, for an agent whose model returns it last."""

    recurrent = True
    _state: RecurrentState

    def __init__(self, model: ModelSource, *, record_state: _RecordState = "step", **options: Any) -> None:
        super().__init__(model, **options)
        if self.inference != "torch":
            raise ConfigError(
                f'{type(self).__name__} needs inference="torch", got "{self.inference}": a recurrent model cannot be '
                "traced with its state"
            )
        if record_state not in ("step", "batch", None):
            raise ConfigError(f'record_state must be "step", "batch" or None, got {record_state!r}')
        self.record_state = record_state
        self._has_stepped = np.zeros(0, np.bool_)  # per column: whether it has stepped in this batch

    def initialize(self, observation_space: Space, action_space: Space, *, seed: int | None = None) -> None:
        super().initialize(observation_space, action_space, seed=seed)
        parameters = list(inspect.signature(self.model.forward).parameters.values())
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(positional) < 4 and not any(p.kind == p.VAR_POSITIONAL for p in parameters):
            raise ConfigError(
                f"the forward of a recurrent model takes (observation, prev_action, prev_reward, state), but the "
                f"forward of {type(self.model).__name__} takes ({', '.join(p.name for p in positional)})"
            )
        RecurrentState(self.model, 1, self._float_dtype)  # raises if the model does not define its initial state

    def seed_columns(self, rngs: Sequence[np.random.Generator]) -> None:
        super().seed_columns(rngs)
        self._state = RecurrentState(self.model, len(rngs), self._float_dtype)
        self._has_stepped = np.zeros(len(rngs), np.bool_)

    def reseed_columns(self, columns: npt.NDArray[np.intp], rngs: Sequence[np.random.Generator]) -> None:
        super().reseed_columns(columns, rngs)
        self._has_stepped[columns] = False

    def select(self, columns: npt.NDArray[np.intp] | None) -> None:
        super().select(columns)
        self._state.select(columns)

    def reset(self) -> None:
        self._state.reset()

    def reset_one(self, column: int) -> None:
        self._state.reset_one(column)

    def sample_mode(self, itr: int) -> None:
        super().sample_mode(itr)
        self._has_stepped[...] = False

    def _record(self) -> dict[str, Any]:
        """What agent_info has of the state before the step."""
        if self.record_state is None:
            return {}
        recorded = self._state.numpy()
        if self.record_state == "step":
            return {"prev_rnn_state": recorded}
        columns = slice(None) if self.selected is None else self.selected
        is_first = ~self._has_stepped[columns]
        recorded[~is_first] = 0
        self._has_stepped[columns] = True
        # A state that was recorded may be zero too, so the zeros alone do not say where there is none.
        return {"prev_rnn_state": recorded, "has_rnn_state": is_first}


class RecurrentPgAgent(_RecurrentAgent, PgAgent):
    """A policy-gradient agent whose model passes a state from step to step. Subclasses set `head_cls`.

    `model(observation, prev_action, prev_reward, state)` gets one step of B columns. It returns the outputs of the
    corresponding agent without recurrence, followed by the new state. Every tensor of the state has the leading
    dimension B. The state of `nn.LSTMCell` has this form. The state of `nn.LSTM` is `[layers, B, hidden]`: swap the
    first two dimensions in the module. `RecurrentState` explains the initial state. At the first step of an episode
    the state is the initial one, and `prev_action` and `prev_reward` are zero.

    `record_state="step"` records the state before each step as `agent_info.prev_rnn_state` `[T, B, ...]`: an array,
    or `NamedArrays` if the state has several tensors. `"batch"` records the state before the batch's first step in
    row 0, and zeros in the other rows, for learners that start the model at the batch's first step;
    `agent_info.has_rnn_state` `[T, B]` is True in row 0 only. None records nothing.
    """

    _extra_outputs = ("value", "new_state")

    def __init__(
        self,
        model: ModelSource,
        *,
        greedy_eval: bool = False,
        record_distribution: bool = False,
        record_state: _RecordState = "step",
        mask_key: str | None = None,
        inference: Inference = "torch",
        device: Device = None,
    ) -> None:
        super().__init__(
            model,
            greedy_eval=greedy_eval,
            record_distribution=record_distribution,
            record_state=record_state,
            mask_key=mask_key,
            inference=inference,
            device=device,
        )

    def step(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> AgentStep:
        record = self._record()
        *outputs, value, state = self._outputs(observation, prev_action, prev_reward, self._state.current)
        action, info = self._choose(observation, outputs, value, len(prev_reward), **record)
        self._state.advance(state)
        return AgentStep(action, info)

    def value(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> Any:
        # A copy: the model might change its state in place.
        outputs = self._outputs(observation, prev_action, prev_reward, self._state.copy())
        return value_array(outputs[-2], len(prev_reward))

    def _replayed(self, part: Samples) -> tuple[Tensor, ...]:
        if part.env.valid.ndim != 2:
            raise ConfigError(
                f"evaluate of {type(self).__name__} needs rows in their order, [T, B], these samples have "
                f"{list(part.env.valid.shape)}: take sequences, with samples.minibatches(n, length=...)"
            )
        inputs = part.env.observation, *previous_inputs(part)
        tensors = [self.learner_tensor(each) for each in inputs]
        rows = zip(*(x.rows() if isinstance(x, NamedArrays) else x.unbind() for x in tensors), strict=True)
        starts = self.learner_tensor(part.env.prev_done)
        states = RecurrentState(self.model, 1, self._float_dtype)
        state, initial = states.recorded(self.learner_tensor(part.initial_state)), states.initial()
        columns = list[list[Tensor]]()
        for row, row_starts, has_start in zip(rows, starts, starts.any(1).tolist(), strict=True):
            if has_start:
                state = states.restarted(state, initial, row_starts)
            first, *others, state = output_tuple(self.model(*row, state), self._forms, type(self).__name__)
            *others, value = others
            # A log_std may be the same for all columns.
            columns.append([first, *(each.expand_as(first) for each in others), value])
        return tuple(torch.cat(rows) for rows in zip(*columns, strict=True))


class RecurrentCategoricalPgAgent(RecurrentPgAgent):
    """`CategoricalPgAgent` with a recurrent model, which returns `(logits, value, new_state)`.

    See `RecurrentPgAgent` for the model and its state, `CategoricalPgAgent` for the actions. A discrete
    `prev_action` consists of integers: encode it in the model, as one-hot vectors for example.
    """

    head_cls = CategoricalHead


class RecurrentGaussianPgAgent(RecurrentPgAgent):
    """`GaussianPgAgent` with a recurrent model.

    The model returns `(mean, value, new_state)` or `(mean, log_std, value, new_state)`.

    See `RecurrentPgAgent` for the model and its state, `GaussianPgAgent` for the actions.
    """

    def __init__(
        self,
        model: ModelSource,
        *,
        initial_log_std: float | Sequence[float] | None = 0.0,
        greedy_eval: bool = False,
        record_distribution: bool = False,
        record_state: _RecordState = "step",
        inference: Inference = "torch",
        device: Device = None,
    ) -> None:
        super().__init__(
            model,
            greedy_eval=greedy_eval,
            record_distribution=record_distribution,
            record_state=record_state,
            inference=inference,
            device=device,
        )
        self._initial_log_std = initial_log_std

    def _make_head(self, action_space: Space) -> PolicyHead:
        return GaussianHead(action_space, type(self).__name__, self._initial_log_std)


class RecurrentEpsilonGreedyAgent(_RecurrentAgent, EpsilonGreedyAgent):
    """`EpsilonGreedyAgent` with a recurrent model, which returns `(q, new_state)`.

    See `RecurrentPgAgent` for the model, its state and `record_state`, `EpsilonGreedyAgent` for epsilon. A replay with
    `Sequences` keeps the recorded states.
    """

    def __init__(
        self,
        model: ModelSource,
        *,
        epsilon: Setting = 0.1,
        spread: float | None = None,
        eval_epsilon: float = 0.0,
        mask_key: str | None = None,
        record_state: _RecordState = "step",
        device: Device = None,
    ) -> None:
        super().__init__(
            model,
            epsilon=epsilon,
            spread=spread,
            eval_epsilon=eval_epsilon,
            mask_key=mask_key,
            record_state=record_state,
            device=device,
        )

    def step(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> AgentStep:
        record = self._record()
        q, state = self._outputs(observation, prev_action, prev_reward, self._state.current)
        step = self._choose(self._q(q, len(prev_reward)), self._legal(observation), **record)
        self._state.advance(state)
        return step

    def value(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> Any:
        # A copy: the model might change its state in place.
        q, _ = self._outputs(observation, prev_action, prev_reward, self._state.copy())
        return self._largest(self._q(q, len(prev_reward)), self._legal(observation))

    def _outputs(self, *inputs: Any) -> tuple[Any, ...]:
        return output_tuple(self.forward(*inputs), (("q", "new_state"),), type(self).__name__)
