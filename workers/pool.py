"""The worker pool: it starts, commands, replaces and closes the workers of a sampler or vector environment."""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from penstock.buffers.object_pipe import ObjectMessage, ObjectPipe
from penstock.buffers.reports import ReportBoard
from penstock.errors import ConfigError, PenstockError, SamplerBrokenError, SamplerClosedError, WorkerTimeoutError
from penstock.workers import sigint, tracing
from penstock.workers.affinity import avoid_cpus
from penstock.workers.control import ASKED, DONE, RESTARTED, Command, StopCollecting
from penstock.workers.failures import Restarts, WorkerFailure, WorkerStatus, add_killed, make_error
from penstock.workers.gates import Gate, notify
from penstock.workers.handle import StackFile, WorkerHandle
from penstock.workers.launcher import Launcher, post_programs
from penstock.workers.monitor import POLL_SECONDS, DeathLogger, Monitor
from penstock.workers.plan import PoolOptions, WorkerPlan
from penstock.workers.process import InPlaceWorker, torch_dtype, worker_main
from penstock.workers.program import RequestServer, SharedMemory, WorkerProcessArgs, WorkerProgram
from penstock.workers.spinning import is_crowded

_log = logging.getLogger("penstock")

_Result = TypeVar("_Result")

_MOST_TRACES, _FAILURE_SPANS = 20, 20_000  # of failures, in each pool; in each of them, about: 0.2 s
_EXIT_SECONDS = 1.5  # how long workers may take to end their step; see `close_timeout` for what follows
_CLOSE_SECONDS = 5.0  # how long `close` may wait for one in another thread, beside `close_timeout`
_EXIT_BROKEN_SECONDS = 0.3  # shorter after a failure: the user waits for the error


class Pool(Protocol):
    """What a sampler needs of its workers, wherever they run."""

    restarts: Restarts
    is_closed: bool
    has_lost_command: bool  #: whether an exception has interrupted `submit`, or a wait where it may not end

    @property
    def pids(self) -> Sequence[int]: ...

    def submit(self, command: Command) -> int: ...

    def wait(self, during: str) -> None: ...

    def run(
        self,
        command: Command,
        during: str,
        take: Callable[[], _Result],
        *,
        message: bytes | None = None,
        until: Callable[[], bool] | None = None,
        poll_interval: float = ...,
    ) -> _Result: ...

    def take_messages(self, number: int | None = None) -> list[ObjectMessage]: ...

    def recorded(self) -> Sequence[tracing.Recorded]: ...

    def statuses(self) -> list[WorkerStatus]: ...

    def close(self, *, broken: bool = False, await_call: Callable[[], bool] = ...) -> Any: ...


class WorkerPool:
    """One worker per plan, each with its program. Workers run numbered commands, one after another.

    `submit` opens the gates for a command, `wait` waits until all workers have completed it, and `run` does both. Every
    wait watches the deaths of the workers. The pool owns the workers and everything in `resources`; `close` is the one
    place that closes them.

    The workers are processes. With `in_place`, there is one worker and no process: the thread of the caller runs its
    program, in `submit`. With a `server`, this pool replies to requests while it waits.
    """

    #: Whether a wait with `until` looks at it each time that a worker publishes something. Otherwise the program calls
    #: `Gate.wake_main_if` for what `until` looks at.
    wakes_for_any = True

    def __init__(
        self,
        plans: Sequence[WorkerPlan],
        programs: Sequence[WorkerProgram],
        worker_data: Sequence[Any],
        memory: SharedMemory,
        options: PoolOptions,
        resources: ExitStack,
        *,
        in_place: bool = False,
        server: RequestServer | None = None,
    ) -> None:
        """Start the workers. This does not wait for the processes: call `wait("start-up")` next.

        `worker_data[i]` is the data that only worker i gets (`WorkerContext.data`). If the last plan is that of an
        inference server, every worker also wakes the gate of the server. `close` closes `resources` after the workers.
        If this constructor raises, they are closed too.
        """
        self._memory, self._options, self.control, self._server = memory, options, memory.control, server
        self._plans, self._all_ranks, self._owner_pid = plans, range(len(plans)), os.getpid()
        self._close_lock = threading.RLock()  # a signal handler may call `close` in `close`
        self._closing_thread: int | None = None
        self._have_ended = False  # whether the workers have ended
        self.has_lost_command = False
        self.is_closed = False
        self._n_traced = 0  # failures
        self._n_taken = 0  # the last opening whose messages have been taken
        # A `run` whose results have not been taken: its during, and the function that takes them.
        self._unfinished_run: tuple[str, Callable[[], Any]] | None = None
        self._failure: SamplerBrokenError | SamplerClosedError | None = None  # `wait` raises it
        self.handles: list[WorkerHandle] = []
        self.restarts = Restarts(options.max_restarts, options.restart_window)
        n = 0 if in_place else len(plans)
        self._server_cpus = {cpu for plan in plans for cpu in plan.cpus} if server is not None else set[int]()
        with resources:  # until `close` works, an exception closes everything here
            self._in_place = InPlaceWorker(plans[0], programs[0], memory) if in_place else None
            if n:
                self._launcher = Launcher(options, n)  # first: it says which limits are too low
            self._reports = ReportBoard(max(n, 1), shared=n > 0)
            resources.callback(self._reports.memory.close)
            # Without a server, the pool is part of no cycle: it is freed as soon as it is dropped.
            serve = self._serve if server else None
            self._monitor = Monitor(
                self.control, self._reports, options, server, serve, wakes_for_any=self.wakes_for_any
            )
            self._death_logger = DeathLogger(self._monitor)
            if n:
                self._mailbox, self._parts = post_programs(programs, worker_data)
                resources.callback(self._mailbox.file.close)
            self._resources = resources.pop_all()
        try:
            self.control.open(Command(), self._all_ranks)  # opening number one is start-up
            if n:
                if options.start_method == "fork":
                    self._resources.callback(self._launcher.close)
                self._launcher.prepare()
                self._start_all(plans)
            if self._in_place is not None:
                self._run_in_place(partial(self._in_place.build, worker_data[0]), "start-up")
        except BaseException:
            self.close(broken=True)
            raise

    def _start_all(self, plans: Sequence[WorkerPlan]) -> None:
        self._monitor.yields = yields = is_crowded(len(plans) + 1)
        new_gate = partial(Gate, self.control, spin_seconds=self._options.spin_seconds, yields=yields)
        server_gate = new_gate(plans[-1].worker_rank) if plans[-1].server_name else None
        all_stacks = [StackFile(self.control.memory.new_stacks(plan.worker_rank)) for plan in plans]
        for stacks in all_stacks:
            self._resources.callback(stacks.file.close)
        inodes = [os.fstat(stacks.file.fd).st_ino for stacks in all_stacks]
        self.control.memory.announce(self._options.kind, self._options.batch_T, plans, inodes)
        for plan, stacks in zip(plans, all_stacks, strict=True):
            with sigint.allowed():
                pass  # Ctrl-C may end the start here: no worker is half started now
            self._check_open()
            gate = server_gate if plan.server_name else new_gate(plan.worker_rank, server=server_gate)
            assert gate is not None
            for resource in (gate.go, gate.done):
                self._resources.callback(resource.close)
            self._start(plan, gate, ObjectPipe(), stacks)
        self._watch(range(len(plans)))

    def _check_open(self) -> None:
        if self.control.quit:
            raise SamplerClosedError("shut down by another thread during start-up")

    def _start(self, plan: WorkerPlan, gate: Gate, pipe: ObjectPipe, stacks: StackFile) -> None:
        """Start a worker. It takes the place of an earlier worker of this rank, if there was one."""
        rank = plan.worker_rank
        program, data = self._parts[rank]
        wakers = [handle.gate.go.writer for handle in self.handles] if plan.server_name else None
        args = WorkerProcessArgs(
            plan=plan,
            mailbox=self._mailbox,
            program=program,
            data=data,
            memory=self._memory,
            gate=gate,
            reports=self._reports,
            pipe=pipe,
            stacks=stacks,
            wakers=wakers,
            torch_dtype=torch_dtype(),
        )
        begun_at_start = self.control.begun(rank)
        try:
            # An exception of a signal handler drops the process, and this kills it.
            process = self._launcher.start(plan.name, worker_main, args, check=self._check_open)
            handle = WorkerHandle(plan, process, gate, pipe, stacks, begun_at_start)
            self.handles[rank : rank + 1] = [handle]  # replaces the old handle, or appends the first
        except BaseException:
            pipe.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers by rank, then that of the inference server if it is a process. Without those
        that have ended: the system may give these numbers to other processes."""
        return [] if self._have_ended else [handle.pid for handle in self.handles if not handle.has_ended]

    def statuses(self) -> list[WorkerStatus]:
        """What every worker is doing now."""
        if self._in_place is not None:
            return [self._in_place.status()]
        return [self._monitor.status(handle) for handle in self.handles]

    def take_messages(self, number: int | None = None) -> list[ObjectMessage]:
        """What the workers have put into their pipes for the last command, or for the one of opening `number`. Take
        them in the order of the openings.

        Raises `TrajectoryCountError` if a worker has sent more or fewer messages than it counted; the pool is closed
        then.
        """
        if self._in_place is not None:
            messages = self._in_place.take_messages()
            self._unfinished_run = None
            return messages
        counts, may_leave = self.control.n_results_by_rank(len(self.handles), number), number is not None
        self._n_taken = self.control.opened[0] if number is None else number
        try:
            pairs = zip(self.handles, counts, strict=True)
            messages = [message for handle, n in pairs for message in handle.pipe.take(n, may_leave=may_leave)]
        except SamplerBrokenError:
            self.close(broken=True)
            raise
        except BaseException:  # of a signal handler: some messages have been taken, and others have not
            self.has_lost_command = True
            raise
        self._unfinished_run = None
        return messages

    # ---- commands --------------------------------------------------------------------------

    def submit(
        self, command: Command, ranks: Sequence[int] | None = None, *, run: tuple[str, Callable[[], Any]] | None = None
    ) -> int:
        """Open the gates of all workers, or only of `ranks`, for `command`. A worker that still runs a command runs
        this one afterwards. Returns the number of this opening of the first gate.

        If the wait for an earlier `run` was interrupted, that command is finished first. `run` is for `run` alone.
        """
        if self._unfinished_run is not None:
            self.finish_interrupted()
        self._unfinished_run = run
        try:
            if command.do_eval:
                self.control.stop_eval = False
            if self._server is not None:
                self._server.begin(command, self.control.opened[0] + 1)
            for rank in self.control.open(command, self._all_ranks if ranks is None else ranks):
                if self._in_place is None:  # that worker needs no wake-up
                    notify(self.handles[rank].gate.go.writer.fd)
        except BaseException:  # of a signal handler: it is unknown which workers have the command
            self.has_lost_command = True
            self.close(broken=True)
            raise
        if self._in_place is not None and self._failure is None:
            try:
                self._run_in_place(self._in_place.work, f"{'evaluation, ' if command.do_eval else ''}itr={command.itr}")
            except BaseException:
                self.has_lost_command = self._failure is None  # a signal handler has raised before the work or after it
                raise
        return self.control.opened[0]

    def wait_for(self, number: int, during: str) -> None:
        """Wait until every worker has completed opening `number`, while later ones may be open; otherwise as `wait`.
        Failures come first: even if the opening is completed (0 always is), this looks for them, without a wait."""
        if not self.has_completed(number) or not self._monitor.nothing_pending():
            self._wait_for_workers(during, look_first=True, until=lambda: self.has_completed(number), number=number)
        elif number:
            self.control.note_taken(number, self.recorded)

    def has_completed(self, number: int) -> bool:
        """Whether every worker has completed opening `number`."""
        return self.control.have_completed(number, len(self.handles))

    def wait(self, during: str, until: Callable[[], bool] | None = None, poll_interval: float = POLL_SECONDS) -> None:
        """Wait until every worker has completed its last command, or `until` returns True. That is called whenever
        something happens, and every `poll_interval` seconds. Errors quote `during`. After a Ctrl-C, `wait` may be
        called again.

        Raises `WorkerError`, `WorkerDiedError` or `WorkerTimeoutError` if a worker fails and is not replaced; the pool
        is closed then. Raises `SamplerClosedError` if another thread closes the pool.
        """
        if self._in_place is not None:  # it has run in `submit`
            if self._failure is not None:
                self.close(broken=True)
                raise self._failure
            self.control.note_wait(self.control.n_openings, DONE, self.recorded)
        elif self._server is None:
            self._wait_for_workers(during, until, poll_interval)
        else:
            with sigint.deferred(), avoid_cpus(self._server_cpus):
                self._wait_for_workers(during, until, poll_interval)

    def _wait_for_workers(
        self,
        during: str,
        until: Callable[[], bool] | None = None,
        poll_interval: float = POLL_SECONDS,
        *,
        look_first: bool = False,
        number: int = 0,
    ) -> None:
        number = number or self.control.n_openings
        self.control.note_wait(number, ASKED)
        self._monitor.is_waiting = True
        try:
            if look_first and (failures := self._monitor.look()):
                self._replace_or_raise(failures, during)
            # A request that came before a Ctrl-C still waits, and will not wake this process again.
            if self._server is not None:
                self._serve()
            while failures := self._monitor.wait(until, poll_interval):
                self._replace_or_raise(failures, during)
            if self._monitor.is_closing:
                raise SamplerClosedError(f"shut down by another thread during {during}")
        except BaseException as error:
            self.control.note_wait(number, DONE)
            self._end_wait(error)
            if isinstance(error, KeyboardInterrupt):  # a short traceback: the place in the wait tells the user nothing
                raise error.with_traceback(None) from None
            raise
        finally:
            self._monitor.is_waiting = False
        self.control.note_wait(number, DONE, self.recorded)

    def _end_wait(self, error: BaseException) -> None:
        """`error` has ended a wait."""
        if isinstance(error, SamplerBrokenError):
            if killed := self.close(broken=True):
                add_killed(error, killed)
        elif not (isinstance(error, PenstockError) or sigint.was_allowed(error)):  # of a signal handler
            self.has_lost_command = True

    def run(
        self,
        command: Command,
        during: str,
        take: Callable[[], _Result],
        *,
        message: bytes | None = None,
        until: Callable[[], bool] | None = None,
        poll_interval: float = POLL_SECONDS,
    ) -> _Result:
        """Submit `command`, with its `message` if it has one, and wait until it is completed, as `wait` does. Then call
        `take`, which takes the results, and return what it returns.

        Ctrl-C ends the wait, but not the command. The next `submit` or `run` waits for the end of this command, calls
        `take`, drops the results, and begins.
        """
        self.finish_interrupted()
        if message is not None:
            self._memory.mailbox.post(message)
        self.submit(command, run=(during, take))
        self.wait(during, until, poll_interval)
        found: _Result = self._take_results()
        return found

    def finish_interrupted(self) -> None:
        """Finish a `run` whose wait was interrupted, and drop its results. `submit` and `run` begin with this."""
        if self._unfinished_run is not None:
            self.control.stop_eval = True
            self.wait(f"{self._unfinished_run[0]} (interrupted)")
            self._take_results()

    def _take_results(self) -> Any:
        """The results of the last `run`. If the exception of a signal handler comes before they are taken, the next
        command drops them: otherwise it would get them as its own."""
        assert self._unfinished_run is not None
        found = self._unfinished_run[1]()
        self._unfinished_run = None
        return found

    # ---- requests, and the worker in place --------------------------------------------------

    def _serve(self) -> None:
        assert self._server is not None
        if sigint.is_pending():
            self.control.stop_eval = True  # end a running evaluation early: its results will be dropped
        self._server.serve(self._wake)

    def _wake(self, rank: int) -> None:
        self.handles[rank].gate.wake()

    def _run_in_place(self, work: Callable[[], None], during: str) -> None:
        """Let the worker in place build its program, or run its command. `wait` raises its error."""
        assert self._in_place is not None
        try:
            with sigint.allowed():  # Ctrl-C ends a step of the user's code, which may hang
                work()
        except BaseException as error:
            if isinstance(error, StopCollecting) or self._monitor.is_closing:
                self._failure = SamplerClosedError(f"shut down by another thread during {during}")
            else:
                self._failure = self._in_place.error(error, during, self._options.episode_of)
                self._trace_failure()
            if not isinstance(error, Exception):  # Ctrl-C: the user wants the call to end now
                raise

    # ---- traces ----------------------------------------------------------------------------

    def recorded(self, most_spans: int | None = None) -> list[tracing.Recorded]:
        """What has happened lately, for a trace."""
        about = tracing.describe(self._options.kind, self._options.batch_T, self._plans)
        about["pid"], arrays = self._owner_pid, self.control.memory.arrays  # this process may be a fork
        return [tracing.read(arrays, about, is_over=self._have_ended, most_spans=most_spans)]

    def _trace_failure(self) -> None:
        """Write a short trace of a failure, if it is one of the first `_MOST_TRACES`: the user waits for the error."""
        if self._options.crash_dir is not None and self._n_traced < _MOST_TRACES:
            self._n_traced += 1
            name = f"failure-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{self._n_traced}.trace.json"
            recorded = partial(self.recorded, _FAILURE_SPANS)
            tracing.write_or_warn(os.path.join(self._options.crash_dir, name), recorded, "a worker has failed")

    # ---- failures --------------------------------------------------------------------------

    def _replace_or_raise(self, failures: Sequence[WorkerFailure], during: str) -> None:
        others = [self._monitor.status(handle) for handle in self.handles if not handle.is_reaped]
        self._trace_failure()
        if (refusal := self.restarts.refusal(failures)) is not None:
            raise make_error(failures, others, during, refusal)
        self._death_logger.stop()
        for failure in failures:
            try:
                self._replace(failure, during)
            except (ConfigError, OSError, WorkerTimeoutError) as error:
                raise make_error(
                    failures, others, during, f"{failure.status.plan.name} could not be replaced: {error}"
                ) from error
        self._watch([failure.rank for failure in failures])

    def _watch(self, starting: Iterable[int]) -> None:
        self._monitor.watch(self.handles, starting)
        if self._options.has_death_logger and not self._monitor.is_closing:
            self._death_logger.start(self.handles)

    def _replace(self, failure: WorkerFailure, during: str) -> None:
        """Start a new worker in the place of a dead one. It repeats the command that the dead one has not completed."""
        rank = failure.rank
        old = self.handles[rank]
        n_lost = self._count_lost(old)
        told = failure.describe(during)
        self.restarts.note(rank, told, n_lost, failure.env_rank)
        self.control.note_event(RESTARTED, time.monotonic_ns(), rank)
        _log.warning("%s; it is being replaced%s", told, f", {n_lost} trajectories are lost" if n_lost else "")
        n_kept = None if self._options.keeps_messages else self.control.n_results_since(rank, self._n_taken)
        pipe = old.pipe.replacement(keep=n_kept)
        self._reports.clear(rank)
        old.stacks.clear()
        self.control.reset_row(rank)
        self._start(replace(old.plan, generation=self.control.generation(rank)), old.gate, pipe, old.stacks)
        old.process.close()
        old.pipe.close()

    def _count_lost(self, dead: WorkerHandle) -> int:
        """How many trajectories are lost with this dead worker."""
        control, rank = self.control, dead.rank
        begun = control.begun(rank)
        if begun == dead.begun_at_start:
            return 0  # it died before its first command
        command = control.command(rank, begun) if control.is_running(rank) else None
        return self._memory.count_lost(dead.plan, command, control.snapshot(rank).t, control.n_results(rank, begun))

    # ---- closing ---------------------------------------------------------------------------

    def close(self, *, broken: bool = False, await_call: Callable[[], bool] | None = None) -> list[WorkerFailure]:
        """Close everything: tell every worker to exit, wait, terminate, kill; then close the resources.

        It takes about 2.5 s at most, and longer only while workers close environments (`close_timeout`; not if the pool
        is `broken`). It raises no error. It may be called twice. One warning names the workers
        that had to be killed and those whose `env.close` raised, unless the pool is `broken`. Returns the workers that
        something else has killed, if no wait has reported them.

        Another thread may use the resources in a call. So when the workers have ended, this waits with `await_call`; if
        that returns False, it leaves the resources open. A call that fails closes with `broken`: if another thread is
        closing, it returns at once, because that thread waits for it.
        """
        me = threading.get_ident()
        # A fork of the main process owns nothing. A signal handler that interrupts `close` must not wait for it.
        if os.getpid() != self._owner_pid or self._closing_thread == me:
            return []
        if not self._close_lock.acquire(timeout=0 if broken else _CLOSE_SECONDS + self._options.close_timeout):
            return []
        try:
            with sigint.deferred():
                if self.is_closed:
                    return []
                self._closing_thread = me
                # A call of another thread may replace a worker meanwhile. So end them again, after it has ended.
                complaints, killed = self._end_workers(broken or self._have_ended)
                self._have_ended = True
                if await_call is None or await_call():
                    if await_call is not None:
                        self._end_workers(broken=True)
                    self._release(broken)
                    self.is_closed = True
        finally:
            self._closing_thread = None
            self._close_lock.release()
        if complaints:  # last: where warnings are errors, the rest would stay open
            warnings.warn("; ".join(complaints), RuntimeWarning, stacklevel=4)
        return killed

    def _end_workers(self, broken: bool) -> tuple[list[str], list[WorkerFailure]]:
        """End all workers. Returns what to warn of, because they did not exit well, and what `close` returns."""
        self._death_logger.stop()
        patience = _EXIT_BROKEN_SECONDS if broken else _EXIT_SECONDS
        close_timeout = None if broken else self._options.close_timeout
        complaints, killed = self._monitor.end_workers(self.handles, patience, close_timeout)
        return [] if broken else complaints, killed

    def _release(self, broken: bool) -> None:
        """Close what this process holds, when the workers have ended."""
        if self._in_place is not None:
            self._in_place.close(broken=broken)
        for handle in self.handles:
            handle.process.close()
            handle.pipe.close()
        self._resources.close()
