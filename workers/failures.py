"""From dead or silent workers to the errors that the user sees."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import forkserver

import psutil

from penstock.buffers.reports import Report
from penstock.errors import SamplerBrokenError, WorkerDiedError, WorkerError, WorkerTimeoutError
from penstock.workers.control import Phase, ProgressSnapshot
from penstock.workers.plan import WorkerPlan

__all__ = ["WorkerFailure", "WorkerStatus", "add_to", "describe_exit", "failure"]

_MAX_LISTED = 32  # of workers that fail at once, each with a line of its own
_MAX_STACKS = 3
_NO_EXIT_CODE = 255  # multiprocessing's for a worker whose fork server can no longer tell

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
    Phase.BEGINNING: "beginning",
    Phase.CALLING: "in a call on its environments",
    Phase.ASKING: "waiting for actions",
    Phase.SERVING: "waiting for questions",
}


@dataclass(frozen=True)
class WorkerStatus:
    """What is known of one worker at the moment of a failure."""

    plan: WorkerPlan
    pid: int
    progress: ProgressSnapshot

    def __str__(self) -> str:
        if self.plan.is_server:
            return f"{self.plan.name} (pid {self.pid})"
        envs = f"env_rank {_span(self.plan.env_ranks)}"
        if len(self.plan.eval_env_ranks):
            envs += f", for evaluation {_span(self.plan.eval_env_ranks)}"
        return f"{self.plan.name} (pid {self.pid}, {envs})"

    @property
    def doing(self) -> str:
        """Its phase in words, with environment and time step."""
        words = _WORDS[self.progress.phase].format(rank=self.progress.env_rank)
        in_batch = self.progress.phase in (Phase.ACTING, Phase.ASKING, Phase.STEPPING, Phase.RESETTING)
        return f"{words}, t={self.progress.t}" if in_batch and self.progress.t >= 0 else words


def _span(ranks: range) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"


@dataclass(frozen=True)
class WorkerFailure:
    """A worker that failed: what is known of it, how it ended, and what it left to be read."""

    witness: WorkerStatus
    exitcode: int | None
    report: Report | None  #: its own account, if it raised
    stack: str = ""  #: its Python stack, if it crashed or hung
    hung: str = ""  #: how it hung, if it was this side that ended it

    @property
    def rank(self) -> int:
        """The worker's rank."""
        return self.witness.plan.worker_rank

    def __str__(self) -> str:
        if self.hung:
            how = self.hung
        elif self.report:
            how = f"raised {self.report.headline}"
        else:
            how = describe_exit(self.exitcode)
        return f"{self.witness} {how} while {self.witness.doing}"


def describe_exit(exitcode: int | None) -> str:
    """An exit code in words, with the signal's name."""
    if exitcode is None:
        return "ended in an unknown way"
    if exitcode == _NO_EXIT_CODE and _fork_server_has_ended():
        return "ended with the fork server, which has been killed"
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _fork_server_has_ended() -> bool:
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    try:
        return pid is not None and psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def failure(
    dead: Sequence[WorkerFailure], others: Sequence[WorkerStatus], occasion: str, note: str = ""
) -> SamplerBrokenError:
    """The error for workers that failed during `occasion`; `__cause__` is the first report's exception.

    `note` is added: why they have not been replaced.
    """
    hung = [casualty for casualty in dead if casualty.hung]
    reported = [casualty.report for casualty in dead if casualty.report is not None]
    lines = [f"{casualty} ({occasion})" for casualty in dead[:_MAX_LISTED]]
    if len(dead) > _MAX_LISTED:
        lines.append(f"... and {len(dead) - _MAX_LISTED} more workers")
    if hung:
        everyone = sorted([*others, *(casualty.witness for casualty in dead)], key=lambda w: w.plan.worker_rank)
        lines += [f"  {_sign_of_life(witness)}" for witness in everyone]
    elif others:
        lines.append("the others: " + "; ".join(f"{w.plan.name} {w.doing}" for w in others))
    if note:
        lines.append(note)
    for casualty in [casualty for casualty in dead if casualty.stack][:_MAX_STACKS]:
        lines += [f"the stack of {casualty.witness.plan.name}:", casualty.stack]
    kind = WorkerTimeoutError if hung else WorkerError if reported else WorkerDiedError
    error = kind("\n".join(lines))
    if reported:
        error.__cause__ = reported[0].as_cause()
    return error


def add_to(error: SamplerBrokenError, killed: Sequence[WorkerFailure]) -> None:
    """Name in `error` the workers that turned out to have been killed too, after it was made."""
    if killed:
        lines = [str(error), "killed as well, in the same moment or while the others were told to end:"]
        error.args = ("\n".join([*lines, *map(str, killed[:_MAX_LISTED])]),)


def _sign_of_life(witness: WorkerStatus) -> str:
    if witness.progress.heartbeat == 0:
        return f"{witness.plan.name}: {witness.doing}, no sign of life yet"
    seconds = time.monotonic() - witness.progress.heartbeat
    return f"{witness.plan.name}: {witness.doing}, last sign of life {seconds:.1f} s ago"
