"""Checks on what environments return, always on: the slow paths.

Whoever steps environments tests with an identity or a class whether a value is of the usual kind, and comes here only
if it is not: to accept what is unusual but right, or to say what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np

from penstock.errors import SpaceError, brief

__all__ = ["episode_flags", "require_info", "require_number", "require_step", "step_values", "step_values_error"]


def step_values(result: Any, env_rank: int) -> tuple[Any, Any, Any, Any, Any]:
    """The five values that `env.step` returned as `result`; raises `SpaceError` unless they are five."""
    try:
        observation, reward, terminated, truncated, info = result
    except (TypeError, ValueError) as error:
        if (misfit := step_values_error(error, env_rank)) is not None:
            raise misfit from error
        raise
    return observation, reward, terminated, truncated, info


def step_values_error(error: Exception, env_rank: int) -> SpaceError | None:
    """What to raise instead of `error`, if it means that `env.step` did not return five values.

    To be called where the values are unpacked: an exception of the environment's own has come through
    a further frame.
    """
    is_own = error.__traceback__ is not None and error.__traceback__.tb_next is not None
    if is_own or not any(word in str(error) for word in ("unpack", "iterat")):
        return None
    return SpaceError(
        f"env.step of env_rank {env_rank} must return five values "
        f"(observation, reward, terminated, truncated, info): {error}"
    )


def require_info(info: Any, env_rank: int, call: str = "step") -> None:
    """Raise `SpaceError` unless `info`, from the environment's `call`, is a dict or another mapping."""
    if not isinstance(info, Mapping):
        raise SpaceError(f"the info that env.{call} of env_rank {env_rank} returned must be a dict, got {brief(info)}")


def require_step(reward: Any, terminated: Any, truncated: Any, info: Any, env_rank: int) -> tuple[bool, bool]:
    """All of these for what `env.step` returned beside the observation; returns the flags."""
    if info.__class__ is not dict:
        require_info(info, env_rank)
    if reward.__class__ is not float:
        require_number(reward, env_rank)
    if terminated.__class__ is truncated.__class__ is bool:
        return terminated, truncated
    return episode_flags(terminated, truncated, env_rank)


def episode_flags(terminated: Any, truncated: Any, env_rank: int) -> tuple[bool, bool]:
    """`terminated` and `truncated` as bools. Fine are bools, 0 and 1, and arrays of one such element.

    Raises `SpaceError` naming the flag and the environment for anything else.
    """
    return _flag(terminated, "terminated", env_rank), _flag(truncated, "truncated", env_rank)


def _flag(value: Any, name: str, env_rank: int) -> bool:
    if value is False or value is True or isinstance(value, np.bool_):
        return bool(value)
    try:
        array = np.asarray(value)  # accepts the scalars of torch and jax too
        if array.size == 1 and array.dtype.kind in "biu" and array.item() in (0, 1):
            return bool(array.item())
    except (TypeError, ValueError):
        pass  # told below
    raise SpaceError(f"{name} of env_rank {env_rank} must be True or False, got {brief(value)}")


def require_number(reward: Any, env_rank: int) -> float:
    """`reward` as a float; raises `SpaceError` naming the environment unless it is a single number."""
    if reward.__class__ is float:
        return reward
    try:
        if isinstance(reward, Real | Decimal):
            return float(reward)
        array = np.asarray(reward)
        if array.shape == () and array.dtype.kind in "fiub":
            return float(array)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass  # told below; torch raises the last where there are gradients
    raise SpaceError(f"the reward of env_rank {env_rank} must be a single number, got {brief(reward)}")
