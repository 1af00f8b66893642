"""V-trace: values and advantages from the steps of an older policy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from penstock.buffers import Samples
from penstock.learning.returns import as_steps, checked_lambda, number_up_to, require_like
from penstock.learning.steps import Array, Ends, Steps

if TYPE_CHECKING:
    from torch import Tensor


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
    most_rho, most_c = number_up_to(math.inf, "clip_rho", clip_rho), number_up_to(math.inf, "clip_c", clip_c)
    rho, c = ratio.clip(max=most_rho), checked_lambda(lambda_) * ratio.clip(max=most_c)
    delta = rho * (steps.reward + discount * ends.following(steps.value) - steps.value)
    target = steps.value + ends.summed_backwards(ends.steps_only(delta), discount * c)
    advantage = rho * (steps.reward + discount * ends.following(target) - steps.value)
    return ends.steps_only(advantage), ends.steps_only(target)
