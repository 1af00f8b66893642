"""The optional checks on environments. Those that are always made are in `envs/checks.py`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from penstock.buffers.tree import tree_leaves
from penstock.envs.rows import ColumnError
from penstock.errors import brief


@dataclass(frozen=True)
class Checks:
    """The optional checks. They take time, so they are off by default."""

    check_finite: bool = False  #: no NaN or inf in rewards and floating-point observations
    debug: bool = False  #: every action and observation is in its space

    def __bool__(self) -> bool:
        return self.check_finite or self.debug


NO_CHECKS = Checks()


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
