"""Draws by priority. The tree is in the learner's memory, and follows the ring before each draw."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.learning.position_draws import AT_ONCE, DrawIndex, nothing_to_draw
from penstock.learning.sum_tree import MOST, SumTree
from penstock.learning.windows import Positions

# In the place of an alpha of 0: draws are equally likely, to the eighth digit, and a later alpha finds the priorities.
_ALMOST_0 = 2.0**-30


class PriorityDraw:
    """Draws each eligible place with a probability in proportion to `priority ** alpha`: its leaf in the tree. The
    leaves of all other places are 0."""

    def __init__(self, places: DrawIndex, min_priority: float) -> None:
        self._places, self._min_priority = places, min_priority
        self.tree = SumTree(places.size)
        self.low = self.high = 0  # the places that the tree knows
        self._waiting = np.empty(0, np.int64)  # those of them whose windows are not complete yet
        self.n_stale = 0

    def draw(self, n: int, rng: np.random.Generator, newer_than: int | None) -> Positions:
        """`n` places. Some may have stopped being eligible since: the reader finds out. `newer_than` is None."""
        self.catch_up()
        total = self.tree.total
        if not total:
            raise nothing_to_draw("no window is complete, or all priorities are 0")
        mass = rng.random(n)
        mass *= total
        return self.tree.draw(mass, self.low)

    def redraw(self, places: Positions, rng: np.random.Generator, newer_than: int | None) -> Positions:
        """`places`, with another one in place of each that is not eligible. Those will not be drawn again."""
        while True:
            self.catch_up()
            gone = places < self.low  # a writer has overwritten them since they were drawn
            places[gone] = self.low  # any place that the tree knows: their own leaves may belong to new places now
            bad = ~self._places.eligible(places)
            self.tree.update(places[bad], np.zeros(bad.sum()))
            redrawn = np.flatnonzero(bad | gone)
            if not redrawn.size:
                return places
            places[redrawn] = self.draw(redrawn.size, rng, newer_than)

    def weight(self, places: Positions, beta: float) -> npt.NDArray[np.float32]:
        """The importance weights `[n]` of drawn places: (N * probability) ** -beta, divided by the largest."""
        # N and the sum of the priorities are the same in all weights, so the division removes them.
        weight: npt.NDArray[np.float32] = (self.tree.ratios(places) ** -beta).astype(np.float32)
        return weight

    def catch_up(self) -> None:
        """Remove the places whose rows were overwritten, and add the new ones with the largest priority of all."""
        low, high = self._places.bounds()
        if (low, high) == (self.low, self.high):
            return
        if low > self.low:
            self.tree.set_range(self.low, np.zeros(max(min(low, self.high) - self.low, 0)))
        newest = self.tree.largest or 1.0
        waited = self._waiting[self._waiting >= low]
        self._waiting = waited[~self._places.eligible(waited)]
        self.tree.update(completed := np.setdiff1d(waited, self._waiting), np.full(len(completed), newest))
        for start in range(max(self.high, low), high, AT_ONCE):
            places = np.arange(start, min(start + AT_ONCE, high))
            is_eligible = self._places.eligible(places)
            self.tree.set_range(start, np.where(is_eligible, newest, 0.0))
            self._wait_for(places[~is_eligible])
        self.low, self.high = low, high

    def _wait_for(self, places: Positions) -> None:
        """Examine those of these places again whose windows are not complete yet."""
        self._waiting = np.append(self._waiting, places[self._places.waits(places)])

    def update(self, positions: Positions, priority: npt.NDArray[np.float64], alpha: float) -> None:
        """Set the priorities of `positions`. Those whose rows were overwritten are left out, and counted."""
        self.catch_up()
        places = self._places.of_positions(positions)
        with np.errstate(all="ignore"):  # of what `_require_known` refuses
            leaf = np.maximum(priority, self._min_priority) ** (alpha or _ALMOST_0)
        n_stale = self.tree.assign(self.low, self.high, places, priority, leaf)
        if n_stale < 0:  # something is wrong, or 0
            self._require_known(positions, places, priority, leaf, alpha)
            is_kept = places >= self.low
            # A leaf of 0 may be a place that was never eligible.
            zero = np.flatnonzero(is_kept & (self.tree.leaves[places % self._places.size] == 0))
            is_kept[zero] = self._places.eligible(places[zero])
            places, leaf = places[is_kept], leaf[is_kept]
            n_stale = len(positions) - len(places)
            order = leaf.argsort(kind="stable")  # the largest of equal places comes last, and counts
            self.tree.update(places[order], leaf[order])
        self.n_stale += n_stale

    def change_alpha(self, old: float, new: float) -> None:
        """Make the leaves those of another `alpha`."""
        self.catch_up()
        leaves = self.leaves()
        is_drawn = leaves > 0
        with np.errstate(all="ignore"):
            raised = leaves[is_drawn] ** ((new or _ALMOST_0) / (old or _ALMOST_0))
        if not ((raised > 0) & (raised <= MOST)).all():
            raise ConfigError(
                f"with alpha={new}, some priorities ** alpha are 0 or more than {MOST:g}: choose a smaller alpha"
            )
        leaves[is_drawn] = raised
        self.tree.set_range(self.low, leaves)

    def _require_known(
        self, positions: Positions, places: Positions, priority: npt.NDArray[Any], leaf: npt.NDArray[Any], alpha: float
    ) -> None:
        """Raise `ConfigError` if a place cannot have been drawn, or if a priority or its power cannot be used."""
        unknown = positions[(places < 0) | (places >= self.high)]
        if unknown.size:
            raise ConfigError(f"index {unknown[0]} was never drawn: pass batch.index unchanged")
        bad = priority[~(np.isfinite(priority) & (priority >= 0))]
        if bad.size:
            raise ConfigError(
                f"a priority must be finite and at least 0, got {bad[0]}: pass td_error.abs() for example"
            )
        bad = priority[leaf > MOST]
        if bad.size:
            raise ConfigError(
                f"a priority ** alpha must be at most {MOST:g}, but the priority is {bad[0]:g} and alpha={alpha:g}: "
                "divide the priorities by a constant, or choose a smaller alpha"
            )

    def leaves(self) -> npt.NDArray[np.float64]:
        """The leaves of the known places, oldest first."""
        return self.tree.leaves[np.arange(self.low, self.high) % self._places.size]

    def restore(self, low: int, high: int, leaves: npt.NDArray[np.float64]) -> None:
        """Set the `leaves` of the places from `low` to `high`, as far as they are in the ring, which may be smaller."""
        first, last = self._places.bounds()
        start = max(low, first)
        self.tree.set_range(start, leaves[start - low :])
        self.low, self.high = first, last
        self._wait_for(first + np.flatnonzero(self.leaves() == 0))
