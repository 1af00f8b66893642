"""The arithmetic of action distributions, in numpy. For a few columns, torch takes two to three times as long."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.buffers.native import draw_rows, shift_rows

_Array = npt.NDArray[Any]
_HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)


def choose(logits: _Array, uniform: _Array | None) -> tuple[npt.NDArray[np.int64], _Array]:
    """One index per row of `logits` `[N, n]`, and its log-probability; both `[N]`.

    With `uniform` `[N]` in [0, 1), draw from the softmax by inversion; with None, take the largest. An index with
    logit -inf is never drawn. Raises `FloatingPointError` for NaN, +inf, or for a row with only -inf.
    """
    if uniform is not None and (shifted := shift_rows(logits)) is not None:
        cumulative = np.exp(shifted)
        drawn = draw_rows(cumulative, uniform, shifted)
        if drawn is not None:
            return drawn[0], drawn[1] - np.log(cumulative[:, -1])
    largest = logits.max(axis=1, keepdims=True)
    if not np.isfinite(largest).all():
        bad = logits[~np.isfinite(largest[:, 0])][0]
        raise FloatingPointError(f"the model returned logits that are not finite: {bad}")
    shifted = logits - largest
    cumulative = np.exp(shifted).cumsum(axis=1)
    total = cumulative[:, -1]
    index = logits.argmax(axis=1) if uniform is None else (cumulative <= (uniform * total)[:, None]).sum(axis=1)
    return index, shifted[np.arange(len(index)), index] - np.log(total)


def gaussian_log_prob(x: _Array, mean: _Array, log_std: _Array) -> _Array:
    """Log-density `[B]` of `x` `[B, ...]` under independent normal distributions, summed over the dimensions.

    Raises `FloatingPointError` if it is not finite: NaN or inf in `mean` or `log_std`, or a standard deviation of
    zero.
    """
    with np.errstate(all="ignore"):  # checked below
        z = (x - mean) * np.exp(-log_std)
        each = -0.5 * z * z - log_std - _HALF_LOG_2_PI
        log_prob: _Array = each.reshape(len(each), -1).sum(axis=1)
    if not np.isfinite(log_prob).all():
        b = int(np.flatnonzero(~np.isfinite(log_prob))[0])
        raise FloatingPointError(
            f"the model returned a distribution that is not finite: mean {mean[b]}, log_std {log_std[b]} (column {b})"
        )
    return log_prob


def tanh_log_slope(x: _Array) -> _Array:
    """log(1 - tanh(x)²), elementwise, without the cancellation of the direct formula."""
    slope: _Array = 2.0 * (math.log(2.0) - x - np.logaddexp(0.0, -2.0 * x))
    return slope
