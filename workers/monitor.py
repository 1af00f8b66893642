"""The monitor: the main process's one wait, over the arrivals, messages, deaths and deadlines of all workers. The
death logger: a thread that looks for deaths while the main process runs the user's own code."""

from __future__ import annotations

import contextlib
import logging
import math
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

from penstock.buffers.ordering import fence, full_fence
from penstock.buffers.reports import ReportBoard
from penstock.workers import sigint
from penstock.workers.control import AWAKE, BEFORE_BATCHES, FOR_ANY, ControlBlock, Phase, ProgressSnapshot
from penstock.workers.failures import WorkerFailure, WorkerStatus
from penstock.workers.gates import WakeUp, clear, notify
from penstock.workers.handle import WorkerHandle
from penstock.workers.plan import PoolOptions
from penstock.workers.program import RequestServer
from penstock.workers.spinning import SpinTime, spin, spin_for_arrivals

_log = logging.getLogger("penstock")

POLL_SECONDS = 1.0  # how often a wait looks again, whatever happens

_WARN_SECONDS = 60.0  # without step_timeout: how long a worker may make no progress before a warning
_CHECKS_PER_LIMIT = 20  # how often progress is checked within one limit
_CHECK_SECONDS = 0.25  # the longest time between two checks, if there is a limit
_GAP_CHECKS = 5  # the longest time between two looks at progress that counts, in times between two checks
_DEATH_CHECK_SECONDS = 0.1  # spinning does not notice deaths: poll at least this often
_GATHER_SECONDS = 0.001  # how long to wait after a death for others that have the same cause
_INTERRUPT_SECONDS = 0.1  # how soon Ctrl-C is noticed while workers close environments
_TERMINATE_SECONDS = 0.3  # how long to wait after SIGTERM
_KILL_SECONDS = 0.5  # how long to wait after SIGKILL
_DYING_SECONDS = 0.5  # how long to wait for a process that is known to be dying
_AGAIN_SECONDS = 0.02  # when to look again at a worker that has died while the main process waits
DEATH_LOGGER_NAME = "penstock death logger"  #: of its thread


class Monitor:
    """Watches one pool's workers. It finds failures; the pool decides what to do about them."""

    def __init__(
        self,
        control: ControlBlock,
        reports: ReportBoard,
        options: PoolOptions,
        server: RequestServer | None = None,
        serve: Callable[[], None] | None = None,
        *,
        wakes_for_any: bool = True,
    ) -> None:
        """`serve` lets the `server` reply to requests. `wakes_for_any`: see `WorkerPool`."""
        self._control, self._reports, self._options = control, reports, options
        self._server, self._serve, self._wakes_for_any = server, serve, wakes_for_any
        self._handles: Sequence[WorkerHandle] = ()
        self._poll = select.poll()
        self._sources: dict[int, tuple[str, WorkerHandle]] = {}  # by descriptor: "death", "gate" or "pipe", and whose
        self._spin_time = SpinTime(options.spin_seconds)
        self.yields = True  #: whether to yield the CPU while spinning; the pool sets it
        self._last_poll = -math.inf  # when deaths were last looked for
        # For each worker: its last progress, and when that began. It is kept between waits: a worker may hang longer
        # than one wait lasts.
        self._seen: dict[int, tuple[tuple[ProgressSnapshot, int], float]] = {}
        self._last_look = time.monotonic()  # when progress was last looked at, by the main process or by the logger
        self._starting: set[int] = set()
        self._warned: dict[int, int] = {}  # by rank: the command (its number) in which a warning has named the worker
        self._set_next_check()
        self.is_closing = False  #: True ends every wait: the pool is being closed
        self.is_waiting = False  #: whether a wait is running, which looks for failures itself

    def watch(self, handles: Sequence[WorkerHandle], starting: Iterable[int]) -> None:
        """Watch these workers from now on. The workers of the ranks `starting` have just been started."""
        self._handles = handles
        self._poll, self._sources = _poll_of(handles, "death", "gate", "pipe")
        self._starting.update(starting)
        self._set_next_check()

    def look(self) -> list[WorkerFailure]:
        """Read messages, and return the workers that have failed, without a wait."""
        return self._watch(FOR_ANY, None, 0.0)

    def wait(self, until: Callable[[], bool] | None = None, poll_interval: float = POLL_SECONDS) -> list[WorkerFailure]:
        """Wait until every worker has arrived at barrier_out, or `until` returns True. Meanwhile the server replies.

        `until` is called at each wake-up, and at least every `poll_interval` seconds. The workers wake this process
        when all of them are idle. They also wake it each time that one publishes something, if the server asks for it;
        without a server, if there is `until` and `wakes_for_any`. Ctrl-C may end the wait. Returns the workers that
        have failed, or [] if the wait is over or `is_closing` was set.
        """
        server = self._server
        wakes_for_any = (until is not None and self._wakes_for_any) if server is None else server.wake_for_any
        began, wake_for = time.monotonic(), FOR_ANY if wakes_for_any else len(self._handles)
        failures: list[WorkerFailure] = []
        has_spun = False
        if server is None:
            seconds = self._spin_time.seconds
            is_over = self.have_all_arrived(seconds) if until is None else spin(until, seconds)
            # Not if deaths or Ctrl-C must be looked for first.
            has_spun = is_over and began - self._last_poll < _DEATH_CHECK_SECONDS and not sigint.is_pending()
        while not has_spun:
            seconds = min(poll_interval, self._check_seconds, math.inf if server is None else server.sleep_seconds)
            failures = self._watch(wake_for, until, seconds)
            if failures or self.is_closing or self.have_all_arrived():
                break
            if self._serve is not None:
                self._serve()
            if until is not None and until():
                break
        fence()
        if self._starting:
            self._set_next_check()  # the limit of the start no longer counts
        if server is None:
            self._spin_time.note(time.monotonic() - began, not has_spun)
        return failures

    def nothing_pending(self) -> bool:
        """Whether a wait would find nothing to do now: no death, no message, no check of progress."""
        return not self.is_closing and not self._poll.poll(0) and time.monotonic() < self._next_check

    def have_all_arrived(self, spin_seconds: float = 0.0) -> bool:
        """Whether every worker has arrived at barrier_out, or arrives within `spin_seconds`."""
        return spin_for_arrivals(*self._control.block, len(self._handles), spin_seconds, self.yields)

    def _watch(self, wake_for: int, until: Callable[[], bool] | None, seconds: float) -> list[WorkerFailure]:
        """Sleep until something happens, at most `seconds`; not at all if the wait is over. Reads messages. Returns the
        workers that have failed."""
        dead, control, server = [], self._control, self._server
        self._last_poll = time.monotonic()
        control.main_asleep[0] = wake_for
        try:
            full_fence()
            is_over = self.have_all_arrived() or (
                server.has_work if server is not None else until is not None and until()
            )
            milliseconds = 0 if is_over else round(seconds * 1000)  # if it is over, look for deaths only
            with sigint.allowed():
                ready = self._poll.poll(milliseconds)
        finally:
            control.main_asleep[0] = AWAKE
        for fd, _ in ready:
            kind, handle = self._sources[fd]
            if kind == "gate":
                clear(fd)
            elif kind == "pipe":
                handle.pipe.drain()
            else:
                dead.append(handle)
        if self.is_closing:
            return []
        if dead:
            return self._examine_dead(dead)
        return self._examine_hung() if time.monotonic() >= self._next_check else []

    def await_deaths(self, handles: Sequence[WorkerHandle], seconds: float) -> list[WorkerHandle]:
        """Wait at most `seconds` for all these workers to exit; returns the rest."""
        deadline = time.monotonic() + seconds
        alive = list(handles)
        while alive and (left := deadline - time.monotonic()) > 0:
            poll, sources = _poll_of(alive, "death", "pipe")
            for fd, _ in poll.poll(round(left * 1000)):
                kind, handle = sources[fd]
                if kind == "pipe":  # a worker may wait for room in its pipe
                    handle.pipe.drain()
                else:
                    alive.remove(handle)
        return alive

    def _await_exits(
        self, handles: Sequence[WorkerHandle], patience: float, close_timeout: float | None
    ) -> list[WorkerHandle]:
        """As `await_deaths`, and longer while workers close environments, if no single one takes `close_timeout`
        seconds. With None, and after Ctrl-C, it is as short as for other workers."""
        own = {} if close_timeout is None else {Phase.CLOSING: close_timeout, Phase.CLOSED: patience}
        ends, alive = time.monotonic() + patience, list(handles)
        while alive:
            limits = {} if sigint.is_pending() else own
            rows = [self._control.snapshot(handle.rank) for handle in alive]
            latest = max([ends, *(row.heartbeat + limits[row.phase] for row in rows if row.phase in limits)])
            if (left := latest - time.monotonic()) <= 0:
                break
            alive = self.await_deaths(alive, min(left, _INTERRUPT_SECONDS))
        return alive

    def end_workers(
        self, handles: Sequence[WorkerHandle], patience: float, close_timeout: float | None
    ) -> tuple[list[str], list[WorkerFailure]]:
        """Ask these workers to exit, wait as `_await_exits` does, terminate, kill, and reap them.

        Returns a text for each worker that did not exit well, and the workers that something else has killed, if no
        wait has reported them.
        """
        self.is_closing = self._control.quit = True
        new, forced = [handle for handle in handles if not handle.is_reaped], dict[int, WorkerStatus]()
        for handle in new:
            notify(handle.gate.go.writer.fd)  # a worker that sleeps sees then that it must quit
        alive = self._await_exits(new, patience, close_timeout)
        limit = " (Ctrl-C)" if sigint.is_pending() else f" (close_timeout={close_timeout:g})" if close_timeout else ""
        for handle in alive:
            forced[handle.rank] = self.status(handle)
        for sig, seconds in ((signal.SIGTERM, _TERMINATE_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
            for handle in alive:
                handle.process.signal(sig)
            alive = self.await_deaths(alive, seconds)
        complaints, killed = list[str](), list[WorkerFailure]()
        for handle in handles:
            exitcode = handle.kill_and_reap()  # this also kills what its environments have left running
            status = self.status(handle)
            failure = WorkerFailure(status, exitcode, self._reports.read(handle.rank))
            if handle.rank in forced:
                why = limit if status.progress.phase is Phase.CLOSING else ""
                complaints.append(f"{forced[handle.rank]} did not exit while {status.doing} and was killed{why}")
                continue
            if handle in new and exitcode is not None and exitcode < 0:
                killed.append(failure)
            if failure.report is not None or status.progress.phase is Phase.CLOSING:
                complaints.append(failure.describe())
        return complaints, killed

    def status(self, handle: WorkerHandle) -> WorkerStatus:
        """What this worker is doing now."""
        return WorkerStatus(handle.plan, handle.pid, self._control.snapshot(handle.rank))

    # ---- failures --------------------------------------------------------------------------

    def _examine_dead(self, dead: Sequence[WorkerHandle]) -> list[WorkerFailure]:
        """Collect the exit codes of the dead workers, and of others that die at the same time."""
        rest = [handle for handle in self._handles if handle not in dead]
        self.await_deaths([handle for handle in rest if handle.is_dying], _DYING_SECONDS)
        alive, failures = self.await_deaths(rest, _GATHER_SECONDS), []
        for handle in self._handles:
            if handle not in alive:
                status, exitcode, report = self.status(handle), handle.kill_and_reap(), self._reports.read(handle.rank)
                episode = None if self._options.episode_of is None else self._options.episode_of(status)
                failures.append(WorkerFailure(status, exitcode, report, handle.stacks.read(), episode=episode))
        return failures

    def _examine_hung(self) -> list[WorkerFailure]:
        """Ask workers that make no progress for their stacks, then kill them."""
        failures = []
        for rank, name, limit in self._overdue(self._control.pending(len(self._handles))):
            handle = self._handles[rank]
            status = self.status(handle)
            stopped = " and is stopped by a signal" if handle.is_stopped else ""
            stack = handle.stacks.ask(handle.pid)
            hung = f"made no progress for {limit:g} s ({name}={limit:g}){stopped}"
            exitcode = handle.kill_and_reap()
            episode = None if self._options.episode_of is None else self._options.episode_of(status)
            failures.append(WorkerFailure(status, exitcode, None, stack, hung, episode))
        return failures

    # ---- deadlines -------------------------------------------------------------------------

    def _set_next_check(self) -> None:
        """Set the time of the next check. It stays valid from wait to wait, since with central inference each wait may
        be shorter than the time between two checks."""
        self._starting = {rank for rank in self._starting if not self._has_started(rank)}
        limits = (self._options.start_timeout if self._starting else None, self._options.step_timeout)
        checks = [min(limit / _CHECKS_PER_LIMIT, _CHECK_SECONDS) for limit in limits if limit is not None]
        self._check_seconds = min([*checks, _WARN_SECONDS / _CHECKS_PER_LIMIT])
        self._next_check = time.monotonic() + self._check_seconds

    def _overdue(self, ranks: Sequence[int]) -> list[tuple[int, str, float]]:
        """Check progress. Returns the workers of `ranks` that made no progress for longer than their limit, each with
        the name of the limit and its seconds."""
        now = self._look_again()
        self._set_next_check()
        overdue = []
        for rank in ranks:
            row = self._control.snapshot(rank)
            is_stepping = row.t == BEFORE_BATCHES and row.phase is not Phase.BUILDING and self._options.step_timeout
            is_starting = rank in self._starting and not is_stepping
            name = "start_timeout" if row.phase is Phase.RENEWING or is_starting else "step_timeout"
            limit = getattr(self._options, name)
            silence = self._silence(rank, now)
            if limit is None:
                self._warn(rank, silence)
            elif silence > limit:
                overdue.append((rank, name, limit))
        return overdue

    def _look_again(self) -> float:
        """The time now. If nothing has looked at progress for long, this process was suspended, and the workers perhaps
        too: then most of that time does not count, wherever it was suspended."""
        last, self._last_look = self._last_look, time.monotonic()
        late = self._last_look - last - _GAP_CHECKS * self._check_seconds
        if late > 0:
            self._seen = {rank: (row, since + late) for rank, (row, since) in list(self._seen.items())}
        return self._last_look

    def _silence(self, rank: int, now: float, *, is_excused: bool = False) -> float:
        """For how many seconds this worker has made no progress; 0 if it `is_excused`."""
        # A reply of the inference server is progress too: it may have been slow.
        row = self._control.snapshot(rank), self._control.replied(rank)
        # A worker that waits for the inference server makes no progress, but does not hang.
        is_excused = is_excused or self._control.is_requesting(rank)
        if is_excused or rank not in self._seen or self._seen[rank][0] != row:
            self._seen[rank] = row, now
        return now - self._seen[rank][1]

    def _warn(self, rank: int, silence: float) -> None:
        """Log, once in each command, that this worker may hang: there is no limit that would end the wait."""
        number = self._control.arrived(rank) + 1
        if silence > _WARN_SECONDS and self._warned.get(rank) != number:
            self._warned[rank] = number
            status = self.status(self._handles[rank])
            _log.warning(
                "%s has made no progress for %.0f s while %s. If it hangs, nothing ends this: set step_timeout "
                "(seconds) to get an error with its stack",
                status,
                silence,
                status.doing,
            )

    def note_progress(self) -> None:
        """The death logger, every `_check_seconds`: note which workers make progress, so that the next wait knows since
        when one hangs."""
        now, control = self._look_again(), self._control
        for handle in self._handles:
            # It waits for a command, or until a wait of the main process reads its pipe. A wait that runs does read it.
            is_sending = control.snapshot(handle.rank).phase is Phase.SENDING and not self.is_waiting
            is_excused = is_sending or control.has_arrived(handle.rank)
            silence = self._silence(handle.rank, now, is_excused=is_excused)
            is_starting = handle.rank in self._starting and not self._has_started(handle.rank)
            if self._options.step_timeout is None and not (is_starting or self.is_waiting):
                self._warn(handle.rank, silence)

    def _has_started(self, rank: int) -> bool:
        """Whether a worker that was being started has reached its gate."""
        # A replacement begins with the counts of the worker before it. If that one had arrived, only the phase shows
        # that the replacement has started.
        return self._control.is_running(rank) or self._control.snapshot(rank).phase is Phase.WAITING


def _poll_of(handles: Sequence[WorkerHandle], *kinds: str) -> tuple[select.poll, dict[int, tuple[str, WorkerHandle]]]:
    """A poll of these workers' descriptors of `kinds`: "death", "gate", "pipe". By descriptor: its kind and worker."""
    poll, sources = select.poll(), {}
    for handle in handles:
        fds = {"death": handle.death_fd, "gate": handle.gate.done.reader.fd, "pipe": handle.pipe.reader.fd}
        for kind in kinds:
            poll.register(fds[kind], select.POLLIN)
            sources[fds[kind]] = kind, handle
    return poll, sources


# ---- while no wait runs --------------------------------------------------------------------


class DeathLogger:
    """Logs deaths of workers, notes their progress, and warns if one makes none. It changes nothing else: the next wait
    of the main process finds the same, and raises the error.

    Stop it before the descriptors of workers are closed, which it polls.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._handles: Sequence[WorkerHandle] = ()
        self._wake: WakeUp | None = None
        self._thread: threading.Thread | None = None
        self._must_end = False

    def start(self, handles: Sequence[WorkerHandle]) -> None:
        """Main process: watch these workers from now on."""
        self.stop()
        self._must_end, wake = False, WakeUp()
        self._handles, self._wake = handles, wake
        self._thread = threading.Thread(target=self._run, args=(handles, wake), name=DEATH_LOGGER_NAME, daemon=True)
        self._thread.start()
        _running.add(self)

    def stop(self) -> None:
        """Main process: end the thread. It may be called twice."""
        thread, wake = self._thread, self._wake
        if thread is None or wake is None:
            return
        self._must_end = True
        notify(wake.writer.fd)
        if thread is not threading.current_thread():  # the garbage collector may run a finalizer in any thread
            thread.join()
        self._thread = self._wake = None
        _running.discard(self)
        wake.close()

    def _run(self, handles: Sequence[WorkerHandle], wake: WakeUp) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread handles signals
        monitor, poll = self._monitor, select.poll()
        poll.register(wake.reader.fd, select.POLLIN)
        watched = {handle.death_fd: handle for handle in handles}
        for fd in watched:
            poll.register(fd, select.POLLIN)
        while True:
            found = poll.poll(max(1, round(monitor._check_seconds * 1000)))
            if self._must_end:
                return
            dead = [fd for fd, _ in found if fd in watched]
            if dead and monitor.is_waiting:  # most likely, the running wait will report it
                time.sleep(_AGAIN_SECONDS)
                continue
            for fd in dead:
                poll.unregister(fd)
                self._report(watched.pop(fd))
            monitor.note_progress()

    def _report(self, handle: WorkerHandle) -> None:
        if not (self._monitor.is_closing or handle.is_reaped):
            status = self._monitor.status(handle)
            _log.warning("%s has ended while %s: the next call on the sampler will report it", status, status.doing)


_running: weakref.WeakSet[DeathLogger] = weakref.WeakSet()


@contextlib.contextmanager
def death_loggers_stopped() -> Iterator[None]:
    """No logger of this process runs inside this block: for a fork, which is not safe beside threads."""
    # In a fork of the process that started it, a logger has no thread.
    stopped = [logger for logger in _running if logger._thread is not None and logger._thread.is_alive()]
    for logger in stopped:
        logger.stop()
    try:
        yield
    finally:
        for logger in stopped:
            logger.start(logger._handles)
