"""n-step windows: which rows follow a position within its episode, and the return, discount and end that result.

The loop is in C where it was compiled, else in numpy. Both give the same results to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.replays.compiled import compiled
from penstock.replays.ring import BEGINS, CUT, TERMINATED, TRUNCATED, VALID, Ring

Positions = npt.NDArray[np.int64]

_NONE = np.empty(0, np.intp)


@compiled
def read_windows(
    flags: npt.NDArray[Any],
    reward: npt.NDArray[Any],
    positions: npt.NDArray[Any],
    powers: npt.NDArray[Any],
    B: int,
    at: npt.NDArray[Any],
    last: npt.NDArray[Any],
    after: npt.NDArray[Any],
    return_: npt.NDArray[Any],
    discount: npt.NDArray[Any],
    end: npt.NDArray[Any],
    eligible: npt.NDArray[Any],
) -> None:
    """Fill the last seven arrays `[N]` for `positions` `[N]`; see `Windows`. `flags` and `reward` are those of the
    ring, `[T * B]`. `powers` `[n + 1]` are the powers of the discount. `end` gets TERMINATED and TRUNCATED of the
    window's last step."""
    n = len(powers) - 1
    rows = (positions + np.arange(n + 1)[:, None] * B) % len(flags)
    row_flags = flags.take(rows)
    goes_on = np.empty(rows.shape, np.bool_)  # whether the episode has not ended before this row
    goes_on[0] = True
    ends = row_flags & (TERMINATED | TRUNCATED | CUT)
    for j in range(n):
        np.greater(goes_on[j], ends[j] != 0, out=goes_on[j + 1])
    # The row itself must be valid. The rows after it must also continue its episode.
    mask = np.full((n + 1, 1), VALID | BEGINS, np.uint8)
    mask[0] = VALID
    eligible[:] = ~(goes_on & ((row_flags & mask) != VALID)).any(0)
    length, i = goes_on[:n].sum(0), np.arange(len(positions))
    at[:], last[:], after[:] = rows[0], rows[length - 1, i], rows[length, i]
    end[:] = np.where(goes_on[n], 0, ends[length - 1, i]) & (TERMINATED | TRUNCATED)
    rewards = reward.take(rows[:n]).astype(np.float64)
    total = rewards[0]
    for j in range(1, n):
        np.copyto(total, total + powers[j] * rewards[j], where=goes_on[j])
    return_[:] = total
    discount[:] = np.where(end & TERMINATED, 0, powers[length])


@dataclass(frozen=True)
class Windows:
    """The windows of N positions. A window ends at the end of the episode, at a row that is CUT, or after n steps.
    Arrays are `[N]`."""

    at: Positions  # entry of the position in the ring
    last: Positions  # entry of the last step of the window
    after: Positions  # entry of the step after the window; of another episode if this one has ended
    return_: npt.NDArray[np.float32]  # discounted sum of the rewards
    discount: npt.NDArray[np.float32]  # factor of the value after the window
    eligible: npt.NDArray[np.bool_]  # whether all steps of the window are valid, and what follows it is known
    terminated: npt.NDArray[np.intp]  # the windows that end with a termination
    truncated: npt.NDArray[np.intp]  # the windows that end with a truncation alone


class WindowReader:
    """Reads the windows of `n_step` steps, and sums their rewards with `discount`."""

    def __init__(self, ring: Ring, n_step: int, discount: float) -> None:
        self._ring, self.n_step = ring, n_step
        self._powers = np.array([discount**k for k in range(n_step + 1)])

    def read(self, positions: Positions) -> Windows:
        """The windows of `positions` `[N]`. All n + 1 rows of each must be between `ring.first` and `ring.end`."""
        ring, N = self._ring, len(positions)
        at, last, after = np.empty((3, N), np.int64)
        return_, discount = np.empty((2, N), np.float32)
        end, eligible = np.empty(N, np.uint8), np.empty(N, np.bool_)
        inputs = ring.flags, ring.reward, positions, self._powers, ring.B
        read_windows(*inputs, at, last, after, return_, discount, end, eligible)
        terminated = truncated = _NONE
        ends = end.nonzero()[0]
        if ends.size:
            has_terminated = (end[ends] & TERMINATED) != 0
            terminated, truncated = ends[has_terminated], ends[~has_terminated]
            if truncated.size:
                eligible[truncated] &= ring.has_final(last[truncated])
        return Windows(at, last, after, return_, discount, eligible, terminated, truncated)
