"""Whether failed workers may be replaced, and a record of the replacements."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from penstock.errors import PenstockError
from penstock.workers.failures import WorkerFailure

OnWorkerFailure = Literal["raise", "restart"]
ON_WORKER_FAILURE: tuple[str, ...] = get_args(OnWorkerFailure)

# After these signals a worker may have written anywhere in the shared memory.
_CORRUPTING = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}


@dataclass
class Restarts:
    """The replacements of one pool so far. At most `max_restarts` are allowed within `window` seconds."""

    max_restarts: int
    window: float
    history: list[tuple[float, str]] = field(default_factory=list)  #: when, and what had happened
    per_worker: Counter[int] = field(default_factory=Counter)
    lost_per_worker: Counter[int] = field(default_factory=Counter)  #: trajectories that were lost

    @property
    def total(self) -> int:
        """Replacements so far."""
        return len(self.history)

    def refusal(self, failures: Sequence[WorkerFailure]) -> str | None:
        """Why these workers are not replaced, for the error. None: they may be. Empty: this pool replaces no worker."""
        if self.max_restarts == 0:
            return ""
        for failure in failures:
            plan, report = failure.status.plan, failure.report
            if plan.server_name:
                return f"{plan.name} is not replaced: the noise and state that it kept for every environment are lost"
            if failure.exitcode is not None and -failure.exitcode in _CORRUPTING:
                return (
                    f"{plan.name} is not replaced: after a {signal.Signals(-failure.exitcode).name} "
                    "the memory that it shared cannot be trusted"
                )
            if report is not None and isinstance(report.exception, PenstockError):
                return f"{plan.name} is not replaced: the same would happen again"
        return self.used_up(len(failures))

    def used_up(self, n_failures: int) -> str | None:
        """Why `n_failures` more replacements are too many; None if they are not."""
        recent = self._recent()
        if len(recent) + n_failures > self.max_restarts:
            earlier = [f"  {time.monotonic() - when:.1f} s ago: {what}" for when, what in recent]
            limit = f"max_restarts={self.max_restarts} in {self.window:g} s are used up"
            return "\n".join([limit + (", earlier:" if earlier else ""), *earlier])
        return None

    def note(self, rank: int, what: str, n_lost: int) -> None:
        """Record `what` has happened to this worker, which is being replaced, and that `n_lost` trajectories are lost
        with it."""
        self.history.append((time.monotonic(), what))
        self.per_worker[rank] += 1
        self.lost_per_worker[rank] += n_lost

    def _recent(self) -> list[tuple[float, str]]:
        since = time.monotonic() - self.window
        return [entry for entry in self.history if entry[0] >= since]
