"""Advantages and returns: GAE, n-step returns and lambda returns of a policy's own steps, V-trace of an older one's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from penstock.arguments import integer, number
from penstock.buffers import Samples
from penstock.errors import ConfigError
from penstock.learning.steps import Array, Ends, Steps, zero_where

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor


@overload
def gae(steps: Samples, discount: float | Tensor, lambda_: float) -> tuple[Tensor, Tensor]: ...
@overload
def gae(steps: Steps[Array], discount: float | Array, lambda_: float) -> tuple[Array, Array]: ...
def gae(steps: Samples | Steps[Array], discount: float | Array, lambda_: float) -> tuple[Array, Array]:
    """Generalized advantage estimates (Schulman et al., 2016), and the returns `advantage + value`. Both `[T, B]`.

    `steps` is a sampler's batch, or `Steps` of other data. No result uses steps of the next episode. The value after a
    step is 0 if the step terminated its episode, `final_value` if it truncated it, and `bootstrap_value` in the last
    row. Rows that are not `valid` are 0 in both results.

    `discount` is a number, or `[T, B]` with one number for each row. In all functions of this package, that is for
    decisions that take several steps of the environment: `0.99 ** steps`.

    Raises `ConfigError` if the values were not recorded (`initialize(agent, bootstrap_value=True)`), or if an argument
    is not from 0 to 1.
    """
    steps, discount = as_steps(steps, discount)
    ends = Ends(steps)
    delta = ends.steps_only(steps.reward + discount * ends.following(steps.value) - steps.value)
    advantage = ends.summed_backwards(delta, discount * number("lambda_", lambda_, 1.0))
    return advantage, ends.steps_only(advantage + steps.value)


@overload
def n_step_return(steps: Samples, n: int, discount: float | Tensor) -> Tensor: ...
@overload
def n_step_return(steps: Steps[Array], n: int, discount: float | Array) -> Array: ...
def n_step_return(steps: Samples | Steps[Array], n: int, discount: float | Array) -> Array:
    """The discounted sum of the next `n` rewards and of the value after them. `[T, B]`

    The sum is shorter where the episode or the batch ends. `gae` says which value then comes after it.
    """
    steps, discount = as_steps(steps, discount)
    n = integer("n", n, 1)
    ends = Ends(steps)
    returns: Array = steps.value
    for _ in range(min(n, len(steps.reward))):
        returns = steps.reward + discount * ends.following(returns)
    returns = ends.steps_only(returns)
    return returns


@overload
def lambda_return(steps: Samples, discount: float | Tensor, lambda_: float) -> Tensor: ...
@overload
def lambda_return(steps: Steps[Array], discount: float | Array, lambda_: float) -> Array: ...
def lambda_return(steps: Samples | Steps[Array], discount: float | Array, lambda_: float) -> Array:
    """The average of the n-step returns with the weights `(1 - lambda) lambda ** (n - 1)`. `[T, B]`

    TD(lambda) and Dreamer use it. It equals the second result of `gae`, except for rounding. It has gradients with
    respect to the rewards and values.
    """
    steps, discount = as_steps(steps, discount)
    ends, weight = Ends(steps), number("lambda_", lambda_, 1.0)
    after = ends.following(steps.value)
    # In the last row of an episode or of the batch, the value after it has the whole weight.
    rest = ends.in_last_rows(after, (1 - weight) * after)
    total: Array = ends.summed_backwards(ends.steps_only(steps.reward + discount * rest), discount * weight)
    return total


def as_steps(steps: Samples | Steps[Array], discount: float | Array) -> tuple[Steps[Array], Any]:
    """`steps` as `Steps`, and `discount` as a float of Python, or as an array of the values' dtype: a float64 of numpy
    would turn float32 results into float64. Raises `ConfigError` if `steps` has no values, or `discount` does not
    fit."""
    checked: Steps[Array] = steps if isinstance(steps, Steps) else Steps.of(steps)
    if not getattr(discount, "shape", ()):
        return checked, number("discount", discount, 1.0)
    require_like("discount", discount, checked.reward)
    array: Any = discount
    if checked.valid is not None:
        array = zero_where(~checked.valid, array)
    if not bool(((array >= 0) & (array <= 1)).all()):
        raise ConfigError("discount must be from 0 to 1 in all valid rows")
    dtype: Any = checked.value.dtype
    if isinstance(array, np.ndarray):
        return checked, array.astype(dtype) if dtype.kind == "f" else array
    return checked, array.to(dtype) if dtype.is_floating_point else array


def require_like(name: str, array: Any, reward: npt.NDArray[Any] | Tensor) -> None:
    """Raise `ConfigError` unless `array` is of the same kind and shape as `reward`."""
    is_same_kind = isinstance(array, np.ndarray) is isinstance(reward, np.ndarray)
    shape, given = list(reward.shape), list(getattr(array, "shape", ()))
    if not is_same_kind or given != shape:
        raise ConfigError(
            f"{name} must be a {type(reward).__name__} {shape}, as the rewards are: got a {type(array).__name__} "
            f"{given}"
        )


@overload
def vtrace(
    steps: Samples,
    log_ratio: Tensor,
    discount: float | Tensor,
    lambda_: float = 1.0,
    *,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
) -> tuple[Tensor, Tensor]: ...
@overload
def vtrace(
    steps: Steps[Array],
    log_ratio: Array,
    discount: float | Array,
    lambda_: float = 1.0,
    *,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
) -> tuple[Array, Array]: ...
def vtrace(
    steps: Samples | Steps[Array],
    log_ratio: Array,
    discount: float | Array,
    lambda_: float = 1.0,
    *,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
) -> tuple[Array, Array]:
    """The advantages for the gradient of the policy, and the targets for the value (Espeholt et al., 2018). Both
    `[T, B]`.

    `log_ratio` `[T, B]` is the log-probability of the action under the current parameters, minus `agent_info.log_prob`,
    its log-probability when the policy acted. `clip_rho` and `clip_c` are the largest ratios. Compute the values with
    the current parameters, and give them: `Steps.of(samples, value=..., bootstrap_value=..., final_value=...)`. If
    you leave one out, the recorded values are used.

    For ends of episodes, see `gae`. If the current parameters are those that acted, the targets equal
    `lambda_return`.

    Raises `ConfigError` if `log_ratio` has another shape than the rewards, or another argument is out of range.
    """
    steps, discount = as_steps(steps, discount)
    require_like("log_ratio", log_ratio, steps.reward)
    ends = Ends(steps)
    log_ratio = ends.steps_only(log_ratio)  # in rows that are not valid, it may have any value, also NaN
    ratio: Any = np.exp(log_ratio) if isinstance(log_ratio, np.ndarray) else log_ratio.exp()
    most_rho, most_c = (number(*bound, math.inf) for bound in (("clip_rho", clip_rho), ("clip_c", clip_c)))
    rho, c = ratio.clip(max=most_rho), number("lambda_", lambda_, 1.0) * ratio.clip(max=most_c)
    delta = rho * (steps.reward + discount * ends.following(steps.value) - steps.value)
    target = steps.value + ends.summed_backwards(ends.steps_only(delta), discount * c)
    advantage = rho * (steps.reward + discount * ends.following(target) - steps.value)
    return ends.steps_only(advantage), ends.steps_only(target)
