"""The checks on what environments return: those that are always made, and the optional ones.

The loops over environments compare a value's class with its usual class. Only if they differ, they call these
functions. These accept unusual but valid values, and raise `SpaceError` for all others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any

import gymnasium as gym
import numpy as np

from penstock.buffers.tree import map_tree, tree_leaves
from penstock.envs.rows import ColumnError
from penstock.errors import SpaceError, brief

#: Observation, reward, terminated, truncated, info.
StepValues = tuple[Any, Any, Any, Any, Any]


def reset_with(env: Any, seed: Any, options: Any) -> Any:
    """`env.reset`. Options that are None are left out, since the `reset` of some environments has only `seed`."""
    return env.reset(seed=seed) if options is None else env.reset(seed=seed, options=options)


def step_values(result: Any, env_rank: int) -> StepValues:
    """The five values that `env.step` returned as `result`. Raises `SpaceError` unless there are five."""
    try:
        observation, reward, terminated, truncated, info = result
    except (TypeError, ValueError) as error:
        # An error of an iterator of the user's has a longer traceback.
        is_ours = error.__traceback__ is not None and error.__traceback__.tb_next is None
        if is_ours and any(word in str(error) for word in ("unpack", "iterat")):
            raise SpaceError(
                f"env.step of env_rank {env_rank} must return five values "
                f"(observation, reward, terminated, truncated, info): {error}"
            ) from error
        raise
    return observation, reward, terminated, truncated, info


def checked_step(result: Any, env_rank: int) -> StepValues:
    """The five values that `env.step` of one environment returned as `result`: the reward as a float, flags as bools.

    Raises `SpaceError` unless there are five, the reward is a number, the flags are bools and info is a mapping. The
    observation is checked when it is written.
    """
    try:
        observation, reward, terminated, truncated, info = result
    except (TypeError, ValueError):
        return step_values(result, env_rank)  # raises the error for the user
    if info.__class__ is not dict:
        require_info(info, env_rank)
    if reward.__class__ is not float:
        reward = require_number(reward, env_rank)
    if not (terminated.__class__ is truncated.__class__ is bool):
        terminated, truncated = episode_flags(terminated, truncated, env_rank)
    return observation, reward, terminated, truncated, info


def checked_reset(result: object, env_rank: int) -> tuple[Any, Any]:
    """The observation and the info that `env.reset` returned as `result`. Raises `SpaceError` for anything else."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise SpaceError(
            f"env.reset of env_rank {env_rank} must return a tuple (observation, info), got {brief(result)}"
        )
    if result[1].__class__ is not dict:
        require_info(result[1], env_rank, "reset")
    return result


def require_info(info: object, env_rank: int, call: str = "step") -> None:
    """Raise `SpaceError` unless `info` is a mapping. `call` is the method that returned it."""
    if not isinstance(info, Mapping):
        raise SpaceError(f"the info that env.{call} of env_rank {env_rank} returned must be a dict, got {brief(info)}")


def episode_flags(terminated: object, truncated: object, env_rank: int) -> tuple[bool, bool]:
    """`terminated` and `truncated` as bools. Bools, 0 and 1 are accepted, and arrays with one such element.

    Raises `SpaceError` for anything else, with the flag's name.
    """
    return _flag(terminated, "terminated", env_rank), _flag(truncated, "truncated", env_rank)


def _flag(value: object, name: str, env_rank: int) -> bool:
    if value is False or value is True or isinstance(value, np.bool_):
        return bool(value)
    try:
        array = np.asarray(value)  # accepts the scalars of torch and jax too
        if array.size == 1 and array.dtype.kind in "biu" and array.item() in (0, 1):
            return bool(array.item())
    except (TypeError, ValueError):
        pass
    raise SpaceError(f"{name} of env_rank {env_rank} must be True or False, got {brief(value)}")


def require_number(reward: object, env_rank: int) -> float:
    """`reward` as a float. Raises `SpaceError` unless it is a single number."""
    if reward.__class__ is float:
        return reward
    try:
        if isinstance(reward, Real | Decimal):
            return float(reward)
        array = np.asarray(reward)
        if array.shape == () and array.dtype.kind in "fiub":
            return float(array)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass  # torch raises RuntimeError for a tensor that requires a gradient
    remedy = ": return reward.item()" if math.prod(getattr(reward, "shape", (0,))) == 1 else ""
    raise SpaceError(f"the reward of env_rank {env_rank} must be a single number, got {brief(reward)}{remedy}")


# ---- optional checks ---------------------------------------------------------------------------


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
    space: gym.Space[Any] | None,
    arrays: object,
    t: int,
    values: Sequence[Any],
    name: str = "observation",
    *,
    skip: Collection[int] = (),
) -> None:
    """Make the optional checks on `values`, after they were written into row t of `arrays`. Raises `ColumnError`.
    The columns of `skip` have no observation. `space` None: no values are compared with it."""
    if checks.debug and space is not None:
        for column, value in enumerate(values):
            if column not in skip and not space.contains(map_tree(_as_array, value)):
                raise ColumnError(column, name, f"must be in {space} (debug=True), got {brief(value)}")
    if checks.check_finite:
        for leaf_name, array in tree_leaves(arrays, name):
            row = array[t]
            if row.dtype.kind != "f" or (finite := np.isfinite(row)).all():
                continue
            first = tuple(np.argwhere(~finite)[0].tolist())
            where = f" at index {first[1:]}" if first[1:] else ""
            raise ColumnError(first[0], leaf_name, f"must be finite (check_finite=True), got {row[first]}{where}")


def _as_array(leaf: Any) -> Any:
    """A numpy number as an array, since `Box.contains` of Gymnasium warns of numbers; other leaves as they are."""
    return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
