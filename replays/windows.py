"""n-step windows: which rows follow a position within its episode, and the return, discount and end that result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.replays.ring import BEGINS, TERMINATED, TRUNCATED, VALID, Ring

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Windows:
    """The windows of N positions. A window ends at the end of the episode, or after n steps.

    `at` `[n + 1, N]` are the entries in the ring of the position and of the n steps after it. The window is the first
    `length` `[N]` of them. `terminated` and `truncated` list the windows that end with an episode.
    """

    at: Positions
    is_inside: npt.NDArray[np.bool_]  # `[n, N]`: whether the step belongs to the window
    length: npt.NDArray[np.intp]
    terminated: npt.NDArray[np.intp]
    truncated: npt.NDArray[np.intp]
    eligible: npt.NDArray[np.bool_]  # `[N]`: whether the window and what follows it is in the ring, and is one episode

    @property
    def last(self) -> Positions:
        """Entries `[N]` of the last steps of the windows."""
        return self.at[self.length - 1, np.arange(len(self.length))]

    @property
    def after(self) -> Positions:
        """Entries `[N]` of the steps after the windows. Of another episode where `terminated` or `truncated`."""
        return self.at[self.length, np.arange(len(self.length))]


class WindowReader:
    """Reads the windows of `n_step` steps, and sums their rewards with `discount`."""

    def __init__(self, ring: Ring, n_step: int, discount: float) -> None:
        self._ring, self.n_step = ring, n_step
        self._offsets = np.arange(n_step + 1)[:, None] * ring.B
        self._powers = np.array([discount**k for k in range(n_step + 1)])
        # The row itself must be valid. The rows after it must also continue its episode.
        self._mask = np.full((n_step + 1, 1), VALID | BEGINS, np.uint8)
        self._mask[0] = VALID

    def read(self, positions: Positions) -> Windows:
        """The windows of `positions` `[N]`. All n + 1 rows of each must be between `ring.first` and `ring.end`."""
        ring, n = self._ring, self.n_step
        at = (positions + self._offsets) % ring.size
        flags = ring.flags.take(at)
        goes_on = np.empty(at.shape, np.bool_)  # whether the episode still runs at this step
        goes_on[0] = True
        is_last = (flags & (TERMINATED | TRUNCATED)) != 0
        for j in range(n):
            np.greater(goes_on[j], is_last[j], out=goes_on[j + 1])
        eligible = ~(goes_on & ((flags & self._mask) != VALID)).any(0)
        length = goes_on[:n].sum(0)
        ends = np.flatnonzero(~goes_on[n])
        has_terminated = (flags[length[ends] - 1, ends] & TERMINATED) != 0
        terminated, truncated = ends[has_terminated], ends[~has_terminated]
        if truncated.size:
            eligible[truncated] &= ring.has_final(at[length[truncated] - 1, truncated])
        return Windows(at, goes_on[:n], length, terminated, truncated, eligible)

    def returns(self, windows: Windows) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """The discounted sum of the rewards `[N]`, and the factor `[N]` of the value after the window."""
        reward: npt.NDArray[Any] = self._ring.reward.take(windows.at[:-1])
        total = np.where(windows.is_inside[0], reward[0], 0).astype(np.float64)
        for j in range(1, self.n_step):
            total += np.where(windows.is_inside[j], self._powers[j] * reward[j], 0)
        factor = self._powers[windows.length]
        factor[windows.terminated] = 0
        return total.astype(np.float32), factor.astype(np.float32)
