"""Which positions a batch has: uniform draws, or draws by priority."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, SamplerStateError
from penstock.learning.replay_batches import SequenceReader, TransitionReader
from penstock.learning.ring import Ring
from penstock.learning.windows import Positions

_ROUNDS = 20  # how often places that are not eligible are drawn again, before all places are examined
AT_ONCE = 65_536  # places that are examined together, so that the arrays for this stay small


@dataclass(frozen=True)
class DrawIndex:
    """Where batches may start: every `every`-th step of each column. Places are numbered as positions are, so place
    `k * B + b` is the position `k * every * B + b`."""

    ring: Ring
    reader: TransitionReader | SequenceReader

    @property
    def size(self) -> int:
        """Places in a full ring."""
        return self.ring.size // self.reader.every

    def bounds(self) -> tuple[int, int]:
        """The first place whose rows are all in the ring, and the place after the last one."""
        every = self.reader.every
        # In this order: if rows are written in between, the bounds are narrower, and never wider than the ring.
        end, first = self.ring.end, self.ring.first
        start = first + self.reader.back if first else 0  # nothing is missing before step 0
        low, high = -(-start // every), -(-(end - self.reader.ahead) // every)
        return low * self.ring.B, max(high, low) * self.ring.B

    def positions(self, places: Positions) -> Positions:
        """The positions of `places`."""
        every, B = self.reader.every, self.ring.B
        return places if every == 1 else places // B * (every * B) + places % B

    def of_positions(self, positions: Positions) -> Positions:
        """The places at `positions`. Raises `ConfigError` if one is no place."""
        every, B = self.reader.every, self.ring.B
        if every == 1:
            return positions
        steps = positions // B
        if (steps % every != 0).any():
            raise ConfigError(f"no sequence starts at some of these indices: every {every}th step is a start")
        return steps // every * B + positions % B

    def eligible(self, places: Positions) -> npt.NDArray[np.bool_]:
        """Whether each of `places` `[N]`, within the bounds, may be drawn."""
        return self.reader.eligible(self.positions(places))

    def waits(self, places: Positions) -> npt.NDArray[np.bool_]:
        """Whether each of `places` `[N]` may become eligible later."""
        return self.reader.waits(self.positions(places))

    def all_eligible(self, low: int, high: int) -> Positions:
        """All places from `low` to `high` that may be drawn."""
        parts = [np.empty(0, np.int64)]
        for start in range(low, high, AT_ONCE):
            part = np.arange(start, min(start + AT_ONCE, high))
            parts.append(part[self.eligible(part)])
        return np.concatenate(parts)


def nothing_to_draw(why: str) -> SamplerStateError:
    """The error of a sample that finds nothing."""
    return SamplerStateError(f"replay.sample has nothing to draw: {why}. Append more batches first")


class UniformDraw:
    """Draws every eligible place with the same probability."""

    def __init__(self, places: DrawIndex) -> None:
        self._places = places

    def draw(self, n: int, rng: np.random.Generator, newer_than: int | None) -> Positions:
        """`n` places within the bounds. Some may not be eligible: the reader finds out."""
        low, high = self._bounds(newer_than)
        places = rng.integers(low, high, n)
        return places if newer_than is None else self.redraw(places, rng, newer_than)

    def redraw(self, places: Positions, rng: np.random.Generator, newer_than: int | None) -> Positions:
        """`places`, with another one in place of each that is not eligible."""
        low, high = self._bounds(newer_than)
        gone = places < low  # a writer has overwritten them since they were drawn
        places[gone] = low  # any place that can be examined
        bad = np.flatnonzero(gone | ~self._is_usable(places, newer_than))
        for _ in range(_ROUNDS):
            if not bad.size:
                return places
            places[bad] = rng.integers(low, high, bad.size)
            bad = bad[~self._is_usable(places[bad], newer_than)]
        usable = self._places.all_eligible(low, high)
        usable = usable[self._is_newer(usable, newer_than)]
        if not usable.size:
            raise nothing_to_draw("nothing is eligible")
        places[bad] = rng.choice(usable, bad.size)
        return places

    def weight(self, places: Positions, beta: float) -> None:
        """None: all count the same."""

    def _bounds(self, newer_than: int | None) -> tuple[int, int]:
        low, high = self._places.bounds()
        which = "complete"
        if newer_than is not None:
            low = self._first_newer(low, high, newer_than)
            which = f"complete and newer than version {newer_than}"
        if high <= low:
            raise nothing_to_draw(f"nothing is {which}")
        return low, high

    def _is_usable(self, places: Positions, newer_than: int | None) -> npt.NDArray[np.bool_]:
        return self._places.eligible(places) & self._is_newer(places, newer_than)

    def _is_newer(self, places: Positions, newer_than: int | None) -> npt.NDArray[np.bool_]:
        if newer_than is None:
            return np.ones(len(places), np.bool_)
        ring = self._places.ring
        newer: npt.NDArray[np.bool_] = ring.policy_version[self._places.positions(places) % ring.size] > newer_than
        return newer

    def _first_newer(self, low: int, high: int, newer_than: int) -> int:
        """The first place of the first row with a newer version, by bisection: versions never fall along a column."""
        B = self._places.ring.B
        first, last = low // B, high // B
        while first < last:
            middle = (first + last) // 2
            if self._is_newer(np.arange(middle * B, middle * B + B), newer_than).any():
                last = middle
            else:
                first = middle + 1
        return first * B
