"""Checks on actions that agents return, and the optional checks on environments.

The checks on environments that are always made are in `envs/checks.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from penstock.buffers.named import ArrayTree, NamedArrays, as_named
from penstock.buffers.tree import tree_leaves
from penstock.envs.rows import ColumnError, as_dtype, dtype_error
from penstock.errors import SpaceError, brief


@dataclass(frozen=True)
class Checks:
    """The optional checks. They take time, so they are off by default."""

    check_finite: bool = False  #: no NaN or inf in rewards and floating-point observations
    debug: bool = False  #: every action and observation is in its space

    def __bool__(self) -> bool:
        return self.check_finite or self.debug


NO_CHECKS = Checks()

# ---- always on: what an agent returns ----------------------------------------------------------


def write_action(row: ArrayTree, action: Any, name: str = "action") -> None:
    """Write the action that `agent.step` returned into `row` `[B, ...]`.

    Raises `SpaceError` with both shapes if they do not fit, and `ColumnError` with both dtypes if a value would change.
    numpy would repeat a smaller array, drop the fraction of a float, or cut off the high bits of an integer.
    """
    if row.__class__ is action.__class__ is np.ndarray and action.dtype == row.dtype and action.shape == row.shape:
        row[...] = action
    elif isinstance(row, NamedArrays):
        _write_parts(row, action, name)
    else:
        row[...] = _fitting(row, action, name)


def _write_parts(row: NamedArrays, action: object, name: str) -> None:
    action = as_named(action)
    if not isinstance(action, NamedArrays) or set(action.keys()) != set(row.keys()):
        got = list(action.keys()) if isinstance(action, NamedArrays) else type(action).__name__
        raise SpaceError(f"agent.step must return {name} with the fields {list(row.keys())}, got {got}")
    for field, part in row.items():
        write_action(part, action[field], f"{name}.{field}")


def _fitting(row: npt.NDArray[Any], action: object, name: str) -> npt.NDArray[Any]:
    try:
        array = np.asarray(action)
    except (TypeError, ValueError) as error:
        raise SpaceError(f"agent.step must return {name} as an array {row.shape}, got {brief(action)}") from error
    if array.shape != row.shape:
        raise SpaceError(
            f"agent.step must return one {name} per column: shape {row.shape} for B={len(row)}, got {array.shape}"
        )
    fitting: npt.NDArray[Any] | None = as_dtype(array, row.dtype)
    if fitting is None:
        raise dtype_error(name, array, row.dtype, "that of the action space", "convert it in the agent")
    return fitting


# ---- optional ----------------------------------------------------------------------------------


def check_row(
    checks: Checks,
    space: gym.Space[Any],
    arrays: object,
    t: int,
    values: Sequence[Any],
    name: str = "observation",
    *,
    skip: Collection[int] = (),
) -> None:
    """Make the optional checks on `values`, after they were written into row t of `arrays`. Raises `ColumnError`.
    The columns of `skip` have no observation."""
    if checks.debug:
        for column, value in enumerate(values):
            if column not in skip and not space.contains(value):
                raise ColumnError(column, name, f"must be in {space} (debug=True), got {brief(value)}")
    if checks.check_finite:
        for leaf_name, array in tree_leaves(arrays, name):
            row = array[t]
            if row.dtype.kind != "f" or (finite := np.isfinite(row)).all():
                continue
            first = tuple(np.argwhere(~finite)[0].tolist())
            where = f" at index {first[1:]}" if first[1:] else ""
            raise ColumnError(first[0], leaf_name, f"must be finite (check_finite=True), got {row[first]}{where}")
