"""The team: what a sampler needs of its workers, wherever they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.buffers.trajectory_queue import ObjectMessage
from penstock.workers.failures import WorkerStatus
from penstock.workers.restarts import Restarts

__all__ = ["Team", "Wait"]


@dataclass(frozen=True)
class Wait:
    """How the main process waits for all workers to stand at barrier_out."""

    occasion: str  #: quoted in errors
    starting: bool = False  #: all workers have just been started
    on_wake: Callable[[], None] | None = None  #: called at least every `look_again` seconds
    look_again: float = 1.0  #: nothing depends on it: all that matters wakes the main process
    until: Callable[[], bool] | None = None  #: says when it has been enough before that
    interruptible: bool = True  #: whether Ctrl-C may end the waiting: it can be begun again


class Team(Protocol):
    """The workers of a sampler, wherever they run."""

    restarts: Restarts

    def open_gates(self) -> None:
        """Let all workers begin what the control block says."""

    def wait_out(self, wait: Wait) -> None:
        """Wait until all workers have finished it; raise `SamplerBrokenError` if one fails that is not
        replaced."""

    def take_frames(self, promised: Sequence[int]) -> list[ObjectMessage]:
        """What trajectory infos of the user's own class have arrived: `promised[i]` of worker i."""

    def witnesses(self) -> list[WorkerStatus]:
        """Where every worker is now."""

    def close(self, *, broken: bool = False) -> None:
        """End all workers. Never raises."""
