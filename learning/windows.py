"""n-step windows: which rows follow a position within its episode, and the return, discount and end that result.

The loop is in C where it was compiled, else in numpy. Both give the same results to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.learning.compiled import compiled
from penstock.learning.ring import BEGINS, CUT, RESUMES, TERMINATED, TRUNCATED, VALID, Ring

Positions = npt.NDArray[np.int64]

_NONE = np.empty(0, np.intp)


@compiled
def read_windows(
    flags: npt.NDArray[Any],
    reward: npt.NDArray[Any],
    positions: npt.NDArray[Any],
    powers: npt.NDArray[Any],
    B: int,
    limit: int,
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
    window's last step, and CUT if the step that continues the window must be below position `limit`, and is not. With a
    `limit` of -1, windows end at a row that is CUT."""
    n, size, step = len(powers) - 1, len(flags), positions.copy()
    row = step % size
    at[:], total, length = row, reward.take(row).astype(np.float64), np.zeros(len(step), np.int64)
    eligible[:] = (flags.take(row) & VALID) != 0
    goes_on, waits = np.ones(len(step), np.bool_), np.zeros(len(step), np.bool_)
    for j in range(n):
        if j:
            np.copyto(total, total + powers[j] * reward.take(row).astype(np.float64), where=goes_on)
        ends = flags.take(row) & (TERMINATED | TRUNCATED | CUT)
        np.copyto(last, row, where=goes_on)
        np.copyto(end, ends, where=goes_on)
        length += goes_on
        step += B * goes_on
        resumes = np.zeros(len(step), np.bool_)
        if limit >= 0:
            is_open = goes_on & (ends & (TERMINATED | TRUNCATED) == 0)
            which = np.flatnonzero(is_open & ((step >= limit) | (ends == CUT if j < n - 1 else False)))
            then = step[which]
            while (is_gap := (then < limit) & (flags[then % size] & VALID == 0)).any():
                then[is_gap] += B
            waits[which] = then >= limit
            resumes[which] = (then < limit) & (flags[then % size] & RESUMES != 0)
            step[resumes] = then[resumes[which]]
        goes_on &= ((ends == 0) | resumes) & ~waits
        row = step % size
        # The rows after the first must be valid and continue its episode.
        is_next = resumes | ((flags.take(row) & (VALID | BEGINS)) == VALID)
        np.logical_and(eligible, ~goes_on | is_next, out=eligible)
    after[:], return_[:] = row, total
    end[:] = np.where(waits, CUT, np.where(goes_on, 0, end & (TERMINATED | TRUNCATED)))
    discount[:] = np.where(end & TERMINATED, 0, powers[length])
    eligible &= ~waits


@dataclass(frozen=True)
class Windows:
    """The windows of N positions. A window ends at the end of the episode, after n steps, or at a row that is CUT and
    is not continued. Arrays are `[N]`."""

    at: Positions  # entry of the position in the ring
    last: Positions  # entry of the last step of the window
    after: Positions  # entry of the step after the window; of another episode if this one has ended
    return_: npt.NDArray[np.float32]  # discounted sum of the rewards
    discount: npt.NDArray[np.float32]  # factor of the value after the window
    eligible: npt.NDArray[np.bool_]  # whether all steps of the window are valid, and what follows it is known
    waits: npt.NDArray[np.bool_]  # whether the window is not eligible because its next step is not there yet
    terminated: npt.NDArray[np.intp]  # the windows that end with a termination
    truncated: npt.NDArray[np.intp]  # the windows that end with a truncation alone


class WindowReader:
    """Reads the windows of `n_step` steps, and sums their rewards with `discount`. `resumes`: whether a window goes on
    where the step after a row that is CUT is in a later row."""

    def __init__(self, ring: Ring, n_step: int, discount: float, *, resumes: bool) -> None:
        self._ring, self.n_step, self._resumes = ring, n_step, resumes
        self._powers = np.array([discount**k for k in range(n_step + 1)])

    def read(self, positions: Positions) -> Windows:
        """The windows of `positions` `[N]`. All n + 1 rows of each must be between `ring.first` and `ring.end`."""
        ring, N = self._ring, len(positions)
        at, last, after = np.empty((3, N), np.int64)
        return_, discount = np.empty((2, N), np.float32)
        end, eligible = np.empty(N, np.uint8), np.empty(N, np.bool_)
        limit = ring.end * ring.B if self._resumes else -1
        inputs = ring.flags, ring.reward, positions, self._powers, ring.B, limit
        read_windows(*inputs, at, last, after, return_, discount, end, eligible)
        terminated = truncated = _NONE
        ends = (end & (TERMINATED | TRUNCATED)).nonzero()[0]
        if ends.size:
            has_terminated = (end[ends] & TERMINATED) != 0
            terminated, truncated = ends[has_terminated], ends[~has_terminated]
            if truncated.size:
                eligible[truncated] &= ring.has_final(last[truncated])
        return Windows(at, last, after, return_, discount, eligible, end == CUT, terminated, truncated)
