"""The state of a recurrent model, per column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from penstock.buffers.named import NamedArrays, fields_of
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
        if not _parts(state) or not all(isinstance(leaf, torch.Tensor) for leaf in _parts(state).values()):
            raise ConfigError(f"initial_state must be a tensor, or a tuple or dict of tensors, got {state!r}")
        return state


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
