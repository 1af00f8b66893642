"""The arithmetic of action distributions, in numpy. For a few columns, torch takes two to three times as long.

Actions are chosen from logits in C where it was compiled. Elsewhere, and for unusual arrays, `shift_rows` and
`draw_rows` return None. Then `choose` uses numpy, with the same results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.agents.agent import Space
from penstock.buffers.native import load
from penstock.errors import SpaceError

if TYPE_CHECKING:
    import torch

#: `shift_rows(logits)`: `logits` `[N, n]` minus the largest of each row. None if it cannot handle the array, or if the
#: largest of a row is not finite.
shift_rows: Callable[[Any], Any]
#: `draw_rows(weights, uniform, shifted)`: for each row of `weights` `[N, n]` an index, and the entry of `shifted`
#: `[N, n]` there; both `[N]`. The probability of an index is in proportion to its weight; `uniform` `[N]`, from 0 to 1,
#: decides. With `uniform` None, the index is the first one whose entry of `shifted` is 0, which is the largest.
#: Afterwards `weights` holds the cumulative sums of each row. None if it cannot handle the arguments.
draw_rows: Callable[[Any, Any, Any], tuple[Any, Any] | None]

#: The functions that are used if nothing is compiled.
PYTHON: dict[str, Callable[..., Any]] = {"shift_rows": lambda *_: None, "draw_rows": lambda *_: None}
#: Why the compiled functions are not in use; empty if they are.
_functions, WHY_NOT_COMPILED = load("penstock.agents._drawing", PYTHON)
shift_rows, draw_rows = _functions.values()


_Array = npt.NDArray[Any]
HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)


def choose(logits: _Array, uniform: _Array | None) -> tuple[npt.NDArray[np.int64], _Array]:
    """One index per row of `logits` `[N, n]`, and its log-probability; both `[N]`.

    With `uniform` `[N]` in [0, 1), draw from the softmax by inversion; with None, take the largest. An index with
    logit -inf is never drawn. Raises `FloatingPointError` for NaN, +inf, or for a row with only -inf.
    """
    if (shifted := shift_rows(logits)) is not None:
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
        log_probs = -0.5 * z * z - log_std - HALF_LOG_2_PI
        log_prob: _Array = log_probs.reshape(len(log_probs), -1).sum(axis=1)
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


class BoxActions:
    """A floating-point `Box` with any number of dimensions.

    `center` and `half_range` are float64 arrays in the shape of an action. They are 0 and 1 where a dimension has
    fewer than two bounds. With `bounded=True` every dimension must have two.

    Raises `SpaceError` with the name of `agent` for any other space.
    """

    def __init__(self, space: Space, agent: str, *, bounded: bool = False) -> None:
        if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
            raise SpaceError(
                f"{agent} needs a Box action space of a floating-point type, the environment has {space}: "
                "use an agent for this space, or convert the actions with gymnasium.wrappers.TransformAction"
            )
        both = space.bounded_below & space.bounded_above
        if bounded and not both.all():
            raise SpaceError(
                f"{agent} squashes actions into their bounds, but not every dimension of {space} has two bounds: wrap "
                "the environment in gymnasium.wrappers.TransformAction, or use an agent that does not squash"
            )
        self.shape, self.dtype = space.shape, space.dtype
        self.low, self.high = space.low, space.high
        low, high = (np.where(both, bound, 0).astype(np.float64) for bound in (space.low, space.high))
        # Halve first: the full range might overflow.
        self.center = 0.5 * low + 0.5 * high
        self.half_range = np.where(both, 0.5 * high - 0.5 * low, 1.0)
        self._clips = bool((space.bounded_below | space.bounded_above).any())

    def clip(self, action: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """`action` `[B, ...]` in the dtype of the space, clipped to the bounds that exist."""
        cast = action.astype(self.dtype, copy=False)
        # Not np.clip, which takes three times as long on a row of a few columns.
        return np.minimum(np.maximum(cast, self.low), self.high) if self._clips else cast

    def scale(self, fraction: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Scale from [-1, 1] to the bounds, in the dtype of the space."""
        return self.clip(self.center + self.half_range * fraction)

    def scale_torch(self, fraction: torch.Tensor) -> torch.Tensor:
        """As `scale`, for a tensor: in its dtype, with gradients, not clipped."""
        center, half_range = fraction.new_tensor(self.center), fraction.new_tensor(self.half_range)
        return center + half_range * fraction
