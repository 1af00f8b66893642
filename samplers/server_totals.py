"""What the inference server has done, counted where the caller sees it, wherever the server runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.buffers.named import NamedArrays
from penstock.buffers.shared import ArraySpec, NamedMemory

__all__ = ["ServerStats", "ServerTotals"]


@dataclass(frozen=True)
class ServerStats:
    """What the inference server has done since the sampler was initialized: `served[n]` counts the steps that it
    made for n environments at once; `acting` and `waiting` are seconds."""

    served: dict[int, int]
    acting: float
    waiting: float


class ServerTotals:
    """Counts that the server alone writes. Pickles to it while it is started."""

    def __init__(self, most_columns: int, *, shared: bool) -> None:
        """`most_columns` is the most that the agent ever acts for at once."""
        specs = NamedArrays(
            served=ArraySpec((most_columns + 1,), np.dtype(np.int64)),
            seconds=ArraySpec((2,), np.dtype(np.float64)),
        )
        self.memory = NamedMemory(specs, shared=shared, purpose="the inference server's statistics")

    def count_step(self, n_columns: int) -> None:
        """The agent has acted once, for so many environments."""
        self.memory.arrays.served[n_columns] += 1

    def add_seconds(self, *, acting: float = 0.0, waiting: float = 0.0) -> None:
        """Time has passed."""
        seconds = self.memory.arrays.seconds
        seconds[0] += acting
        seconds[1] += waiting

    @property
    def stats(self) -> ServerStats:
        """All of it."""
        arrays = self.memory.arrays
        served = {n: times for n, times in enumerate(arrays.served.tolist()) if times}
        acting, waiting = arrays.seconds.tolist()
        return ServerStats(served, acting, waiting)
