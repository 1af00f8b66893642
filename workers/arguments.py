"""Checks of numbers and choices that callers give; errors name the argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.errors import ConfigError, brief

MOST_ENVS = 10**7  #: more environments in one process are a mistake
_INT64 = 2**63 - 1


def integer(name: str, value: Any, least: int | None = None, most: int | None = _INT64) -> int:
    """`value` as an int; raises `ConfigError` naming the argument unless it is an integer within the bounds.

    numpy's integers are fine. Arrays and tensors are refused, even with one element: they may be meant as lists.
    """
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise ConfigError(f"{name} must be an integer{bound}, got {brief(value)}")
    if most is not None and not (-most <= value <= most):
        raise ConfigError(f"{name} must be at most {most:,}, got {brief(value)}")
    return int(value)


def one_of(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise `ConfigError` naming the argument unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def seconds(name: str, value: Any) -> float:
    """`value` as a float; raises `ConfigError` naming the argument unless it is a positive number."""
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not is_number or not value > 0:
        raise ConfigError(f"{name} must be a positive number of seconds, got {brief(value)}")
    try:
        return float(value)
    except OverflowError:
        return float("inf")
