"""Checks the outputs of a model and converts them to numpy arrays. Errors name the output, and both shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.errors import SpaceError

_FLOATS_OF_NUMPY = (torch.float32, torch.float64)


def output_tuple(output: object, forms: Sequence[tuple[str, ...]], agent: str) -> tuple[Any, ...]:
    """Return `output`. Raise `SpaceError` unless it is a tuple as long as one of `forms`."""
    if isinstance(output, tuple):
        for form in forms:
            if len(output) == len(form):
                return output
    wanted = " or ".join(f"({', '.join(form)})" for form in forms)
    got = f"{type(output).__name__} of {len(output)}" if isinstance(output, tuple) else type(output).__name__
    raise SpaceError(f"the model must return a tuple {wanted}, got {got}: see {agent}")


def output_array(output: Any, name: str, *shapes: tuple[int, ...]) -> npt.NDArray[Any]:
    """The tensor or array `output` as an array in float64 or float32; all other types become float32.

    Raises `SpaceError` with `name` for a shape that is not in `shapes`, and for bools.
    """
    is_array = output.__class__ is np.ndarray  # from `inference="numpy"`
    if not is_array and output.__class__ is not torch.Tensor and not isinstance(output, torch.Tensor):
        raise SpaceError(f"the model's {name} must be a tensor of shape {_any_of(shapes)}, got {type(output).__name__}")
    if output.shape not in shapes:
        raise SpaceError(f"the model's {name} must have shape {_any_of(shapes)}, got {tuple(output.shape)}")
    if is_array:
        if output.dtype.char in "fd":
            return output  # type: ignore[no-any-return]
        _refuse_bools(output.dtype == np.bool_, name)
        return output.astype(np.float32)  # type: ignore[no-any-return]
    if output.dtype not in _FLOATS_OF_NUMPY:
        _refuse_bools(output.dtype == torch.bool, name)
        output = output.float()
    if output.requires_grad:  # if it is a parameter of the model
        output = output.detach()
    array: npt.NDArray[Any] = (output if output.is_cpu else output.cpu()).numpy()
    return array


def value_array(output: object, rows: int) -> npt.NDArray[np.float32]:
    """The model's values, of shape `[B]` or `[B, 1]`, as they are recorded: float32 `[B]`."""
    value: npt.NDArray[np.float32] = output_array(output, "value", (rows,), (rows, 1))
    if value.dtype != np.float32:
        value = value.astype(np.float32)
    return value if value.ndim == 1 else value.reshape(rows)


def _refuse_bools(is_bool: bool, name: str) -> None:
    if is_bool:
        raise SpaceError(f"the model's {name} must be numbers, got bools: return what they were computed from")


def _any_of(shapes: Sequence[tuple[int, ...]]) -> str:
    return " or ".join(map(str, dict.fromkeys(shapes)))
