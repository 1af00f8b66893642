"""The team: what a sampler needs of its workers, wherever they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.buffers.trajectory_queue import Frame
from penstock.samplers.failures import Witness
from penstock.samplers.restarts import Restarts

__all__ = ["Team"]


class Team(Protocol):
    """The workers of a sampler, wherever they run."""

    restarts: Restarts

    def open_gates(self) -> None:
        """Let all workers begin what the control block says."""

    def wait_out(
        self,
        occasion: str,
        *,
        starting: bool = False,
        on_wake: Callable[[], None] | None = None,
        look_again: float = 1.0,
    ) -> None:
        """Wait until all workers have finished it; raise `SamplerBrokenError` if one fails that is not
        replaced."""

    def take_frames(self, promised: Sequence[int]) -> list[Frame]:
        """What trajectory infos of the user's own class have arrived: `promised[i]` of worker i."""

    def witnesses(self) -> list[Witness]:
        """Where every worker is now."""

    def close(self, *, broken: bool = False) -> None:
        """End all workers. Never raises."""
