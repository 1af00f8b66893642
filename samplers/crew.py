"""The crew: the worker processes of one sampler, started, let through the gates and closed as one."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.buffers.control import ControlBlock, ProgressSnapshot
from penstock.buffers.descriptors import InheritedFd
from penstock.buffers.trajectory_queue import Frame, ObjectPipe
from penstock.errors import SamplerBrokenError, SamplerClosedError
from penstock.samplers.failures import Casualty, Witness, worker_failure, worker_timeout
from penstock.samplers.gates import Gate
from penstock.samplers.launch import dies_with_starter, pickle_job, start_worker, worker_environ
from penstock.samplers.plan import WorkerPlan
from penstock.samplers.process import WorkerSetup
from penstock.samplers.reports import ReportBoard
from penstock.samplers.watch import DeathWatch, Watch
from penstock.samplers.worker import Job, SharedState

__all__ = ["Crew"]

_LOOK_AGAIN_SECONDS = 1.0  # nothing depends on it: all that matters wakes the watch
_GATHER_SECONDS = 0.01  # after each death, for another that comes of the same cause
_ASK_SECONDS = 1.5  # for workers to end their step and close their environments
_ASK_BROKEN_SECONDS = 0.3  # the same after a failure, when the user waits for the error
_TERMINATE_SECONDS = 0.3
_KILL_SECONDS = 0.5


@dataclass(frozen=True)
class _Member:
    plan: WorkerPlan
    process: Any  # multiprocessing's Process of whichever context
    gate: Gate
    death: DeathWatch


class Crew:
    """Starts one process per plan. Every wait in here watches the workers' deaths and is bounded."""

    def __init__(
        self, plans: Sequence[WorkerPlan], job: Job, state: SharedState, *, start_method: str, spin: bool
    ) -> None:
        self._control: ControlBlock = state.control
        self._owner_pid = os.getpid()
        self._members: list[_Member] = []
        self._closed = False
        self.pipes = [ObjectPipe() for _ in plans]
        self._reports = ReportBoard(len(plans), shared=True)
        self._main_process = InheritedFd(os.pidfd_open(os.getpid())) if hasattr(os, "pidfd_open") else None
        try:
            jobs = [pickle_job(job.share(plan)) for plan in plans]  # all, before the first process starts
            for plan, pickled in zip(plans, jobs, strict=True):
                self._start(plan, pickled, state, start_method, spin)
            self._watch = Watch([m.gate for m in self._members], self.pipes, [m.death for m in self._members])
        except BaseException:
            self.close()
            raise

    def _start(self, plan: WorkerPlan, job: bytes, state: SharedState, start_method: str, spin: bool) -> None:
        gate = Gate(self._control, plan.worker_rank, spin=spin)
        self._control.open(plan.worker_rank)  # opening number one: start-up
        setup = WorkerSetup(
            plan=plan,
            job=job,
            state=state,
            gate=gate,
            reports=self._reports,
            pipe=self.pipes[plan.worker_rank],
            main_process=self._main_process,
            environ=worker_environ(),
            die_with_parent=dies_with_starter(start_method),
        )
        try:
            process = start_worker(setup, start_method)
        except BaseException:
            gate.close()
            raise
        self._members.append(_Member(plan, process, gate, DeathWatch(process)))

    @property
    def pids(self) -> list[int]:
        """The worker processes' ids."""
        return [member.process.pid for member in self._members]

    def take_frames(self, promised: Sequence[int]) -> list[Frame]:
        """Trajectory infos that came through the pipes: `promised[i]` of worker i."""
        return [frame for pipe, n in zip(self.pipes, promised, strict=True) for frame in pipe.take(n)]

    # ---- gates -----------------------------------------------------------------------------

    def open_gates(self) -> None:
        """Let every worker through barrier_in."""
        for member in self._members:
            member.gate.open()

    def wait_out(
        self,
        occasion: str,
        progress_limit: float | None = None,
        on_wake: Callable[[], None] | None = None,
        look_again: float = _LOOK_AGAIN_SECONDS,
    ) -> None:
        """Wait until every worker stands at barrier_out.

        Raises `WorkerError` or `WorkerDiedError` as soon as a worker fails, and `WorkerTimeoutError`
        if one makes no progress for `progress_limit` seconds. `occasion` is quoted in the error;
        `on_wake` is called at least every `look_again` seconds.
        """
        stopwatch = _Stopwatch(progress_limit)
        if progress_limit is not None:
            look_again = min(look_again, progress_limit / 10)
        pending = [m for m in self._members if not m.gate.arrived]
        while True:
            dead = self._watch.wait(look_again if pending else 0)
            if self._closed:  # by another thread; the deaths are of its making
                raise SamplerClosedError(f"the sampler was shut down by another thread during {occasion}")
            if dead:
                raise self._failure(dead, occasion)
            pending = [m for m in self._members if not m.gate.arrived]
            if not pending:
                return
            if on_wake is not None:
                on_wake()
            if hung := stopwatch.overdue(pending, self._snapshot):
                witnesses = [self._witness(m) for m in self._members]
                raise worker_timeout([witnesses[i] for i in hung], witnesses, progress_limit or 0.0, occasion)

    def _snapshot(self, member: _Member) -> ProgressSnapshot:
        return self._control.snapshot(member.plan.worker_rank)

    def _witness(self, member: _Member) -> Witness:
        return Witness(member.plan, member.process.pid, self._snapshot(member))

    def _failure(self, dead: Iterable[int], occasion: str) -> SamplerBrokenError:
        found = set(dead)
        while rest := [i for i in range(len(self._members)) if i not in found]:
            died = Watch([], [], [self._members[i].death for i in rest]).wait(_GATHER_SECONDS)
            if not died:
                break
            found |= {rest[i] for i in died}
        casualties, others = [], []
        for i, member in enumerate(self._members):
            witness = self._witness(member)
            if i in found:
                # Its group first, while its process id cannot have been given to anybody else.
                _signal_group(member, signal.SIGKILL)
                member.process.join(_KILL_SECONDS)
                report = self._reports.read(member.plan.worker_rank)
                casualties.append(Casualty(witness, member.process.exitcode, report))
            else:
                others.append(witness)
        return worker_failure(casualties, others, occasion)

    # ---- the end ---------------------------------------------------------------------------

    def close(self, *, broken: bool = False) -> None:
        """End every worker: ask, wait, terminate, kill. Bounded, never raises, again is harmless.

        A worker that had to be forced, or whose `env.close` raised, is named in one warning.
        """
        if self._closed or os.getpid() != self._owner_pid:  # a fork of the main process owns nothing
            return
        self._closed = True
        self._control.quit = True
        for member in self._members:
            member.gate.open()
        alive = self._await_deaths(self._members, _ASK_BROKEN_SECONDS if broken else _ASK_SECONDS)
        complaints = [f"{w} did not end while {w.doing} and was killed" for w in map(self._witness, alive)]
        for sig, seconds in ((signal.SIGTERM, _TERMINATE_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
            for member in alive:
                _signal_group(member, sig)
            alive = self._await_deaths(alive, seconds)
        for member in self._members:
            _signal_group(member, signal.SIGKILL)  # processes that its environments left behind
            member.process.join(_KILL_SECONDS)
            report = self._reports.read(member.plan.worker_rank)
            if report is not None and not broken:
                complaints.append(f"{self._witness(member)} raised {report.headline} while closing")
        self._release()
        if complaints and not broken:
            warnings.warn("; ".join(complaints), RuntimeWarning, stacklevel=2)

    def _await_deaths(self, members: Sequence[_Member], seconds: float) -> list[_Member]:
        """Wait `seconds` at most for all `members` to end; returns those that have not."""
        deadline = time.monotonic() + seconds
        alive = list(members)
        while alive and (left := deadline - time.monotonic()) > 0:
            # Pipes are watched too: a worker may still be handing over what no one will take.
            dead = Watch([], self.pipes, [member.death for member in alive]).wait(left)
            alive = [member for i, member in enumerate(alive) if i not in dead]
        return alive

    def _release(self) -> None:
        for member in self._members:
            member.gate.close()
            member.death.close()
            with contextlib.suppress(ValueError):  # still running, against all SIGKILLs: leave it to the system
                member.process.close()
        for pipe in self.pipes:
            pipe.close()
        self._reports.memory.close()
        if self._main_process is not None:
            self._main_process.close()


class _Stopwatch:
    """Tells which workers' progress rows have not changed for longer than `limit` seconds."""

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._seen: dict[int, tuple[ProgressSnapshot, float]] = {}

    def overdue(self, members: Sequence[_Member], snapshot: Callable[[_Member], ProgressSnapshot]) -> list[int]:
        if self._limit is None:
            return []
        now = time.monotonic()
        overdue = []
        for member in members:
            rank, row = member.plan.worker_rank, snapshot(member)
            if rank not in self._seen or self._seen[rank][0] != row:
                self._seen[rank] = row, now
            elif now - self._seen[rank][1] > self._limit:
                overdue.append(rank)
        return overdue


def _signal_group(member: _Member, sig: signal.Signals) -> None:
    pid = member.process.pid
    try:
        os.killpg(pid, sig)
    except (ProcessLookupError, PermissionError):
        # The worker had not yet made a group of its own, or is gone.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if member.process.exitcode is None:
                os.kill(pid, sig)
