"""Checks on what agents hand over, and the optional ones on environments; `envs.checks` has those always on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.buffers.named import NamedArrays, as_named
from penstock.envs.rows import ColumnError, RowWriter, row_writer
from penstock.errors import SpaceError, brief

__all__ = [
    "Checks",
    "checked_writer",
    "write_action",
]


@dataclass(frozen=True)
class Checks:
    """The checks that cost something, and are therefore the user's choice."""

    check_finite: bool = False  #: NaN and inf in rewards and floating-point observations
    debug: bool = False  #: actions and observations against their spaces, one by one


# ---- always on: what an agent returns ----------------------------------------------------------


def write_action(row: Any, action: Any, name: str = "action") -> None:
    """Write what `agent.step` returned into `row` `[B, ...]`, which numpy alone would do too readily.

    Raises `SpaceError` naming both shapes or dtypes if `action` would have to be repeated to fill the
    row, or cast to another kind (float to integer).
    """
    if row.__class__ is action.__class__ is np.ndarray and action.dtype == row.dtype and action.shape == row.shape:
        row[...] = action
    elif isinstance(row, NamedArrays):
        _write_parts(row, action, name)
    else:
        row[...] = _fitting(row, action, name)


def _write_parts(row: NamedArrays, action: Any, name: str) -> None:
    if not isinstance(action, NamedArrays):
        action = as_named(action)
    if not isinstance(action, NamedArrays) or set(action.keys()) != set(row.keys()):
        got = list(action.keys()) if isinstance(action, NamedArrays) else type(action).__name__
        raise SpaceError(f"agent.step must return an {name} with the fields {list(row.keys())}, got {got}")
    for field, part in row.items():
        write_action(part, action[field], f"{name}.{field}")


def _fitting(row: npt.NDArray[Any], action: Any, name: str) -> npt.NDArray[Any]:
    try:
        array = np.asarray(action)
    except (TypeError, ValueError) as error:
        raise SpaceError(f"agent.step must return {name} as an array {row.shape}, got {brief(action)}") from error
    if array.shape != row.shape:
        raise SpaceError(
            f"agent.step must return one {name} per column: shape {row.shape} for B={len(row)}, got {array.shape}"
        )
    if np.can_cast(array.dtype, row.dtype, "same_kind") or _holds(row.dtype, array):
        return array
    raise SpaceError(
        f"agent.step must return {name} with a dtype that the action space's {row.dtype} can hold, "
        f"got {array.dtype}: convert it in the agent"
    )


def _holds(dtype: np.dtype[Any], array: npt.NDArray[Any]) -> bool:
    """Whether an unsigned type holds signed values."""
    if dtype.kind not in "iu" or array.dtype.kind not in "iu":
        return False
    limits = np.iinfo(dtype)
    return bool(array.size == 0 or (array.min() >= limits.min and array.max() <= limits.max))


# ---- optional ----------------------------------------------------------------------------------


def checked_writer(space: gym.Space[Any], checks: Checks, name: str = "observation") -> RowWriter:
    """The writer for rows of `space`'s elements that also makes the optional checks that are on."""
    writer = row_writer(space, name)
    if checks.debug:
        writer = _ContainsWriter(writer, space, name)
    if checks.check_finite:
        writer = _FiniteWriter(writer, space, name)
    return writer


class _FiniteWriter:
    """Looks for NaN and inf in the row when it is written, a leaf at a time."""

    def __init__(self, writer: RowWriter, space: gym.Space[Any], name: str) -> None:
        self._writer, self._space, self._name = writer, space, name

    def prepare(self, row: Any) -> Any:
        return self._writer.prepare(row), _float_leaves(self._space, row, self._name)

    def write(self, prepared: Any, values: Sequence[Any]) -> None:
        inner, leaves = prepared
        self._writer.write(inner, values)
        for name, leaf in leaves:
            finite = np.isfinite(leaf)
            if not finite.all():
                first = tuple(np.argwhere(~finite)[0].tolist())
                where = f" at index {first[1:]}" if first[1:] else ""
                raise ColumnError(first[0], name, f"must be finite (check_finite=True), got {leaf[first]}{where}")


def _float_leaves(space: gym.Space[Any], row: Any, name: str) -> list[tuple[str, npt.NDArray[Any]]]:
    """The floating-point arrays of a row with their names in errors."""
    if isinstance(space, spaces.Dict):
        parts = [(sub, row[str(key)], f"{name}[{key!r}]") for key, sub in space.items()]
    elif isinstance(space, spaces.Tuple):
        parts = [(sub, row[f"_{i}"], f"{name}[{i}]") for i, sub in enumerate(space)]
    else:
        return [(name, row)] if row.dtype.kind == "f" else []
    return [leaf for part in parts for leaf in _float_leaves(*part)]


class _ContainsWriter:
    """Asks the space about every value, once it is known to have the right shape and dtype."""

    def __init__(self, writer: RowWriter, space: gym.Space[Any], name: str) -> None:
        self._writer, self._space, self._name = writer, space, name
        self.prepare = writer.prepare

    def write(self, prepared: Any, values: Sequence[Any]) -> None:
        self._writer.write(prepared, values)
        for column, value in enumerate(values):
            if not self._space.contains(value):
                problem = f"must be in {self._space} (debug=True), got {brief(value)}"
                raise ColumnError(column, self._name, problem)
