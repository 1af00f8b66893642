"""Write elements of spaces into rows `[B, ...]`, and split rows of actions into elements."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.buffers.named import ArrayTree, NamedArrays, fields_of
from penstock.buffers.native import put_cell, put_row
from penstock.buffers.tree import map_tree
from penstock.errors import SpaceError, brief

Splitter = Callable[[Any], Sequence[Any]]


class ColumnError(SpaceError):
    """An element does not fit. The message names the column."""

    def __init__(self, column: int, name: str, problem: str) -> None:
        super().__init__(column, name, problem)
        self.column, self._name, self._problem = column, name, problem

    def __str__(self) -> str:
        return f"{self._name} of column {self.column} {self._problem}"

    def with_env_rank(self, env_rank: int) -> SpaceError:
        """The same error, with the env_rank in place of the column."""
        return SpaceError(f"{self._name} of env_rank {env_rank} {self._problem}")


def arrays_like(space: gym.Space[Any], arrays: ArrayTree) -> Any:
    """The arrays of `arrays`, a `NamedArrays`, in dicts and tuples, nested as elements of `space` are.

    Nothing is copied.
    """
    return map_tree(lambda _, array: array, space, arrays)


# ---- writing -----------------------------------------------------------------------------------


def write_row(arrays: Any, t: int, values: Sequence[Any], name: str = "observation") -> None:
    """Write `values`, one element of a space per column, into row t of `arrays` `[T, B, ...]`.

    `arrays` is nested as the values are.

    Values are cast within their kind (float64 to float32), never from float to integer. Raises `ColumnError` for the
    first value that does not fit, with `name` and the expected and actual shape, dtype or entries.
    """
    if put_row(arrays, t, values):
        return
    if isinstance(arrays, dict | tuple):
        for key, parts in _split(arrays, values, name):
            write_row(arrays[key], t, parts, f"{name}[{key!r}]")
    elif not _wrote_at_once(arrays[t], values):
        _write_each(arrays[t], values, name)


def write_cell(arrays: object, t: int, column: int, value: object, name: str = "observation") -> None:
    """As `write_row`, for one element in `[t, column]`."""
    if put_cell(arrays, t, column, value):
        return
    try:
        write_row(map_tree(lambda array: array[:, column : column + 1], arrays), t, [value], name)
    except ColumnError as error:
        error.column = column
        raise


def _split(arrays: dict[Any, Any] | tuple[Any, ...], values: Sequence[Any], name: str) -> list[tuple[Any, list[Any]]]:
    """The values' parts, by the keys of the dict or tuple `arrays`."""
    keys = list(arrays) if isinstance(arrays, dict) else list(range(len(arrays)))
    try:  # the fast path; if it fails, look for the first column that does not fit
        if list(map(len, values)) != [len(keys)] * len(values):
            raise TypeError
        return [(key, [value[key] for value in values]) for key in keys]
    except (KeyError, IndexError, TypeError) as error:
        for column, value in enumerate(values):
            if not _has_exactly(value, keys):
                has = list(value) if isinstance(value, dict) else _description(value)
                raise ColumnError(column, name, f"must have the entries {keys}, got {has}") from error
        raise


def _wrote_at_once(row: npt.NDArray[Any], values: Sequence[Any]) -> bool:
    """Write the row in one call of numpy. False if that is impossible: a value does not fit, or has an unusual type."""
    try:
        # By default numpy writes inf, and warns, if a float64 is too large for float32.
        with np.errstate(over="raise"):
            if row.ndim == 1:
                array = np.asarray(values)
                if array.shape == row.shape and np.can_cast(array.dtype, row.dtype, _casting(row.dtype)):
                    row[...] = array
                    return True
            # np.concatenate checks all dimensions except the first, so check that one here.
            elif row.flags.c_contiguous and list(map(len, values)) == [row.shape[1]] * len(row):
                flat = row.reshape(len(row) * row.shape[1], *row.shape[2:])
                np.concatenate(values, out=flat, casting=_casting(row.dtype))
                return True
    except (ValueError, TypeError, RuntimeError, FloatingPointError):
        pass
    return False


def _casting(target: np.dtype[Any]) -> Literal["safe", "same_kind"]:
    """A float may lose precision when it is recorded, but an integer must keep its value."""
    return "same_kind" if target.kind == "f" else "safe"


def _has_exactly(value: Any, keys: Sequence[Any]) -> bool:
    try:
        if len(value) != len(keys):
            return False
        for key in keys:
            value[key]
    except (KeyError, IndexError, TypeError):
        return False
    return True


def _write_each(row: npt.NDArray[Any], values: Sequence[Any], name: str) -> None:
    """Write value by value. Lists and Python numbers are accepted.

    Raises `ColumnError` for the first value that does not fit.
    """
    for column, value in enumerate(values):
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise ColumnError(column, name, f"is ragged: {error}") from error
        except (TypeError, RuntimeError) as error:  # a tensor that requires a gradient, or is on a GPU
            raise ColumnError(column, name, f"cannot be converted to an array: {error}") from error
        target, misfit = row.dtype, None
        if array.shape != row.shape[1:]:
            misfit = f"shape {row.shape[1:]}, got {_description(value) if array.dtype == object else array.shape}"
        elif not (np.can_cast(array.dtype, target, _casting(target)) or in_range(array, target)):
            is_integer = array.dtype.kind in "iu" and array.size
            range_ = f" with values from {array.min()} to {array.max()}" if is_integer else ""
            misfit = f"dtype {target}, got {array.dtype}{range_}"
        if misfit is not None:
            problem = f"must have {misfit}: the environment does not return what its space declares"
            raise ColumnError(column, name, problem)
        with np.errstate(over="ignore"):
            row[column] = array
        if target.kind == array.dtype.kind == "f" and (lost := np.isinf(row[column]) & np.isfinite(array)).any():
            raise ColumnError(column, name, f"must have values that {target} can hold, got {array[lost].flat[0]}")


def _description(value: object) -> str:
    """A value that is not an array or has wrong entries, for an error message."""
    if value is None:
        return "None"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def in_range(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> bool:
    """Whether `array` and `dtype` are integers, and `dtype` can hold every value of `array`."""
    if array.dtype.kind not in "iu" or dtype.kind not in "iu":
        return False
    limits = np.iinfo(dtype)
    return bool(array.size == 0 or (array.min() >= limits.min and array.max() <= limits.max))


def as_dtype(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> Any:
    """`array` in `dtype`, or None if that would change a value. A float may lose precision."""
    if array.dtype == dtype:
        return array
    if not np.can_cast(array.dtype, dtype, "same_kind" if dtype.kind in "fc" else "safe"):
        return array.astype(dtype) if in_range(array, dtype) else None
    try:
        with np.errstate(over="raise"):
            return array.astype(dtype)
    except FloatingPointError:
        return None


def dtype_error(name: str, array: npt.NDArray[Any], dtype: np.dtype[Any], why: str, remedy: str) -> ColumnError:
    """The error for an `array` `[B, ...]` that `as_dtype` refuses: it names the first column in which a value would
    change. `why` says where `dtype` comes from, `remedy` what to do."""
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a complex number loses its imaginary part
            changed = array.astype(dtype) != array
        column = int(changed.reshape(len(array), -1).any(axis=1).argmax())
    except (TypeError, ValueError):  # not numbers
        column = 0
    value = brief(array[column].tolist())
    return ColumnError(column, name, f"must have dtype {dtype}, {why}, got {array.dtype} {value}: {remedy}")


# ---- reading -----------------------------------------------------------------------------------


def action_splitter(space: gym.Space[Any]) -> Splitter:
    """A function that splits a row `[B, ...]` of recorded actions into one action per environment.

    Actions are ints for Discrete, arrays for Box, MultiDiscrete and MultiBinary, dicts and tuples for Dict and Tuple.
    Arrays are copies, so an environment may keep or change its action.
    """
    if (fields := fields_of(space)) is not None:
        keys = list(fields)
        children = [(str(key), action_splitter(sub)) for key, sub in fields.items()]

        def split_parts(row: Mapping[str, Any] | NamedArrays) -> Sequence[Any]:
            rows = zip(*(split(row[field]) for field, split in children), strict=True)
            return [dict(zip(keys, parts, strict=True)) for parts in rows] if is_dict else list(rows)

        is_dict = isinstance(space, Mapping)
        return split_parts
    if isinstance(space, spaces.Discrete):
        return methodcaller("tolist")
    if isinstance(space, spaces.Box) and space.shape == ():
        return lambda row: [row[b : b + 1].reshape(()).copy() for b in range(len(row))]
    return lambda row: list(row.copy())
