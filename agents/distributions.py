"""The arithmetic of action distributions, in numpy: on a row of a few columns a torch operator costs two to
three times as much."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["choose", "gaussian_log_prob", "tanh_log_slope"]

_Array = npt.NDArray[Any]
_HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)


def choose(logits: _Array, uniform: _Array | None) -> tuple[npt.NDArray[np.int64], _Array]:
    """An index per row of `logits` `[N, n]` and its log-probability, both `[N]`.

    `uniform` `[N]` in [0, 1) draws from the softmax by inversion; None takes the largest. An index whose
    logit is -inf is never drawn. Raises `FloatingPointError` for NaN, +inf, or a row that is -inf throughout.
    """
    largest = logits.max(axis=1, keepdims=True)
    if not np.isfinite(largest).all():
        bad = logits[~np.isfinite(largest[:, 0])][0]
        raise FloatingPointError(f"the model gave logits that are not finite: {bad}")
    shifted = logits - largest
    cumulative = np.exp(shifted).cumsum(axis=1)
    total = cumulative[:, -1]
    index = logits.argmax(axis=1) if uniform is None else (cumulative <= (uniform * total)[:, None]).sum(axis=1)
    return index, shifted[np.arange(len(index)), index] - np.log(total)


def gaussian_log_prob(x: _Array, mean: _Array, log_std: _Array) -> _Array:
    """Log-density `[B]` of `x` `[B, ...]` under independent normal distributions, summed over the dimensions.

    Raises `FloatingPointError` where it is not finite: NaN or inf in `mean` or `log_std`, or a deviation
    of zero.
    """
    with np.errstate(all="ignore"):  # told below
        z = (x - mean) * np.exp(-log_std)
        each = -0.5 * z * z - log_std - _HALF_LOG_2_PI
        log_prob: _Array = each.reshape(len(each), -1).sum(axis=1)
    if not np.isfinite(log_prob).all():
        b = int(np.flatnonzero(~np.isfinite(log_prob))[0])
        raise FloatingPointError(
            f"the model gave a distribution that is not finite: mean {mean[b]}, log_std {log_std[b]} (column {b})"
        )
    return log_prob


def tanh_log_slope(x: _Array) -> _Array:
    """log(1 - tanh(x)²), elementwise, without the cancellation that it has as written here."""
    slope: _Array = 2.0 * (math.log(2.0) - x - np.logaddexp(0.0, -2.0 * x))
    return slope
