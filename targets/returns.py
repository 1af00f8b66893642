"""Advantages and returns of a policy's own steps: GAE, n-step returns, lambda returns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from penstock.buffers import Samples
from penstock.errors import ConfigError, brief
from penstock.targets.steps import Array, Ends, Steps

if TYPE_CHECKING:
    from torch import Tensor


@overload
def gae(steps: Samples, discount: float, lambda_: float) -> tuple[Tensor, Tensor]: ...
@overload
def gae(steps: Steps[Array], discount: float, lambda_: float) -> tuple[Array, Array]: ...
def gae(steps: Samples | Steps[Array], discount: float, lambda_: float) -> tuple[Array, Array]:
    """Generalized advantage estimates (Schulman et al., 2016), and the returns `advantage + value`. Both `[T, B]`.

    `steps` is a sampler's batch, or `Steps` of other data. No result uses steps of the next episode. The value after a
    step is 0 if the step terminated its episode, `final_value` if it truncated it, and `bootstrap_value` in the last
    row. Rows that are not `valid` are 0 in both results.

    Raises `ConfigError` if the values were not recorded (`initialize(agent, bootstrap_value=True)`).
    """
    steps, discount = as_steps(steps, discount)
    ends = Ends(steps)
    delta = ends.steps_only(steps.reward + discount * ends.following(steps.value) - steps.value)
    advantage = ends.summed_backwards(delta, discount * checked_lambda(lambda_))
    return advantage, ends.steps_only(advantage + steps.value)


@overload
def n_step_return(steps: Samples, n: int, discount: float) -> Tensor: ...
@overload
def n_step_return(steps: Steps[Array], n: int, discount: float) -> Array: ...
def n_step_return(steps: Samples | Steps[Array], n: int, discount: float) -> Array:
    """The discounted sum of the next `n` rewards and of the value after them. `[T, B]`

    The sum is shorter where the episode or the batch ends. `gae` says which value then comes after it.
    """
    steps, discount = as_steps(steps, discount)
    if not isinstance(n, int | np.integer) or n < 1:
        raise ConfigError(f"n must be an integer of at least 1, got {n!r}")
    ends = Ends(steps)
    found: Array = steps.value
    for _ in range(min(n, len(steps.reward))):
        found = steps.reward + discount * ends.following(found)
    found = ends.steps_only(found)
    return found


@overload
def lambda_return(steps: Samples, discount: float, lambda_: float) -> Tensor: ...
@overload
def lambda_return(steps: Steps[Array], discount: float, lambda_: float) -> Array: ...
def lambda_return(steps: Samples | Steps[Array], discount: float, lambda_: float) -> Array:
    """The average of the n-step returns with the weights `(1 - lambda) lambda ** (n - 1)`. `[T, B]`

    TD(lambda) and Dreamer use it. It equals the second result of `gae`, except for rounding. It has gradients with
    respect to the rewards and values.
    """
    steps, discount = as_steps(steps, discount)
    ends, weight = Ends(steps), checked_lambda(lambda_)
    after = ends.following(steps.value)
    # In the last row of an episode or of the batch, the value after it has the whole weight.
    rest = ends.in_last_rows(after, (1 - weight) * after)
    found: Array = ends.summed_backwards(ends.steps_only(steps.reward + discount * rest), discount * weight)
    return found


def as_steps(steps: Samples | Steps[Array], discount: float) -> tuple[Steps[Array], float]:
    """`steps` as `Steps`, and `discount` as a float of Python: one of numpy would turn float32 results into float64.
    Raises `ConfigError` if they have no values, or if `discount` is not from 0 to 1."""
    discount = number_up_to(1.0, "discount", discount)
    return steps if isinstance(steps, Steps) else Steps.of(steps), discount


def checked_lambda(lambda_: float) -> float:
    """`lambda_` as a float of Python. Raises `ConfigError` if it is not from 0 to 1."""
    return number_up_to(1.0, "lambda_", lambda_)


def number_up_to(most: float, name: str, value: Any) -> float:
    """`value` as a float of Python. Raises `ConfigError` if it is not a number from 0 to `most`."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError):  # an array or a tensor of several numbers, for example
        number = math.nan
    if not 0 <= number <= most:
        raise ConfigError(f"{name} must be from 0 to {most:g}, got {brief(value)}")
    return number
