"""The worker pool: all workers of a sampler or vector environment, started, commanded, replaced and closed as one."""

from __future__ import annotations

import logging
import multiprocessing.process
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from penstock.buffers.reports import ReportBoard
from penstock.buffers.results import ObjectMessage, ObjectPipe
from penstock.errors import ConfigError, SamplerBrokenError, SamplerClosedError
from penstock.workers import cleanup, sigint
from penstock.workers.control import Command
from penstock.workers.failures import WorkerFailure, WorkerStatus, add_killed, make_error
from penstock.workers.forks import abandon_in_forks
from penstock.workers.gates import Gate
from penstock.workers.guardian import Guardian
from penstock.workers.handle import WorkerHandle, open_pidfd
from penstock.workers.launch import Launcher, post_programs
from penstock.workers.monitor import Limits, Monitor
from penstock.workers.plan import WorkerPlan
from penstock.workers.program import SharedMemory, WorkerProcessArgs, WorkerProgram
from penstock.workers.progress import Phase
from penstock.workers.restarts import RestartPolicy, Restarts
from penstock.workers.spinning import SPIN_SECONDS
from penstock.workers.stacks import StackFile

_log = logging.getLogger("penstock")

_ASK_SECONDS = 1.5  # for workers to end their step and close their environments
_ASK_BROKEN_SECONDS = 0.3  # the same after a failure, when the user waits for the error
_TERMINATE_SECONDS = 0.3
_KILL_SECONDS = 0.5


@dataclass(frozen=True)
class PoolOptions:
    """How processes are started, how long they may make no progress, and what happens when one fails."""

    start_method: str
    limits: Limits
    restarts: RestartPolicy
    spin_seconds: float = SPIN_SECONDS  #: how long each side spins before it sleeps
    preload: Sequence[str] = ()  #: modules that workers import, for the fork server to import once
    keeps_messages: bool = False  #: whether messages of a dead worker count, though its command is not completed


class WorkerPool:
    """One process per plan, each with its program. Workers run numbered commands, one after another.

    `submit` opens the gates for a command, `wait` waits until all workers have completed it, and `run` does both. Every
    wait is bounded and watches the workers' deaths. The pool owns the workers and everything in `resources`; `close` is
    the one place that closes them.
    """

    def __init__(
        self,
        plans: Sequence[WorkerPlan],
        programs: Sequence[WorkerProgram],
        shares: Sequence[Any],
        memory: SharedMemory,
        options: PoolOptions,
        resources: ExitStack,
    ) -> None:
        """Start one process per plan; `wait` with `starting` follows. `shares[i]` is given to the program of worker i.

        The last plan may be that of an inference server, whose gate every worker then wakes too. `resources` are closed
        after the workers, also if this raises.
        """
        self._memory, self._options, self._resources, self.control = memory, options, resources, memory.control
        self._owner_pid = os.getpid()
        self._close_lock = threading.Lock()
        self._closing_thread: int | None = None
        self._is_closed = False
        self._openings = [0] * len(plans)  # how often each gate is to be open; number one is start-up
        self._command = Command()
        self._interrupted: tuple[str, Callable[[], None]] | None = (
            None  # occasion of a `run`, and what drops its results
        )
        self.handles: list[WorkerHandle] = []
        self.restarts = Restarts(options.restarts)
        with ExitStack() as stack:  # closes everything if there is an exception before the pool can
            stack.push(resources)
            self._reports = ReportBoard(len(plans), shared=True)
            resources.callback(self._reports.memory.close)
            self._monitor = Monitor(self.control, self._reports, options.limits, options.spin_seconds)
            self._mailbox, self._parts = post_programs(programs, shares)
            resources.callback(self._mailbox.close)
            self._launcher = Launcher(options.start_method, len(plans), options.preload)
            stack.pop_all()
        try:
            self._main_process = open_pidfd(os.getpid())
            if self._main_process is not None:
                resources.callback(self._main_process.close)
            self._guardian = Guardian(self._launcher.prepare())
            resources.callback(self._guardian.close)
            abandon_in_forks(self)
            self._start_all(plans)
        except BaseException:
            self.close(broken=True)
            raise

    def _start_all(self, plans: Sequence[WorkerPlan]) -> None:
        spin, server_gate = self._options.spin_seconds, None
        if plans[-1].server_name:
            server_gate = self._owned(Gate(self.control, plans[-1].worker_rank, spin_seconds=spin))
        for plan in plans:
            with sigint.allowed():
                pass  # between two workers, neither of which is half started
            is_server = server_gate is not None and plan is plans[-1]
            gate = server_gate if is_server and server_gate else None
            if gate is None:
                gate = self._owned(Gate(self.control, plan.worker_rank, spin_seconds=spin, server=server_gate))
            self._openings[plan.worker_rank] = 1
            self.control.open(plan.worker_rank)
            self._start(plan, gate, ObjectPipe(), self._owned(StackFile()))
        self._monitor.watch(self.handles, starting=range(len(plans)))

    def _owned(self, resource: Any) -> Any:
        self._resources.callback(resource.close)
        return resource

    def _start(self, plan: WorkerPlan, gate: Gate, pipe: ObjectPipe, stacks: StackFile) -> None:
        """Start a worker, in the place of the one before if there is one."""
        rank = plan.worker_rank
        environ, program, share = self._parts[rank]
        args = WorkerProcessArgs(
            plan=plan,
            mailbox=self._mailbox,
            environ=environ,
            program=program,
            share=share,
            memory=self._memory,
            gate=gate,
            reports=self._reports,
            pipe=pipe,
            stacks=stacks,
            main_process=self._main_process,
            dies_with_starter=self._launcher.dies_with_starter,
            gates=tuple(handle.gate for handle in self.handles) if plan.server_name else (),
        )
        begun, process = self.control.begun(rank), self._launcher.make(args)
        try:
            self._launcher.start(process, plan.name)
            self._guardian.watch(process.pid)
            handle = WorkerHandle(plan, process, process.pid, gate, pipe, stacks, begun)
            self.handles[rank : rank + 1] = [handle]
        except BaseException:  # a second Ctrl-C, for example: no process may exist without a handle
            if process.pid is not None:
                process.kill()
                process.join(_KILL_SECONDS)
            pipe.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids, by worker rank; last that of an inference server, if it is a process."""
        return [handle.pid for handle in self.handles]

    @property
    def is_closing(self) -> bool:
        """Whether `close` has been called."""
        return self._monitor.is_stopped

    def statuses(self) -> list[WorkerStatus]:
        """What every worker is doing now."""
        return [self._monitor.status(handle) for handle in self.handles]

    def take_messages(self, expected: Sequence[int]) -> list[ObjectMessage]:
        """What the workers have put into their pipes: `expected[i]` messages of worker i.

        Raises `TrajectoryCountError` if a worker has sent another number; the pool is closed then.
        """
        try:
            # An inference server, the last worker, sends none.
            pairs = zip(self.handles, expected, strict=False)
            return [message for handle, n in pairs for message in handle.pipe.take(n)]
        except SamplerBrokenError:
            self.close(broken=True)
            raise

    # ---- commands --------------------------------------------------------------------------

    def submit(self, command: Command, ranks: Iterable[int] | None = None) -> None:
        """Open the gates of all workers, or only of `ranks`, for `command`. A worker that runs one runs this next.

        If the wait for an earlier `run` was interrupted, that command is finished first.
        """
        if self._interrupted is not None:
            self.finish_interrupted()
        self._submit(command, ranks)

    def _submit(self, command: Command, ranks: Iterable[int] | None = None) -> None:
        self.control.stop_eval = False
        openings = list(self._openings)
        for rank in range(len(openings)) if ranks is None else ranks:
            openings[rank] += 1
        self._command, self._openings = command, openings  # an exception here leaves no gate open alone: see `wait`
        self._open_gates()

    def _open_gates(self) -> None:
        """Open every gate as often as it is wanted. If an exception comes between two gates, `wait` does the rest."""
        opened, command = self.control.opened, self._command
        for handle, wanted in zip(self.handles, self._openings, strict=True):
            while opened(handle.plan.worker_rank) < wanted:
                handle.gate.open(command)

    def wait(
        self,
        occasion: str,
        *,
        until: Callable[[], bool] | None = None,
        on_wake: Callable[[], None] | None = None,
        poll_interval: float = 1.0,
        interruptible: bool = True,
    ) -> None:
        """Wait until every worker has completed its last command, or `until` returns True.

        Args:
            occasion: what is waited for; errors quote it.
            on_wake: called at every wake-up, and at least every `poll_interval` seconds.
            interruptible: whether Ctrl-C may end the wait; the wait can be repeated.

        Raises `WorkerError`, `WorkerDiedError` or `WorkerTimeoutError` if a worker fails that is not replaced; the pool
        is closed then. Raises `SamplerClosedError` if another thread closes the pool.
        """
        try:
            self._open_gates()
            while failures := self._monitor.wait(until, on_wake, poll_interval, interruptible):
                self._replace_or_raise(failures, occasion)
            if self._monitor.is_stopped:
                raise SamplerClosedError(f"it was shut down by another thread during {occasion}")
        except SamplerBrokenError as error:
            add_killed(error, self._close(broken=True))
            raise
        except KeyboardInterrupt as interrupt:  # the user need not see where exactly the wait was
            raise interrupt.with_traceback(None) from None

    def run(
        self,
        command: Command,
        occasion: str,
        discard: Callable[[], Any],
        *,
        message: bytes | None = None,
        on_wake: Callable[[], None] | None = None,
        poll_interval: float = 1.0,
    ) -> None:
        """Submit `command`, with the message that it has, and wait for it as `wait` does.

        Ctrl-C ends the wait, not the command: the next command waits for its end first and calls `discard`.
        """
        self.finish_interrupted()
        if message is not None:
            self._memory.mailbox.post(message)
        self._interrupted = occasion, discard
        self._submit(command)
        self.wait(occasion, on_wake=on_wake, poll_interval=poll_interval)
        self._interrupted = None

    def finish_interrupted(self) -> None:
        """Finish a `run` whose wait was interrupted, and drop its results. `submit` and `run` begin with this."""
        if self._interrupted is not None:
            occasion, discard = self._interrupted
            self.control.stop_eval = True
            self.wait(f"{occasion} (interrupted)")
            self._interrupted = None
            discard()

    # ---- failures --------------------------------------------------------------------------

    def _replace_or_raise(self, failures: Sequence[WorkerFailure], occasion: str) -> None:
        failed = {failure.rank for failure in failures}
        others = [self._monitor.status(handle) for handle in self.handles if handle.rank not in failed]
        if not self.restarts.may_replace(failures):
            raise make_error(failures, others, occasion, self.restarts.refusal(failures))
        for failure in failures:
            try:
                self._replace(failure, occasion)
            except (ConfigError, OSError) as error:
                raise make_error(failures, others, occasion, f"it could not be replaced: {error}") from error
        self._monitor.watch(self.handles, starting=failed)

    def _replace(self, failure: WorkerFailure, occasion: str) -> None:
        """Start a new worker in the place of a dead one. It runs again what that one has not completed."""
        rank = failure.rank
        old = self.handles[rank]
        n_lost = self._count_lost(old)
        self.restarts.note(failure, occasion, n_lost)
        _log.warning("%s (%s); it is being replaced, %d trajectories are lost", failure, occasion, n_lost)
        pipe = old.pipe.replacement(keep=old.gate.arrived or self._options.keeps_messages)
        self._reports.clear(rank)
        old.stacks.clear()
        self.control.reset_row(rank)
        self._guardian.forget(old.pid)
        self._start(replace(old.plan, generation=self.control.generation(rank)), old.gate, pipe, old.stacks)
        old.release()
        old.pipe.close()

    def _count_lost(self, dead: WorkerHandle) -> int:
        """Trajectories that are lost with a dead worker."""
        control, rank = self.control, dead.rank
        if control.begun(rank) == dead.begun_before:
            return 0  # it died before its first command
        is_running = control.has_begun(rank) and not dead.gate.arrived
        command = control.current_command(rank) if is_running else None
        return self._memory.count_lost(dead.plan, command, control.snapshot(rank).t, control.n_results(rank))

    # ---- closing ---------------------------------------------------------------------------

    def close(self, *, broken: bool = False) -> None:
        """Close everything: tell every worker to exit, wait, terminate, kill; then close the resources.

        Bounded, never raises, and harmless when repeated. A worker that had to be killed, or whose `env.close` raised,
        is named in one warning, unless the pool is `broken`.
        """
        self._close(broken=broken)

    def _close(self, *, broken: bool) -> list[WorkerFailure]:
        """`close`; returns the workers that something else killed, and that no wait has reported yet."""
        me = threading.get_ident()
        if os.getpid() != self._owner_pid or self._closing_thread == me:
            return []  # a fork of the main process owns nothing; a signal handler must not wait for itself
        with self._close_lock, sigint.deferred():
            if self._is_closed:
                return []
            self._closing_thread = me
            try:
                killed = self._end_workers(broken)
                self._resources.close()
                self._is_closed = True
            finally:
                self._closing_thread = None
        return killed

    def _end_workers(self, broken: bool) -> list[WorkerFailure]:
        forced = self._make_them_exit(_ASK_BROKEN_SECONDS if broken else _ASK_SECONDS)
        complaints, killed, exitcodes = [], [], set()
        for handle in self.handles:
            is_new = not handle.is_reaped
            exitcode = handle.reap()  # and what its environments have left
            exitcodes.add(exitcode)
            status, report = self._monitor.status(handle), self._reports.read(handle.rank)
            failure = WorkerFailure(status, exitcode, report)
            if handle.rank in forced:
                complaints.append(f"{forced[handle.rank]} did not exit while {status.doing} and was killed")
                continue
            if is_new and exitcode is not None and exitcode < 0:
                killed.append(failure)
            if report is not None or status.progress.phase is Phase.CLOSING:
                complaints.append(str(failure))
        if exitcodes - {0}:
            cleanup.remove_stale(
                {name for handle in self.handles for name in self._reports.cleanup_functions(handle.rank)}
            )
        for handle in self.handles:
            handle.release()
            handle.pipe.close()
        if complaints and not broken:
            warnings.warn("; ".join(complaints), RuntimeWarning, stacklevel=5)
        return killed

    def _make_them_exit(self, patience: float) -> dict[int, WorkerStatus]:
        """Tell all workers to exit, wait, terminate, kill. Returns the status of each worker that had to be forced."""
        self._monitor.is_stopped = self.control.quit = True
        for handle in self.handles:
            handle.gate.open()
        alive = self._monitor.await_deaths(self.handles, patience)
        forced = {handle.rank: self._monitor.status(handle) for handle in alive}
        for sig, seconds in ((signal.SIGTERM, _TERMINATE_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
            for handle in alive:
                handle.signal_group(sig)
            alive = self._monitor.await_deaths(alive, seconds)
        return forced

    def abandon(self) -> None:
        """In a fork of the main process: the workers are not its children."""
        for handle in self.handles:
            multiprocessing.process._children.discard(handle.process)  # type: ignore[attr-defined]
