"""From dead or silent workers to the errors that the user sees."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.buffers.control import Phase, ProgressSnapshot
from penstock.errors import SamplerBrokenError, WorkerDiedError, WorkerError, WorkerTimeoutError
from penstock.samplers.plan import WorkerPlan
from penstock.samplers.reports import Report

__all__ = ["Casualty", "Witness", "describe_exit", "worker_failure", "worker_timeout"]

_WORDS = {
    Phase.STARTING: "starting",
    Phase.BUILDING: "building env_rank {rank}",
    Phase.RESETTING: "resetting env_rank {rank}",
    Phase.DECORRELATING: "decorrelating env_rank {rank}",
    Phase.WAITING: "waiting at barrier_in",
    Phase.ACTING: "acting",
    Phase.STEPPING: "stepping env_rank {rank}",
    Phase.HANDING_OVER: "handing trajectory infos over",
    Phase.CLOSING: "closing env_rank {rank}",
    Phase.CLOSED: "closed",
}


@dataclass(frozen=True)
class Witness:
    """What is known of one worker at the moment of a failure."""

    plan: WorkerPlan
    pid: int
    progress: ProgressSnapshot

    def __str__(self) -> str:
        ranks = self.plan.env_ranks
        envs = f"env_rank {ranks[0]}" if len(ranks) == 1 else f"env_rank {ranks[0]} to {ranks[-1]}"
        return f"worker {self.plan.worker_rank} (pid {self.pid}, {envs})"

    @property
    def doing(self) -> str:
        """Its phase in words, with environment and time step."""
        words = _WORDS[self.progress.phase].format(rank=self.progress.env_rank)
        in_batch = self.progress.phase in (Phase.ACTING, Phase.STEPPING, Phase.RESETTING)
        return f"{words}, t={self.progress.t}" if in_batch else words


@dataclass(frozen=True)
class Casualty:
    """A dead worker: what is known of it, how it ended, and its own report if it left one."""

    witness: Witness
    exitcode: int | None
    report: Report | None

    def __str__(self) -> str:
        how = f"raised {self.report.headline}" if self.report else describe_exit(self.exitcode)
        return f"{self.witness} {how} while {self.witness.doing}"


def describe_exit(exitcode: int | None) -> str:
    """An exit code in words, with the signal's name."""
    if exitcode is None:
        return "ended in an unknown way"
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def worker_failure(dead: Sequence[Casualty], others: Sequence[Witness], occasion: str) -> SamplerBrokenError:
    """The error for workers that died during `occasion`; `__cause__` is the first report's exception."""
    reported = [casualty.report for casualty in dead if casualty.report is not None]
    lines = [f"{casualty} ({occasion})" for casualty in dead]
    if others:
        lines.append("the others: " + "; ".join(f"worker {w.plan.worker_rank} {w.doing}" for w in others))
    error = (WorkerError if reported else WorkerDiedError)("\n".join(lines))
    if reported:
        error.__cause__ = reported[0].as_cause()
    return error


def worker_timeout(
    hung: Sequence[Witness], everyone: Sequence[Witness], limit: float, occasion: str
) -> WorkerTimeoutError:
    """The error for workers that made no progress for `limit` seconds."""
    now = time.monotonic()
    lines = [f"{witness} made no progress for {limit:g} s while {witness.doing} ({occasion})" for witness in hung]
    lines += [
        f"  worker {w.plan.worker_rank}: {w.doing}, last sign of life {now - w.progress.heartbeat:.1f} s ago"
        for w in everyone
    ]
    return WorkerTimeoutError("\n".join(lines))
