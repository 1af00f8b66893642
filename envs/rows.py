"""Between one row of the samples buffer `[B, ...]` and the per-environment values of Gymnasium.

Both directions are resolved once, from the space, into plain functions that handle a whole row: a
nested space then costs per row and leaf, not per environment.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from penstock.buffers.native import put_row
from penstock.errors import SpaceError

__all__ = ["ColumnError", "RowWriter", "action_splitter", "arrays_like", "in_range", "row_writer"]

Splitter = Callable[[Any], Sequence[Any]]

# A float64 that is too large for float32 becomes inf with a warning. As an error it is found where it happens, and
# costs nothing where it does not. Where the user has other filters than this, inf is recorded.
warnings.filterwarnings(
    "error",
    "overflow encountered in cast",
    RuntimeWarning,
    r"penstock\.(envs\.rows|collectors\.(columns|episode_ends))",
)


class RowWriter(Protocol):
    """Records one element of a space per environment into a row `[B, ...]`.

    Values are cast within their kind (float64 to float32), never from float to integer.
    """

    def prepare(self, row: Any) -> Any:
        """What `write` needs to know of `row`, worked out once."""

    def write(self, prepared: Any, values: Sequence[Any]) -> None:
        """Record `values` into the row that was prepared.

        Raises `ColumnError` naming the column, the expected and the given shape or dtype if a value
        does not fit.
        """


class ColumnError(SpaceError):
    """What one column returned does not fit. Whoever knows the environments says which one: `naming`."""

    def __init__(self, column: int, name: str, problem: str) -> None:
        super().__init__(f"{name} of column {column} {problem}")
        self.column, self._name, self._problem = column, name, problem

    def naming(self, env_rank: int) -> SpaceError:
        """The same, told of an environment instead of a column."""
        return SpaceError(f"{self._name} of env_rank {env_rank} {self._problem}")


def row_writer(space: gym.Space[Any], name: str = "observation") -> RowWriter:
    """The writer for rows of `space`'s elements; `name` is what errors call them."""
    if isinstance(space, spaces.Dict):
        parts: list[tuple[str, Any, RowWriter]]
        parts = [(str(key), key, row_writer(sub, f"{name}[{key!r}]")) for key, sub in space.items()]
        return _StructureWriter(parts, space, name)
    if isinstance(space, spaces.Tuple):
        parts = [(f"_{i}", i, row_writer(sub, f"{name}[{i}]")) for i, sub in enumerate(space)]
        return _StructureWriter(parts, space, name)
    return _ArrayWriter(name) if space.shape else _ScalarWriter(name)


def arrays_like(space: gym.Space[Any], arrays: Any) -> Any:
    """The arrays in which elements of `space` are recorded, in the structure of those: dicts, tuples and arrays of the
    same memory, as in Gymnasium's batched spaces, and as `put_row` and `put_cell` take them."""
    if isinstance(space, spaces.Dict):
        return {key: arrays_like(sub, arrays[str(key)]) for key, sub in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(arrays_like(sub, arrays[f"_{i}"]) for i, sub in enumerate(space))
    return arrays


class _ArrayWriter:
    """Boxes and the like: arrays of at least one dimension."""

    def __init__(self, name: str) -> None:
        self._name = name

    def prepare(self, row: Any) -> Any:
        # A row whose reshape would be a copy has no flat view, and is written value by value.
        flat = row.reshape(len(row) * row.shape[1], *row.shape[2:]) if row.flags.c_contiguous else None
        return row, row[np.newaxis], flat, [row.shape[1]] * len(row), _casting(row.dtype)

    def write(self, prepared: Any, values: Sequence[Any]) -> None:
        row, as_only_row, flat, lengths, casting = prepared
        if put_row(as_only_row, 0, values):
            return
        try:
            # `concatenate` compares all dimensions but the first, of which the sum might be right by chance.
            if flat is None or list(map(len, values)) != lengths:
                raise ValueError
            np.concatenate(values, out=flat, casting=casting)  # one C loop for the row
        except (ValueError, TypeError, RuntimeError, RuntimeWarning):
            _write_each(row, values, self._name)


class _ScalarWriter:
    """Discrete, and boxes without dimensions."""

    def __init__(self, name: str) -> None:
        self._name = name

    def prepare(self, row: Any) -> Any:
        return row, row[np.newaxis]

    def write(self, prepared: Any, values: Sequence[Any]) -> None:
        row, as_only_row = prepared
        if put_row(as_only_row, 0, values):
            return
        try:
            array = np.asarray(values)
            if array.shape == row.shape and np.can_cast(array.dtype, row.dtype, _casting(row.dtype)):
                row[...] = array
                return
        except (ValueError, TypeError, RuntimeError, RuntimeWarning):
            pass  # named below, column by column
        _write_each(row, values, self._name)


class _StructureWriter:
    """Dict and Tuple: a writer for every part."""

    def __init__(self, parts: Sequence[tuple[str, Any, RowWriter]], space: gym.Space[Any], name: str) -> None:
        self._parts, self._space, self._name = parts, space, name

    def prepare(self, row: Any) -> Any:
        parts = [(key, writer.write, writer.prepare(row[field])) for field, key, writer in self._parts]
        return arrays_like(self._space, row[np.newaxis]), parts

    def write(self, prepared: Any, values: Sequence[Any]) -> None:
        as_only_row, parts = prepared
        if put_row(as_only_row, 0, values):
            return
        try:
            if list(map(len, values)) != [len(parts)] * len(values):
                raise TypeError
            for key, write, part in parts:
                write(part, [value[key] for value in values])
        except (KeyError, IndexError, TypeError) as error:
            wanted = [key for _, key, _ in self._parts]
            for column, value in enumerate(values):
                if not _has_just(value, wanted):
                    has = list(value) if isinstance(value, dict) else _description(value)
                    problem = f"must have the entries {wanted}, got {has}"
                    raise ColumnError(column, self._name, problem) from error
            raise


def _casting(target: np.dtype[Any]) -> Literal["safe", "same_kind"]:
    """A float may lose precision on its way into the batch; an integer may not lose its value."""
    return "same_kind" if target.kind == "f" else "safe"


def _has_just(value: Any, keys: Sequence[Any]) -> bool:
    try:
        if len(value) != len(keys):
            return False
        for key in keys:
            value[key]
    except (KeyError, IndexError, TypeError):
        return False
    return True


def _write_each(row: Any, values: Sequence[Any], name: str) -> None:
    """The slow path: values that are no arrays (lists, Python numbers) are fine, the first one that
    does not fit is named."""
    for column, value in enumerate(values):
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise ColumnError(column, name, f"is ragged: {error}") from error
        except (TypeError, RuntimeError) as error:  # a tensor that requires a gradient, or is on a GPU
            raise ColumnError(column, name, f"cannot be made an array: {error}") from error
        if array.shape != row.shape[1:]:
            got = _description(value) if array.dtype == object else array.shape
            raise ColumnError(
                column,
                name,
                f"must have shape {row.shape[1:]}, got {got}: "
                "the environment's declared space and what it returns differ",
            )
        target = row.dtype
        fits = np.can_cast(array.dtype, target, _casting(target)) or (
            array.dtype.kind in "iu" and target.kind in "iu" and in_range(array, target)
        )
        if not fits:
            raise ColumnError(
                column,
                name,
                f"must have dtype {target}, got {array.dtype}"
                + (
                    f" with values from {array.min()} to {array.max()}"
                    if array.dtype.kind in "iu" and array.size
                    else ""
                )
                + ": the environment's declared space and what it returns differ",
            )
        with np.errstate(over="ignore"):
            row[column] = array
        if (
            target.kind == "f"
            and array.dtype.kind == "f"
            and (lost := np.isinf(row[column]) & np.isfinite(array)).any()
        ):
            raise ColumnError(column, name, f"must have values that {target} can hold, got {array[lost].flat[0]}")


def _description(value: Any) -> str:
    """What came instead of an array or a structure."""
    if value is None:
        return "None"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def in_range(array: Any, dtype: np.dtype[Any]) -> bool:
    """Whether an array of integers can be held by the integer `dtype`."""
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
