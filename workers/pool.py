"""The crew: worker processes that do one job, started, let through the gates, replaced and closed as one."""

from __future__ import annotations

import logging
import multiprocessing.process
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.buffers.descriptors import InheritedFd
from penstock.buffers.reports import ReportBoard
from penstock.buffers.trajectory_queue import ObjectMessage, ObjectPipe
from penstock.errors import SamplerBrokenError
from penstock.workers import cleanup
from penstock.workers.control import Phase
from penstock.workers.failures import WorkerFailure, WorkerStatus, add_to
from penstock.workers.forks import abandon_in_forks
from penstock.workers.gates import Gate
from penstock.workers.guardian import Guardian
from penstock.workers.handle import WorkerHandle
from penstock.workers.interrupts import interrupts
from penstock.workers.launch import Launcher, PickledJob
from penstock.workers.monitor import Limits, Supervisor
from penstock.workers.plan import WorkerPlan
from penstock.workers.process import WorkerSetup
from penstock.workers.restarts import RestartPolicy, Restarts
from penstock.workers.stacks import StackFile
from penstock.workers.team import Wait
from penstock.workers.watch import DeathWatch, Watch
from penstock.workers.work import Job, Memory

__all__ = ["PoolOptions", "WorkerPool"]

_log = logging.getLogger("penstock")

_ASK_SECONDS = 1.5  # for workers to end their step and close their environments
_ASK_BROKEN_SECONDS = 0.3  # the same after a failure, when the user waits for the error
_TERMINATE_SECONDS = 0.3
_KILL_SECONDS = 0.5


@dataclass(frozen=True)
class PoolOptions:
    """How processes are started, how long they may be silent, and what happens when one fails."""

    start_method: str
    spin_seconds: float  #: how long either side looks out for the other before it sleeps
    limits: Limits
    restarts: RestartPolicy
    preload: Sequence[str] = ()  #: modules that workers import, for the fork server to have at hand


class WorkerPool:
    """One process per plan. Every wait watches the workers' deaths and is bounded.

    An inference server with a process of its own has the last plan: supervised as all are, but never replaced.
    """

    def __init__(
        self,
        plans: Sequence[WorkerPlan],
        job: Job,
        memory: Memory,
        rules: PoolOptions,
        on_replace: Callable[[ObjectPipe], None] = lambda pipe: None,
    ) -> None:
        """`on_replace` is given the pipe of each worker that is to be replaced in the midst of its work."""
        self._memory, self._rules, self._control, self._on_replace = memory, rules, memory.control, on_replace
        self._owner_pid = os.getpid()
        self._close_lock = threading.Lock()
        self._closing_thread: int | None = None
        self.closed = False  # or being closed
        self._is_over = False
        self._openings = [1] * len(plans)  # of each gate; number one is start-up
        self.members: list[WorkerHandle] = []
        self.restarts = Restarts(rules.restarts)
        self._job = PickledJob(job, plans)  # all of it, before the first process starts
        self._launcher = Launcher(rules.start_method, len(plans), rules.preload)
        self._reports = ReportBoard(len(plans), shared=True)
        self._server_gate = self._gate(len(plans) - 1) if plans[-1].is_server else None
        self._main_process = InheritedFd(os.pidfd_open(os.getpid())) if hasattr(os, "pidfd_open") else None
        self._guardian = Guardian(self._launcher.prepare())
        abandon_in_forks(self)
        try:
            for plan in plans:
                with interrupts.passing():
                    pass  # between two workers, none of which is only half there
                self._control.open(plan.worker_rank)  # opening number one: start-up
                self._start_first(plan)
            self._supervisor = Supervisor(self._control, self._reports, self.restarts, rules.limits, rules.spin_seconds)
        except BaseException:
            self.close(broken=True)
            raise

    def _gate(self, worker_rank: int, server: Gate | None = None) -> Gate:
        return Gate(self._control, worker_rank, spin_seconds=self._rules.spin_seconds, server=server)

    def _start_first(self, plan: WorkerPlan) -> None:
        server_gate = self._server_gate
        gate = server_gate if plan.is_server and server_gate else self._gate(plan.worker_rank, server_gate)
        pipe, stacks = ObjectPipe(), StackFile()
        try:
            self._start(plan, gate, pipe, stacks)
        except BaseException:
            for thing in (gate, pipe, stacks):
                thing.close()
            raise

    def _start(self, plan: WorkerPlan, gate: Gate, pipe: ObjectPipe, stacks: StackFile) -> None:
        """Start a worker and make it a member, in its forerunner's place if it has one."""
        setup = WorkerSetup(
            plan=plan,
            order=self._job.order_for(plan),
            memory=self._memory,
            gate=gate,
            reports=self._reports,
            pipe=pipe,
            stacks=stacks,
            main_process=self._main_process,
            die_with_parent=self._launcher.dies_with_starter,
            served=[member.gate for member in self.members] if plan.is_server else (),
        )
        begun = self._control.begun(plan.worker_rank)
        process, rank = self._launcher.make(setup), plan.worker_rank
        try:
            self._launcher.start(process, plan.name)
            self._guardian.watch(process.pid)
            member = WorkerHandle(plan, process, process.pid, gate, pipe, stacks, DeathWatch(process), begun)
            self.members[rank : rank + 1] = [member]
        except BaseException:  # a second Ctrl-C: nobody is to be there of whom nobody knows
            if process.pid is not None:
                process.kill()
                process.join(_KILL_SECONDS)
            raise

    @property
    def pids(self) -> list[int]:
        """The worker processes' ids."""
        return [member.pid for member in self.members]

    def witnesses(self) -> list[WorkerStatus]:
        """Where every worker is now."""
        return [member.witness(self._control) for member in self.members]

    def take_frames(self, promised: Sequence[int]) -> list[ObjectMessage]:
        """Trajectory infos that came through the pipes: `promised[i]` of worker i."""
        # An inference server, the last member, has none to promise.
        return [frame for member, n in zip(self.members, promised, strict=False) for frame in member.pipe.take(n)]

    # ---- gates -----------------------------------------------------------------------------

    def open_gates(self, ranks: Iterable[int] | None = None) -> None:
        """Let every worker through barrier_in, or those of `ranks`. One that is at work comes through again."""
        for rank in range(len(self.members)) if ranks is None else ranks:
            self._openings[rank] += 1
        self._open_to_the_last()

    def _open_to_the_last(self) -> None:
        for member in self.members:
            while self._control.opened(member.rank) < self._openings[member.rank]:
                member.gate.open()

    def wait_out(self, wait: Wait) -> None:
        """Wait until every worker stands at barrier_out; see `Supervisor.wait_out`."""
        self._open_to_the_last()  # should Ctrl-C have come between two gates
        try:
            self._supervisor.wait_out(self, wait)
        except SamplerBrokenError as error:
            add_to(error, self._end(broken=True))
            raise

    def replace(self, casualty: WorkerFailure, occasion: str) -> None:
        """Put a new worker in the place of a dead one; it does anew what that one has not finished."""
        rank = casualty.rank
        old = self.members[rank]
        lost = self._count_lost(old)
        self.restarts.note(casualty, occasion, lost)
        _log.warning("%s (%s); it is being replaced, %d trajectories are lost", casualty, occasion, lost)
        if not old.gate.arrived:  # else all that it wrote is kept
            self._on_replace(old.pipe)
        pipe = old.pipe.successor(keep=old.gate.arrived)
        self._reports.clear(rank)
        old.stacks.clear()
        self._control.reset_row(rank)
        self._guardian.forget(old.pid)
        plan = replace(old.plan, generation=self._control.generation(rank))
        try:
            self._start(plan, old.gate, pipe, old.stacks)
        except BaseException:
            pipe.close()
            raise
        old.release()
        old.pipe.close()

    def _count_lost(self, member: WorkerHandle) -> int:
        """Trajectories that a dead worker takes with it: those that were running, and those that had
        finished in a batch that it has not completed."""
        control, rank, plan = self._control, member.rank, member.plan
        if control.begun(rank) == member.begun_before:
            return 0  # it had not come as far as a batch
        lost = len(plan.columns)
        if member.gate.arrived or not control.has_begun(rank):
            return lost
        if control.do_eval:
            return lost + len(plan.eval_columns) + control.trajectories(rank)
        return lost + self._memory.count_finished(plan, control.snapshot(rank).t)

    # ---- the end ---------------------------------------------------------------------------

    def close(self, *, broken: bool = False) -> None:
        """End every worker: ask, wait, terminate, kill. Bounded, never raises, again is harmless.

        A worker that had to be forced, or whose `env.close` raised, is named in one warning.
        """
        self._end(broken=broken)

    def _end(self, *, broken: bool) -> list[WorkerFailure]:
        """`close`. Returns the workers that were killed by others than this process, and not found before:
        what ends one worker from outside may end many, and not all in the same moment."""
        me = threading.get_ident()
        if os.getpid() != self._owner_pid or self._closing_thread == me:
            return []  # a fork of the main process owns nothing; and a signal's handler must not wait for itself
        with self._close_lock, interrupts.held():
            if self._is_over:
                return []
            self.closed, self._closing_thread = True, me
            try:
                return self._end_all(broken)
            finally:
                self._closing_thread = None

    def _end_all(self, broken: bool) -> list[WorkerFailure]:
        forced = self._make_them_end(_ASK_BROKEN_SECONDS if broken else _ASK_SECONDS)
        complaints, killed = [], []
        exitcodes = set()
        for member in self.members:
            is_new = not member.is_buried
            exitcode = member.bury()  # and what its environments left behind
            exitcodes.add(exitcode)
            witness, report = member.witness(self._control), self._reports.read(member.rank)
            casualty = WorkerFailure(witness, exitcode, report)
            if member.rank in forced:
                complaints.append(f"{forced[member.rank]} did not end while {witness.doing} and was killed")
                continue
            if is_new and exitcode is not None and exitcode < 0:
                killed.append(casualty)
            if report is not None or witness.progress.phase is Phase.CLOSING:
                complaints.append(str(casualty))
        if exitcodes != {0}:
            cleanup.remove_stale({name for member in self.members for name in self._reports.stale(member.rank)})
        self._release()
        self._is_over = True
        if complaints and not broken:
            warnings.warn("; ".join(complaints), RuntimeWarning, stacklevel=4)
        return killed

    def _make_them_end(self, patience: float) -> dict[int, WorkerStatus]:
        """Ask, wait, terminate, kill. Returns where those were that did not end for the asking, by rank."""
        self._control.quit = True
        for member in self.members:
            member.gate.open()
        alive = self._await_deaths(self.members, patience)
        forced = {member.rank: member.witness(self._control) for member in alive}
        for sig, seconds in ((signal.SIGTERM, _TERMINATE_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
            for member in alive:
                member.signal_group(sig)
            alive = self._await_deaths(alive, seconds)
        return forced

    def abandon(self) -> None:
        """In a fork of the main process: the workers are not its children, and not its to wait for."""
        for member in self.members:
            multiprocessing.process._children.discard(member.process)  # type: ignore[attr-defined]

    def _await_deaths(self, members: Sequence[WorkerHandle], seconds: float) -> list[WorkerHandle]:
        """Wait `seconds` at most for all `members` to end; returns those that have not."""
        deadline = time.monotonic() + seconds
        alive = list(members)
        while alive and (left := deadline - time.monotonic()) > 0:
            # Pipes are watched too: a worker may still be handing over what no one will take.
            dead = Watch([], [member.pipe for member in alive], [member.death for member in alive]).wait(left)
            alive = [member for i, member in enumerate(alive) if i not in dead]
        return alive

    def _release(self) -> None:
        self._guardian.close()
        if self._server_gate is not None:
            self._server_gate.close()  # its process may never have been started
        for member in self.members:
            member.release()
            for thing in (member.gate, member.pipe, member.stacks):
                thing.close()
        self._reports.memory.close()
        self._job.close()
        if self._main_process is not None:
            self._main_process.close()
