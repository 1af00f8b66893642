"""From dead or silent workers to the errors that the user sees."""

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.buffers.reports import Report
from penstock.errors import (
    EnvCallError,
    GameError,
    PenstockError,
    SamplerBrokenError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)
from penstock.workers.control import BETWEEN_BATCHES, Phase, ProgressSnapshot
from penstock.workers.plan import WorkerPlan
from penstock.workers.supervisor import SUPERVISOR_ENDED

_MAX_LISTED = 32  # workers that fail at once, each with a line
_MAX_STACKS = 3

_PHASE_TEXT = {
    Phase.STARTING: "starting",
    Phase.BUILDING: "building env_rank {rank}",
    Phase.RESETTING: "resetting env_rank {rank}",
    Phase.DECORRELATING: "stepping env_rank {rank} in the random steps before the first batch",
    Phase.WAITING: "waiting for the next command",
    Phase.ACTING: "acting",
    Phase.STEPPING: "stepping env_rank {rank}",
    Phase.SENDING: "sending results",
    Phase.CLOSING: "closing env_rank {rank}",
    Phase.CLOSED: "exiting",
    Phase.BEGINNING: "beginning",
    Phase.CALLING: "in a call on its environments",
    Phase.REQUESTING: "waiting for actions",
    Phase.SERVING: "waiting for requests",
    Phase.RENEWING: "building env_rank {rank} again",
    Phase.UNREADABLE: "doing what cannot be read, since a crash has written into the shared memory",
}
#: What some exceptions need to say; by their class.
_TEXTS = {
    "bdb.BdbQuit": "bdb.BdbQuit: breakpoint() needs a terminal, which a worker does not have. Use a SerialSampler, or "
    "error.episode (seed_episodes=True)"
}
#: What is added to others; by a pattern of the phase in words and the headline.
_HINTS = {
    r"^stepping.*\n(Attribute|Type)Error: .*('int' object|type 'int'|got int\b)": (
        "discrete actions are Python ints here"
    ),
    r"\n(_?pickle\.Pickl|AttributeError: Can't get attribute).*__main__": (
        "put it into a module, or use start_method='fork'"
    ),
    r"reset\(\) got an unexpected keyword argument": "Gymnasium demands reset(self, *, seed=None, options=None)",
}
_IN_ENVIRONMENT = (Phase.BUILDING, Phase.RESETTING, Phase.DECORRELATING, Phase.STEPPING, Phase.RENEWING)
_IN_BATCH = (Phase.ACTING, Phase.REQUESTING, Phase.STEPPING, Phase.RESETTING, Phase.RENEWING)


@dataclass(frozen=True)
class WorkerStatus:
    """What one worker is doing now."""

    plan: WorkerPlan
    pid: int
    progress: ProgressSnapshot

    def __str__(self) -> str:
        return f"{self.plan.name} ({', '.join(filter(None, [f'pid {self.pid}', self.plan.env_text]))})"

    @property
    def doing(self) -> str:
        """Its phase in words, with environment and time step."""
        text = _PHASE_TEXT[self.progress.phase].format(rank=self.progress.env_rank)
        if self.progress.phase not in _IN_BATCH:
            return text
        text += self.plan.who_text(self.progress.who)
        if self.progress.t == BETWEEN_BATCHES:
            return f"{text} between two batches"
        return f"{text}, t={self.progress.t}" if self.progress.t >= 0 else text

    @property
    def heartbeat_text(self) -> str:
        """Its phase, and how long ago it last made progress."""
        if self.progress.heartbeat == 0:
            return f"{self.plan.name}: {self.doing}, no heartbeat yet"
        seconds = time.monotonic() - self.progress.heartbeat
        return f"{self.plan.name}: {self.doing}, last heartbeat {seconds:.1f} s ago"


@dataclass(frozen=True)
class WorkerFailure:
    """A worker that failed: its last status, how it ended, its report and its stack."""

    status: WorkerStatus
    exitcode: int | None
    report: Report | None  #: its exception, if it raised
    stack: str = ""  #: its Python stack, if it crashed or hung
    hung: str = ""  #: how it hung, if the main process killed it for that
    episode: Any = None  #: what `PoolOptions.episode_of` has returned for it

    @property
    def rank(self) -> int:
        """The worker's rank."""
        return self.status.plan.worker_rank

    @property
    def env_rank(self) -> int | None:
        """The environment that it was building, resetting or stepping; None if it did something else."""
        progress = self.status.progress
        return progress.env_rank if progress.phase in _IN_ENVIRONMENT and progress.env_rank >= 0 else None

    def describe(self, during: str = "") -> str:
        """One sentence: the worker, how it failed, its phase, and the call that was running (`during`)."""
        doing = f"{self.status.doing} ({during})" if during else self.status.doing
        if self.report and not self.hung:
            headline = self.report.headline
            return raised(self.status, doing, _TEXTS.get(headline.partition(":")[0], headline))
        return f"{self.status} {self.hung or describe_exit(self.exitcode)} while {doing}"


def raised(who: object, doing: str, headline: str) -> str:
    """One sentence about an exception, of which `in_one_line` has made the `headline`: who raised it, its class, and
    the phase (`doing`). The message comes last, since it may be long."""
    kind, _, message = headline.partition(": ")
    hints = [f" ({hint})" for pattern, hint in _HINTS.items() if re.search(pattern, f"{doing}\n{headline}")]
    return f"{who} raised {kind} while {doing}{': ' if message else ''}{message}{''.join(hints)}"


def describe_exit(exitcode: int | None) -> str:
    """An exit code in words, with the signal's name."""
    if exitcode == SUPERVISOR_ENDED:
        return "ended with the supervisor, the process that starts the workers, which has exited or was killed"
    if exitcode is None:
        return "has ended with an unknown exit code: the supervisor, which starts the workers, does not answer"
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def make_error(
    failures: Sequence[WorkerFailure], others: Sequence[WorkerStatus], during: str, note: str = ""
) -> SamplerBrokenError:
    """The error for workers that failed during `during`; `__cause__` is the first reported exception.

    `others` are the workers that live. `note` says why the failed ones were not replaced.
    """
    hung = [failure for failure in failures if failure.hung]
    reports = [failure.report for failure in failures if failure.report is not None]
    lines = [failure.describe(during) for failure in failures[:_MAX_LISTED]]
    if len(failures) > _MAX_LISTED:
        lines.append(f"... and {len(failures) - _MAX_LISTED} more workers")
    if hung:
        everyone = sorted([*others, *(failure.status for failure in failures)], key=lambda s: s.plan.worker_rank)
        lines += [f"  {status.heartbeat_text}" for status in everyone]
    elif others:
        lines.append("the others: " + "; ".join([f"{status.plan.name} {status.doing}" for status in others]))
    episodes = [failure.episode for failure in failures if failure.episode is not None]
    in_envs = [failure.env_rank for failure in failures if failure.env_rank is not None]
    lines += [episode.advice for episode in episodes[:1]]
    if note:
        lines.append(note)
    for failure in [failure for failure in failures if failure.stack][:_MAX_STACKS]:
        lines += [f"the stack of {failure.status.plan.name}:", failure.stack]
    kind = WorkerTimeoutError if hung else WorkerError if reports else WorkerDiedError
    error = kind("\n".join(lines))
    error.episode, error.env_rank = next(iter(episodes), None), next(iter(in_envs), None)
    if reports:
        error.__cause__ = reports[0].as_cause()
    return error


def add_killed(error: SamplerBrokenError, killed: Sequence[WorkerFailure]) -> None:
    """Name in `error` the workers that were found killed after it was made."""
    lines = [str(error), "killed as well, at the same moment or while the others were told to exit:"]
    error.args = ("\n".join([*lines, *(failure.describe() for failure in killed[:_MAX_LISTED])]),)


# After these signals a worker may have written anywhere in the shared memory.
_CORRUPTING = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}


class Restart(NamedTuple):
    """The replacement of a worker."""

    when: float  #: on the clock of `time.monotonic`
    what: str  #: what had happened
    rank: int  #: of the worker
    #: The environment that the worker was building, resetting or stepping; None if it did something else.
    env_rank: int | None = None


@dataclass
class Restarts:
    """The replacements of one pool so far. At most `max_restarts` are allowed within `window` seconds."""

    max_restarts: int
    window: float
    history: list[Restart] = field(default_factory=list)
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
            error = None if report is None else report.exception
            # A new game may play on, and an environment may fail in its own process as in a worker's.
            if isinstance(error, PenstockError) and not isinstance(error, GameError | EnvCallError):
                return f"{plan.name} is not replaced: the same would happen again"
        return self.used_up(len(failures))

    def used_up(self, n_failures: int, rank: int | None = None) -> str | None:
        """Why `n_failures` more replacements, of any worker or of this one, are too many; None if they are not."""
        since = time.monotonic() - self.window
        recent = [entry for entry in self.history if entry.when >= since and rank in (None, entry.rank)]
        if len(recent) + n_failures > self.max_restarts:
            earlier = [f"  {time.monotonic() - entry.when:.1f} s ago: {entry.what}" for entry in recent]
            limit = f"max_restarts={self.max_restarts} in {self.window:g} s are used up"
            return "\n".join([limit + (", earlier:" if earlier else ""), *earlier])
        return None

    def note(self, rank: int, what: str, n_lost: int, env_rank: int | None = None) -> None:
        """Record `what` has happened to this worker, which is being replaced, and that `n_lost` trajectories are lost
        with it."""
        self.history.append(Restart(time.monotonic(), what, rank, env_rank))
        self.per_worker[rank] += 1
        self.lost_per_worker[rank] += n_lost
