"""Supervision: the main process's one wait, over arrivals, messages, deaths and deadlines of all workers."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.buffers.reports import ReportBoard
from penstock.errors import ConfigError, SamplerClosedError
from penstock.workers.control import ControlBlock, Phase, ProgressSnapshot
from penstock.workers.failures import WorkerFailure, failure
from penstock.workers.handle import WorkerHandle
from penstock.workers.interrupts import interrupts
from penstock.workers.restarts import Restarts
from penstock.workers.spinning import spin
from penstock.workers.team import Wait
from penstock.workers.watch import Watch

__all__ = ["Limits", "Supervisor"]

_LOOKS_PER_LIMIT = 20
_LOOK_SECONDS = 0.25  # and at least so often, if there is a limit
_LOOK_AROUND_SECONDS = 0.1  # for deaths that nobody waits to hear of, though all goes well
_GATHER_SECONDS = 0.001  # after each death, for another that comes of the same cause
_DYING_SECONDS = 0.5  # for one that is known to be dying


@dataclass(frozen=True)
class Limits:
    """Seconds that a worker may go without progress: in a batch (None: for ever), and while it starts."""

    step: float | None
    start: float


class Staff(Protocol):
    """The workers that are supervised."""

    members: list[WorkerHandle]
    closed: bool

    def replace(self, casualty: WorkerFailure, occasion: str) -> None:
        """Put a new worker in the place of one that is dead."""


class Supervisor:
    """Waits until all workers have arrived; finds the dead and the hung, and has them replaced or raises."""

    def __init__(
        self, control: ControlBlock, reports: ReportBoard, restarts: Restarts, limits: Limits, spin_seconds: float
    ) -> None:
        self._control, self._reports, self._restarts, self._limits = control, reports, restarts, limits
        self._spin_seconds = spin_seconds
        self._is_soon = True  # whether the last wait was a short one, and looking out pays
        # One for all waits: a worker may be at work, and hang, through many of them.
        self._stopwatch = _Stopwatch(limits, control)
        self._looked = -math.inf  # when it was last looked for deaths
        self._watch: Watch | None = None  # made anew when the members are no longer those of before

    def wait_out(self, staff: Staff, wait: Wait) -> None:
        """Wait until every worker of `staff` stands at barrier_out, or `wait.until` says that it has been enough.

        Raises `WorkerError`, `WorkerDiedError` or `WorkerTimeoutError` as soon as a worker fails that
        must not be replaced.
        """
        began = time.monotonic()
        # Who looks out in vain keeps a worker from its work: where they are long at it, only the last is looked for.
        if not (self._is_soon and self._look_out(staff, wait)):
            self._sleep_out(staff, wait)
        self._is_soon = time.monotonic() - began < 2 * self._spin_seconds

    def _look_out(self, staff: Staff, wait: Wait) -> bool:
        """Wait awake, for a short time; returns whether that was enough, and all is well as far as it shows."""
        if wait.on_wake is not None:
            return False  # which has its own way of looking out
        has_come = wait.until or (lambda: not _pending(staff))
        return spin(has_come, self._spin_seconds) and self._may_go_on(staff)

    def _sleep_out(self, staff: Staff, wait: Wait) -> None:
        stopwatch = self._stopwatch
        if wait.starting:
            stopwatch.start(member.rank for member in staff.members)
        while True:
            if len(_pending(staff)) == 1 < len(staff.members) and self._look_out(staff, wait):
                return
            is_enough = not _pending(staff) or (wait.on_wake is None and wait.until is not None and wait.until())
            seconds = 0.0 if is_enough else min(wait.look_again, stopwatch.look_again)
            self._looked = time.monotonic()
            dead = self._watch_of(staff).wait(seconds, interruptible=wait.interruptible)
            if staff.closed:  # by another thread; the deaths are of its making
                raise SamplerClosedError(f"it was shut down by another thread during {wait.occasion}")
            pending = _pending(staff)
            casualties = self._examine_dead(staff, dead) if dead else self._examine_hung(stopwatch.overdue(pending))
            if casualties:
                self._replace_or_raise(staff, casualties, wait.occasion)
                stopwatch.start(casualty.rank for casualty in casualties)
                continue
            if not pending:
                return
            if wait.on_wake is not None:
                wait.on_wake()
            if wait.until is not None and wait.until():
                return

    def _may_go_on(self, staff: Staff) -> bool:
        """Whether all is well as far as it shows, and it has not been long since it was looked at closely."""
        looked_lately = time.monotonic() - self._looked < _LOOK_AROUND_SECONDS
        return looked_lately and not staff.closed and not interrupts.has_come

    def _watch_of(self, staff: Staff) -> Watch:
        if self._watch is None:
            members = staff.members
            self._watch = Watch([m.gate for m in members], [m.pipe for m in members], [m.death for m in members])
        return self._watch

    # ---- what has happened -----------------------------------------------------------------

    def _examine_dead(self, staff: Staff, dead: Sequence[int]) -> list[WorkerFailure]:
        """Bury those that have died, and all that die with them."""
        members, found = staff.members, set(dead)
        while rest := [i for i in range(len(members)) if i not in found]:
            patience = _DYING_SECONDS if any(members[i].is_dying for i in rest) else _GATHER_SECONDS
            died = Watch([], [], [members[i].death for i in rest]).wait(patience)
            if not died:
                break
            found |= {rest[i] for i in died}
        casualties = []
        for i in sorted(found):
            member = members[i]
            witness = member.witness(self._control)  # before its row is touched
            exitcode = member.bury()
            report = self._reports.read(member.rank)
            casualties.append(WorkerFailure(witness, exitcode, report, member.stacks.read()))
        return casualties

    def _examine_hung(self, overdue: Sequence[tuple[WorkerHandle, float]]) -> list[WorkerFailure]:
        """Ask those that make no progress where they are, then end them."""
        casualties = []
        for member, limit in overdue:
            witness = member.witness(self._control)
            stopped = " and is stopped by a signal" if member.is_stopped else ""
            stack = member.stacks.ask(member.pid)
            member.signal_group(signal.SIGKILL)
            hung = f"made no progress for {limit:g} s{stopped}"
            casualties.append(WorkerFailure(witness, member.bury(), None, stack, hung))
        return casualties

    def _replace_or_raise(self, staff: Staff, casualties: Sequence[WorkerFailure], occasion: str) -> None:
        refusal = self._restarts.refusal(casualties)
        gone = {casualty.rank for casualty in casualties}
        others = [member.witness(self._control) for member in staff.members if member.rank not in gone]
        if refusal is not None:
            raise failure(casualties, others, occasion, refusal)
        self._watch = None  # first: descriptors that are closed may soon be others'
        for casualty in casualties:
            try:
                staff.replace(casualty, occasion)
            except (ConfigError, OSError) as error:
                raise failure(casualties, others, occasion, f"it could not be replaced: {error}") from error


def _pending(staff: Staff) -> list[WorkerHandle]:
    return [member for member in staff.members if not member.gate.arrived]


class _Stopwatch:
    """Tells which workers' progress rows have not changed for longer than their limit."""

    def __init__(self, limits: Limits, control: ControlBlock) -> None:
        self._limits, self._control = limits, control
        self._seen: dict[int, tuple[tuple[ProgressSnapshot, int], float]] = {}
        self._starting: set[int] = set()
        self._next_look = time.monotonic() + self.look_again

    def start(self, ranks: Iterable[int]) -> None:
        """These workers are being started, and are given the time for it."""
        self._starting.update(ranks)
        self._next_look = min(self._next_look, time.monotonic() + self.look_again)

    @property
    def look_again(self) -> float:
        """Seconds after which to look at the rows again."""
        limits = [self._limits.start if self._starting else None, self._limits.step]
        looks = [min(seconds / _LOOKS_PER_LIMIT, _LOOK_SECONDS) for seconds in limits if seconds is not None]
        return min(looks, default=3600.0)

    def overdue(self, members: Sequence[WorkerHandle]) -> list[tuple[WorkerHandle, float]]:
        """The members that are overdue, each with its limit. Looks no oftener than it has to: where actions are
        computed in between, this is called several times a row."""
        now = time.monotonic()
        if now < self._next_look:
            return []
        self._starting = {rank for rank in self._starting if not self._has_started(rank)}
        self._next_look = now + self.look_again
        overdue = []
        for member in members:
            rank = member.rank
            # An answer of the inference server counts too: it may have been long in coming.
            row = self._control.snapshot(rank), self._control.answered(rank)
            limit = self._limits.start if rank in self._starting else self._limits.step
            # One that waits for the inference server makes no progress, and that is not its fault.
            if rank not in self._seen or self._seen[rank][0] != row or self._control.question(rank):
                self._seen[rank] = row, now
            elif limit is not None and now - self._seen[rank][1] > limit:
                overdue.append((member, limit))
        return overdue

    def _has_started(self, rank: int) -> bool:
        """Whether a worker that was being started has come to its gate, or through it."""
        control = self._control
        # One in the place of one that had arrived has that one's counts until the gate is opened again.
        is_through = control.has_begun(rank) and not control.has_arrived(rank)
        return is_through or control.snapshot(rank).phase is Phase.WAITING
