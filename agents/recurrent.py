"""Recurrent agents: the model passes a state from step to step. The state of each column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from penstock.agents.agent import AgentStep, Space
from penstock.agents.categorical import CategoricalHead
from penstock.agents.epsilon_greedy import EpsilonGreedyAgent
from penstock.agents.gaussian import GaussianHead
from penstock.agents.inference import Inference
from penstock.agents.policy_gradient import PgAgent, PolicyHead, previous_inputs
from penstock.agents.schedules import Setting
from penstock.agents.torch_agent import Device, ModelSource, TorchAgent, output_tuple, value_array
from penstock.arguments import must_be, signature
from penstock.buffers.named import NamedArrays, fields_of
from penstock.buffers.samples import Samples
from penstock.errors import ConfigError, SpaceError

_HALF = (torch.float16, torch.bfloat16)  # recorded as float32


class RecurrentState:
    """The state of a recurrent model for each column: a tensor `[B, ...]`, or several of them in a tuple, a named
    tuple or a dict. The model gets a dict as `NamedArrays`.

    The model defines the initial state of one column, without the dimension B, in one of three ways: `initial_state`
    is the state, or `initial_state()` returns it, or `state_shape` is its shape and the state starts at zero. Shapes
    are, for example, `(64,)` or `((64,), (64,))`. Raises `ConfigError` if the model has no such attribute.
    """

    def __init__(self, model: nn.Module, n_columns: int, dtype: torch.dtype) -> None:
        self._model, self._n_columns, self._dtype = model, n_columns, dtype
        self._selected: torch.Tensor | None = None
        self.reset()

    def select(self, columns: npt.NDArray[np.intp] | None) -> None:
        """From now on, read and advance the state of these columns only (None: of all columns)."""
        self._selected = None if columns is None else torch.from_numpy(columns)

    def reset(self) -> None:
        """Set all columns to the initial state."""
        with torch.inference_mode():
            initial = self.initial()
            self._example, self._names, leaves = initial, tuple(_parts(initial)), _parts(initial).values()
            self._leaves = [self._cast(leaf).repeat(self._n_columns, *(1,) * leaf.ndim) for leaf in leaves]

    def reset_one(self, column: int) -> None:
        """Set one column to the initial state. States that were returned earlier do not change."""
        with torch.inference_mode():
            self._leaves = [leaf.clone() for leaf in self._leaves]
            for leaf, initial in zip(self._leaves, _parts(self.initial()).values(), strict=True):
                leaf[column] = initial

    def column_state(self, column: int) -> list[Any]:
        """The column's numbers, one nested list for each tensor."""
        return [leaf[column].tolist() for leaf in self._leaves]

    def load_column_state(self, column: int, state: Sequence[Any]) -> None:
        """Continue with these numbers."""
        with torch.inference_mode():
            self._leaves = [leaf.clone() for leaf in self._leaves]
            for leaf, numbers in zip(self._leaves, state, strict=True):
                leaf[column] = torch.tensor(numbers, dtype=leaf.dtype)

    @property
    def current(self) -> Any:
        """The state `[B, ...]`, in the structure that the model uses."""
        return _rebuild(self._example, self._names, self._selected_leaves())

    def _selected_leaves(self) -> list[torch.Tensor]:
        if self._selected is None:
            return self._leaves
        with torch.inference_mode():
            return [leaf[self._selected] for leaf in self._leaves]

    def copy(self) -> Any:
        """A copy of `current`."""
        with torch.inference_mode():
            return _rebuild(self._example, self._names, [leaf.clone() for leaf in self._selected_leaves()])

    def numpy(self) -> Any:
        """A copy to record: an array `[B, ...]`, or `NamedArrays` of them (`_0`, `_1` for a tuple)."""
        arrays = [
            (leaf.float() if leaf.dtype in _HALF else leaf).detach().cpu().numpy().copy()
            for leaf in self._selected_leaves()
        ]
        return arrays[0] if self._names == ("",) else NamedArrays(dict(zip(self._names, arrays, strict=True)))

    def advance(self, new: object) -> None:
        """Set the model's new state. Raises `SpaceError` if its structure, shapes or dtypes have changed."""
        parts = _parts(new)
        leaves, before = list(parts.values()), self._selected_leaves()
        if tuple(parts) != self._names or any(
            not isinstance(leaf, torch.Tensor) or leaf.shape != old.shape or leaf.dtype != old.dtype
            for leaf, old in zip(leaves, before, strict=True)
        ):
            old = dict(zip(self._names, before, strict=True))
            raise SpaceError(
                "the model's new state must have the structure, shapes and dtypes of the state that it was given: "
                f"expected {_describe(old)}, got {_describe(parts)}"
            )
        if self._selected is None:
            self._leaves = leaves
            return
        with torch.inference_mode():
            for all_columns, leaf in zip(self._leaves, leaves, strict=True):
                all_columns[self._selected] = leaf

    def _cast(self, leaf: torch.Tensor) -> torch.Tensor:
        """Convert floating-point numbers to the dtype of the model's parameters, like its other inputs."""
        return leaf.to(self._dtype) if leaf.is_floating_point() else leaf

    def recorded(self, state: Any) -> Any:
        """What an agent has recorded of its state, tensors `[B, ...]`, in the structure that the model uses."""
        return _rebuild(self._example, self._names, [self._cast(leaf) for leaf in _parts(state).values()])

    def restarted(self, state: Any, initial: Any, starts: torch.Tensor) -> Any:
        """`state` `[B, ...]` with `initial()` where `starts` `[B]`. With gradients: the model may learn it."""
        leaves = []
        for leaf, first in zip(_parts(state).values(), _parts(initial).values(), strict=True):
            leaves.append(torch.where(starts.reshape(-1, *(1,) * first.ndim), self._cast(first), leaf))
        return _rebuild(self._example, self._names, leaves)

    def initial(self) -> Any:
        """The state of one column at the start of an episode, as the model defines it."""
        given = getattr(self._model, "initial_state", None)
        if given is None:
            shape = getattr(self._model, "state_shape", None)
            if shape is None:
                raise ConfigError(
                    f"a recurrent model must define its initial state: give {type(self._model).__name__} an attribute "
                    "state_shape, the shape of one column's zeros, or an attribute or method initial_state"
                )
            return _zeros(shape, self._dtype, next((p.device for p in self._model.parameters()), None))
        state = given() if callable(given) else given
        fits = _parts(state) and all(isinstance(leaf, torch.Tensor) for leaf in _parts(state).values())
        return must_be("initial_state", state, fits, "a tensor, or a tuple or dict of tensors")


def _parts(state: object) -> Mapping[str, Any]:
    """The tensors of a state by name; a single tensor has the name ""."""
    fields = fields_of(state)
    return {"": state} if fields is None else dict(fields)


def _rebuild(example: object, names: Sequence[str], leaves: Sequence[torch.Tensor]) -> Any:
    """A state with the structure of `example`."""
    if isinstance(example, tuple):
        return example._make(leaves) if hasattr(example, "_make") else tuple(leaves)
    return leaves[0] if tuple(names) == ("",) else NamedArrays(dict(zip(names, leaves, strict=True)))


def _describe(parts: Mapping[str, Any]) -> str:
    def one(leaf: Any) -> str:
        is_tensor = isinstance(leaf, torch.Tensor)
        return f"{tuple(leaf.shape)} {str(leaf.dtype)[6:]}" if is_tensor else type(leaf).__name__

    if tuple(parts) == ("",):
        return one(parts[""])
    return "(" + ", ".join(f"{name}: {one(leaf)}" for name, leaf in parts.items()) + ")"


def _zeros(shape: object, dtype: torch.dtype, device: torch.device | None) -> Any:
    if isinstance(shape, int):
        return torch.zeros(shape, dtype=dtype, device=device)
    if isinstance(shape, Mapping):
        return {str(name): _zeros(part, dtype, device) for name, part in shape.items()}
    if isinstance(shape, tuple | list):
        if all(isinstance(n, int) for n in shape):
            return torch.zeros(tuple(shape), dtype=dtype, device=device)
        parts = [_zeros(part, dtype, device) for part in shape]
        return shape._make(parts) if hasattr(shape, "_make") else tuple(parts)
    raise ConfigError(f"state_shape must be a shape, or a tuple or dict of shapes, got {shape!r}")


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
        fits = record_state in ("step", "batch", None)
        self.record_state: _RecordState = must_be("record_state", record_state, fits, '"step", "batch" or None')
        self._has_stepped = np.zeros(0, np.bool_)  # per column: whether it has stepped in this batch

    def initialize(self, observation_space: Space, action_space: Space, *, seed: int | None = None) -> None:
        super().initialize(observation_space, action_space, seed=seed)
        parameters = list(signature(self.model.forward).parameters.values())
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(positional) < 4 and not any(p.kind == p.VAR_POSITIONAL for p in parameters):
            raise ConfigError(
                f"the forward of a recurrent model takes (observation, prev_action, prev_reward, state), but the "
                f"forward of {type(self.model).__name__} takes ({', '.join(p.name for p in positional)})"
            )
        RecurrentState(self.model, 1, self._float_dtype)  # raises if the model does not define its initial state

    def _first_inputs(self) -> list[Any]:
        return [*super()._first_inputs(), RecurrentState(self.model, 1, self._float_dtype).current]

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
        self._has_stepped[columns] = not self.in_turns  # the recorder clears those that are no first steps
        # A recorded state may be all zeros too, so zeros do not say where none was recorded.
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
    `agent_info.has_rnn_state` `[T, B]` is True in row 0 only, where that is valid. None records nothing.
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
        tensors = [self.learner_tensor(field) for field in inputs]
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
            columns.append([first, *(other.expand_as(first) for other in others), value])
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
