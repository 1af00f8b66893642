"""Whether a failed worker may be replaced, and what became of those that were."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.errors import PenstockError
from penstock.workers.failures import WorkerFailure

__all__ = ["ON_WORKER_FAILURE", "RestartPolicy", "Restarts"]

ON_WORKER_FAILURE = ("raise", "restart")

# After these a worker may have written anywhere in the shared memory: what is there cannot be trusted.
_SUSPECT = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}


@dataclass(frozen=True)
class RestartPolicy:
    """`max_restarts` replacements within `window` seconds at most; 0 never replaces."""

    max_restarts: int
    window: float

    @classmethod
    def of(cls, on_worker_failure: str, max_restarts: int, window: float) -> RestartPolicy:
        """What `on_worker_failure`, one of `ON_WORKER_FAILURE`, makes of the other two."""
        return cls(max_restarts if on_worker_failure == "restart" else 0, window)


@dataclass
class Restarts:
    """The replacements of one sampler so far."""

    policy: RestartPolicy
    history: list[tuple[float, str]] = field(default_factory=list)  #: when, and what had happened
    per_worker: Counter[int] = field(default_factory=Counter)
    lost_per_worker: Counter[int] = field(default_factory=Counter)  #: trajectories that were given up

    @property
    def total(self) -> int:
        """Replacements so far."""
        return len(self.history)

    def refusal(self, casualties: Sequence[WorkerFailure]) -> str | None:
        """Why these workers must not be replaced; None if they may."""
        if self.policy.max_restarts == 0:
            return ""
        for casualty in casualties:
            if casualty.witness.plan.is_server:
                return "the inference server is not replaced: noise and state of every environment's agent went with it"
            if casualty.exitcode is not None and -casualty.exitcode in _SUSPECT:
                return (
                    f"worker {casualty.rank} is not replaced: after a {signal.Signals(-casualty.exitcode).name} "
                    "the memory that it shared cannot be trusted"
                )
            if casualty.report is not None and isinstance(casualty.report.exception, PenstockError):
                return f"worker {casualty.rank} is not replaced: the same would happen again"
        recent = self._recent()
        if len(recent) + len(casualties) > self.policy.max_restarts:
            earlier = [f"  {time.monotonic() - when:.1f} s ago: {what}" for when, what in recent]
            limit = f"max_restarts={self.policy.max_restarts} in {self.policy.window:g} s are used up"
            return "\n".join([limit + (", earlier:" if earlier else ""), *earlier])
        return None

    def note(self, casualty: WorkerFailure, occasion: str, lost: int) -> None:
        """`casualty` is being replaced; `lost` trajectories go with it."""
        self.history.append((time.monotonic(), f"{casualty} ({occasion})"))
        self.per_worker[casualty.rank] += 1
        self.lost_per_worker[casualty.rank] += lost

    def _recent(self) -> list[tuple[float, str]]:
        since = time.monotonic() - self.policy.window
        return [entry for entry in self.history if entry[0] >= since]
