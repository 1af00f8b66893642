"""The monitor: the main process's one wait, over the arrivals, messages, deaths and deadlines of all workers."""

from __future__ import annotations

import contextlib
import math
import select
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from penstock.buffers.reports import ReportBoard
from penstock.workers import sigint
from penstock.workers.control import ControlBlock
from penstock.workers.failures import WorkerFailure, WorkerStatus
from penstock.workers.handle import WorkerHandle
from penstock.workers.progress import Phase, ProgressSnapshot
from penstock.workers.spinning import spin

_CHECKS_PER_LIMIT = 20
_CHECK_SECONDS = 0.25  # the longest time between two checks, if there is a limit
_CLOSE_LOOK_SECONDS = 0.1  # spinning sees no deaths, so that often it gives way to a poll
_GATHER_SECONDS = 0.001  # after each death, for another with the same cause
_DYING_SECONDS = 0.5  # for a process that is known to be dying


@dataclass(frozen=True)
class Limits:
    """Seconds that a worker may make no progress: in a command (None: no limit), and while it starts."""

    step: float | None
    start: float


class Monitor:
    """Watches one pool's workers. It finds failures; the pool decides what to do about them."""

    def __init__(self, control: ControlBlock, reports: ReportBoard, limits: Limits, spin_seconds: float) -> None:
        self._control, self._reports, self._limits, self._spin_seconds = control, reports, limits, spin_seconds
        self._handles: Sequence[WorkerHandle] = ()
        self._poll = select.poll()
        self._sources: dict[int, tuple[str, int]] = {}  # by descriptor: its kind and its worker
        self._spins = True  # whether the last wait was short, so that spinning pays
        self._looked = -math.inf  # when deaths were last looked for
        # For each worker: its progress when it last changed, and when that was. One record for all waits, since a
        # worker may run, and hang, through several of them.
        self._seen: dict[int, tuple[tuple[ProgressSnapshot, int], float]] = {}
        self._starting: set[int] = set()
        self._set_next_check()
        self.is_stopped = False  #: True ends every wait: the pool is being closed

    def watch(self, handles: Sequence[WorkerHandle], starting: Iterable[int]) -> None:
        """Watch these workers from now on. The ranks in `starting` have just been started."""
        self._handles = handles
        self._poll, self._sources = _poll_of(handles)
        self._starting.update(starting)
        self._set_next_check()

    def wait(
        self,
        until: Callable[[], bool] | None = None,
        on_wake: Callable[[], None] | None = None,
        poll_interval: float = 1.0,
        interruptible: bool = True,
    ) -> list[WorkerFailure]:
        """Wait until every worker has arrived at barrier_out, or `until` returns True.

        `on_wake` is called at each wake-up, and at least every `poll_interval` seconds. Ctrl-C may end an
        `interruptible` wait. Returns the workers that have failed meanwhile; [] if the wait is over, or another thread
        has set `is_stopped`.
        """
        n, began = len(self._handles), time.monotonic()
        pending = self._control.pending(n)
        is_done = until or (lambda: not self._control.pending(n))
        spins = self._spins
        failures: list[WorkerFailure] = []
        while True:
            # Spinning takes CPU from workers: spin if the last wait was short, or for the last worker. `on_wake` may
            # spin itself.
            if on_wake is None and (spins or len(pending) == 1 < n) and self._spin(is_done):
                break
            spins = False
            is_over = not pending or (on_wake is None and until is not None and until())
            dead = self._sleep(0.0 if is_over else min(poll_interval, self._check_seconds), interruptible)
            pending = self._control.pending(n)
            if self.is_stopped:
                break
            if dead:
                failures = self._examine_dead(dead)
            elif time.monotonic() >= self._next_check:
                failures = self._examine_hung(pending)
            if failures:
                break
            if not pending:
                break
            if on_wake is not None:
                on_wake()
            if until is not None and until():
                break
        self._spins = time.monotonic() - began < 2 * self._spin_seconds
        return failures

    def _spin(self, is_done: Callable[[], bool]) -> bool:
        """Spin for a short time; returns whether the wait is over and no closer look is due."""
        is_over = spin(is_done, self._spin_seconds)
        return is_over and time.monotonic() - self._looked < _CLOSE_LOOK_SECONDS and not sigint.is_pending()

    def _sleep(self, seconds: float, interruptible: bool) -> list[int]:
        """Sleep until something happens, at most `seconds`. Reads messages; returns the ranks of dead workers."""
        dead = []
        self._looked = asleep = time.monotonic()
        with sigint.allowed() if interruptible else contextlib.nullcontext():
            ready = self._poll.poll(max(0, round(seconds * 1000)))
        late = time.monotonic() - asleep - seconds
        if late > self._check_seconds:  # this process was suspended, and so perhaps were the workers: forgive them
            self._seen = {rank: (row, since + late) for rank, (row, since) in self._seen.items()}
        for fd, _ in ready:
            kind, rank = self._sources[fd]
            if kind == "gate":
                self._handles[rank].gate.clear()
            elif kind == "pipe":
                self._handles[rank].pipe.drain()
            else:
                dead.append(rank)
        return dead

    def await_deaths(self, handles: Sequence[WorkerHandle], seconds: float) -> list[WorkerHandle]:
        """Wait at most `seconds` for all these workers to exit; returns the rest."""
        deadline = time.monotonic() + seconds
        alive = list(handles)
        while alive and (left := deadline - time.monotonic()) > 0:
            poll, sources = _poll_of(alive, gates=False)
            for fd, _ in poll.poll(round(left * 1000)):
                kind, rank = sources[fd]
                handle = next(handle for handle in alive if handle.rank == rank)
                if kind == "pipe":  # a worker may wait for room in its pipe
                    handle.pipe.drain()
                else:
                    alive.remove(handle)
        return alive

    def status(self, handle: WorkerHandle) -> WorkerStatus:
        """What this worker is doing now."""
        return WorkerStatus(handle.plan, handle.pid, self._control.snapshot(handle.rank))

    # ---- failures --------------------------------------------------------------------------

    def _examine_dead(self, dead: Sequence[int]) -> list[WorkerFailure]:
        """Reap the dead workers, and all that die with them."""
        found = set(dead)
        while rest := [handle for handle in self._handles if handle.rank not in found]:
            patience = _DYING_SECONDS if any(handle.is_dying for handle in rest) else _GATHER_SECONDS
            poll, sources = _poll_of(rest, gates=False, pipes=False)
            died = {sources[fd][1] for fd, _ in poll.poll(round(patience * 1000))}
            if not died:
                break
            found |= died
        failures = []
        for rank in sorted(found):
            handle = self._handles[rank]
            status = self.status(handle)  # before its row is reset
            exitcode = handle.reap()
            failures.append(WorkerFailure(status, exitcode, self._reports.read(rank), handle.stacks.read()))
        return failures

    def _examine_hung(self, pending: Sequence[int]) -> list[WorkerFailure]:
        """Ask workers that make no progress for their stacks, then kill them."""
        failures = []
        for rank, limit in self._overdue(pending):
            handle = self._handles[rank]
            status = self.status(handle)
            stopped = " and is stopped by a signal" if handle.is_stopped else ""
            stack = handle.stacks.ask(handle.pid)
            handle.signal_group(signal.SIGKILL)
            hung = f"made no progress for {limit:g} s{stopped}"
            failures.append(WorkerFailure(status, handle.reap(), None, stack, hung))
        return failures

    # ---- deadlines -------------------------------------------------------------------------

    def _set_next_check(self) -> None:
        """Set when to check the progress rows next. With central inference there are several waits per row."""
        limits = (self._limits.start if self._starting else None, self._limits.step)
        checks = [min(limit / _CHECKS_PER_LIMIT, _CHECK_SECONDS) for limit in limits if limit is not None]
        self._check_seconds = min(checks, default=3600.0)
        self._next_check = time.monotonic() + self._check_seconds

    def _overdue(self, ranks: Sequence[int]) -> list[tuple[int, float]]:
        """Of these workers, those whose progress rows have not changed for longer than their limit, with the limit."""
        now = time.monotonic()
        self._starting = {rank for rank in self._starting if not self._has_started(rank)}
        self._set_next_check()
        overdue = []
        for rank in ranks:
            # A reply of the inference server is progress too: it may have been slow.
            row = self._control.snapshot(rank), self._control.replied(rank)
            limit = self._limits.start if rank in self._starting else self._limits.step
            # A worker that waits for the inference server makes no progress, but does not hang.
            if rank not in self._seen or self._seen[rank][0] != row or self._control.is_requesting(rank):
                self._seen[rank] = row, now
            elif limit is not None and now - self._seen[rank][1] > limit:
                overdue.append((rank, limit))
        return overdue

    def _has_started(self, rank: int) -> bool:
        """Whether a worker that was being started has reached its gate."""
        # The replacement of a worker that had arrived has that one's counts until the gate is opened again.
        is_through = self._control.has_begun(rank) and not self._control.has_arrived(rank)
        return is_through or self._control.snapshot(rank).phase is Phase.WAITING


def _poll_of(
    handles: Sequence[WorkerHandle], *, gates: bool = True, pipes: bool = True
) -> tuple[select.poll, dict[int, tuple[str, int]]]:
    """A poll over the workers' deaths, and if asked their gates and pipes; with kind and rank by descriptor."""
    poll, sources = select.poll(), {}
    for handle in handles:
        watched = [(handle.death.fileno(), "death")]
        if gates:
            watched.append((handle.gate.fileno(), "gate"))
        if pipes:
            watched.append((handle.pipe.reader.fileno(), "pipe"))
        for fd, kind in watched:
            poll.register(fd, select.POLLIN)
            sources[fd] = kind, handle.rank
    return poll, sources
