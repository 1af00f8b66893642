"""Between one row of the samples buffer `[B, ...]` and the per-environment values of Gymnasium.

Both directions are resolved once, from the space, into plain functions that handle a whole row: a
nested space then costs per row and leaf, not per environment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from penstock.errors import SpaceError

__all__ = ["action_splitter", "row_writer"]

RowWriter = Callable[[Any, Sequence[Any]], None]
Splitter = Callable[[Any], Sequence[Any]]


def row_writer(space: gym.Space[Any], name: str = "observation") -> RowWriter:
    """`write(row, values)` records `values`, one element of `space` per environment, into `row`.

    Raises `SpaceError` naming the column, the expected and the given shape or dtype if a value does
    not fit. Values are cast within their kind (float64 to float32), never from float to integer.
    """
    if isinstance(space, spaces.Dict):
        parts: list[tuple[str, Any, RowWriter]]
        parts = [(str(key), key, row_writer(sub, f"{name}[{key!r}]")) for key, sub in space.items()]
        return _structure_writer(parts, name)
    if isinstance(space, spaces.Tuple):
        parts = [(f"_{i}", i, row_writer(sub, f"{name}[{i}]")) for i, sub in enumerate(space)]
        return _structure_writer(parts, name)
    shape = space.shape
    if not shape:
        return lambda row, values: _write_scalars(row, values, name)

    shape_of = attrgetter("shape")

    def write(row: Any, values: Sequence[Any]) -> None:
        try:
            if list(map(shape_of, values)) != [shape] * len(values):
                raise ValueError  # even if the sizes add up
            if not row.flags.c_contiguous:
                raise ValueError  # its reshape would be a copy
            # One C loop for the row.
            np.concatenate(values, out=row.reshape(-1, *shape[1:]), casting=_casting(row.dtype))
        except (ValueError, TypeError, AttributeError):
            _write_each(row, values, name)

    return write


def _casting(target: np.dtype[Any]) -> Literal["safe", "same_kind"]:
    """A float may lose precision on its way into the batch; an integer may not lose its value."""
    return "same_kind" if target.kind == "f" else "safe"


def _structure_writer(parts: Sequence[tuple[str, Any, RowWriter]], name: str) -> RowWriter:
    def write(row: Any, values: Sequence[Any]) -> None:
        try:
            for field, key, write_part in parts:
                write_part(row[field], [value[key] for value in values])
        except (KeyError, IndexError, TypeError) as error:
            wanted = [key for _, key, _ in parts]
            for column, value in enumerate(values):
                has = list(value) if isinstance(value, dict) else type(value).__name__
                if not _has_all(value, wanted):
                    text = f"{name} of column {column} must have the entries {wanted}, got {has}"
                    raise _misfit(column, text) from error
            raise

    return write


def _misfit(column: int, text: str) -> SpaceError:
    """The error for one column's value; whoever knows the environments can look the column up in it."""
    error = SpaceError(text)
    error.column = column  # type: ignore[attr-defined]
    return error


def _has_all(value: Any, keys: Sequence[Any]) -> bool:
    try:
        for key in keys:
            value[key]
    except (KeyError, IndexError, TypeError):
        return False
    return True


def _write_scalars(row: Any, values: Sequence[Any], name: str) -> None:
    try:
        array = np.asarray(values)
        if array.shape == row.shape and np.can_cast(array.dtype, row.dtype, _casting(row.dtype)):
            row[...] = array
            return
    except (ValueError, TypeError):
        pass  # named below, column by column
    _write_each(row, values, name)


def _write_each(row: Any, values: Sequence[Any], name: str) -> None:
    """The slow path: values that are no arrays (lists, Python numbers) are fine, the first one that
    does not fit is named."""
    for column, value in enumerate(values):
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise _misfit(column, f"{name} of column {column} is ragged: {error}") from error
        if array.shape != row.shape[1:]:
            raise _misfit(
                column,
                f"{name} of column {column} must have shape {row.shape[1:]}, got {array.shape}: "
                "the environment's declared space and what it returns differ",
            )
        target = row.dtype
        fits = np.can_cast(array.dtype, target, _casting(target)) or (
            array.dtype.kind in "iu" and target.kind in "iu" and _in_range(array, target)
        )
        if not fits:
            raise _misfit(
                column,
                f"{name} of column {column} must have dtype {target}, got {array.dtype}"
                + (
                    f" with values from {array.min()} to {array.max()}"
                    if array.dtype.kind in "iu" and array.size
                    else ""
                )
                + ": the environment's declared space and what it returns differ",
            )
        row[column] = array


def _in_range(array: Any, dtype: np.dtype[Any]) -> bool:
    limits = np.iinfo(dtype)
    return bool(array.size == 0 or (array.min() >= limits.min and array.max() <= limits.max))


def action_splitter(space: gym.Space[Any]) -> Splitter:
    """`split(row)` gives one action per environment: ints for Discrete, arrays for Box, MultiDiscrete
    and MultiBinary, dicts and tuples for Dict and Tuple. Arrays are copies: an environment may keep or
    change what it was given without touching the recorded batch."""
    if isinstance(space, spaces.Dict):
        keys = list(space.keys())
        children = [(str(key), action_splitter(sub)) for key, sub in space.items()]
        return lambda row: [
            dict(zip(keys, values, strict=True))
            for values in zip(*(split(row[field]) for field, split in children), strict=True)
        ]
    if isinstance(space, spaces.Tuple):
        members = [(f"_{i}", action_splitter(sub)) for i, sub in enumerate(space)]
        return lambda row: list(zip(*(split(row[field]) for field, split in members), strict=True))
    if isinstance(space, spaces.Discrete):
        return lambda row: row.tolist()
    if isinstance(space, spaces.Box) and space.shape == ():
        return lambda row: [row[b : b + 1].reshape(()).copy() for b in range(len(row))]
    return lambda row: list(row.copy())
