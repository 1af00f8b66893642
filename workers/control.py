"""The shared words: what the main process tells the workers, and each worker's progress row.

Every word has one writer. Plain loads and stores of aligned 8-byte words are atomic on the platforms
that Python runs on, so nobody ever needs a lock to read one.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from penstock.buffers.named import NamedArrays
from penstock.buffers.native import mark
from penstock.buffers.shared import ArraySpec, NamedMemory

__all__ = ["ControlBlock", "Phase", "Progress", "ProgressSnapshot", "StopCollecting"]


class Phase(enum.IntEnum):
    """What a worker is doing."""

    STARTING = 0
    BUILDING = 1
    RESETTING = 2
    DECORRELATING = 3
    WAITING = 4
    ACTING = 5
    STEPPING = 6
    HANDING_OVER = 7
    CLOSING = 8
    CLOSED = 9
    BEGINNING = 10
    CALLING = 11
    ASKING = 12
    SERVING = 13


# Plain integers for the loop over time: an enum's member takes 50 ns more to store.
_IS_ACTING, _IS_STEPPING, _IS_ASKING, _IS_RESETTING = (
    int(phase) for phase in (Phase.ACTING, Phase.STEPPING, Phase.ASKING, Phase.RESETTING)
)


class StopCollecting(Exception):
    """Raised inside a collector when the sampler is shutting down in the middle of a batch."""


# Words written by the main process, for all workers ...
_QUIT, _DO_EVAL, _STOP_EVAL, _ITR, _DO_CALL = range(5)
# ... and by each worker, in a row of its own. buffers/_native.h knows what is written by compiled functions.
_PHASE, _T, _ENV_RANK, _HEARTBEAT, _BEGUN, _ARRIVED, _TRAJECTORIES, _BATCHES = range(8)
_STEPPING, _ACTING, _RESETTING, _WAITING, _STEPS, _ASKED, _VERSION = range(8, 15)
_KIND_BITS = 2  # of a question; number and kind are one word, so that one store makes both visible
_KIND = (1 << _KIND_BITS) - 1
_ROW = 16  # 128 bytes: no two workers write to one cache line, nor to one pair that is fetched together


class ControlBlock:
    """`quit`, `do_eval`, `stop_eval`, `itr`, three counts per worker, `opened`, `generation` and `answered`, the
    progress rows, and the time stamps of the last batch. Written by the main process, except for the rows, and for
    `answered`, which is the inference server's, wherever that runs. It has a row of its own, behind the workers'."""

    def __init__(self, n_workers: int, batch_T: int, *, shared: bool) -> None:
        int64 = np.dtype(np.int64)
        specs = NamedArrays(
            words=ArraySpec((_ROW,), int64),
            opened=ArraySpec((n_workers,), int64),
            generation=ArraySpec((n_workers,), int64),
            answered=ArraySpec((n_workers, _ROW), int64),
            progress=ArraySpec((n_workers, _ROW), int64),
            timeline=ArraySpec((n_workers, 2 * batch_T + 1), np.dtype(np.float64)),
        )
        self.memory = NamedMemory(specs, shared=shared, purpose="the control block")
        self.memory.arrays.progress[:, _T] = -1  # no row has been begun
        self._bind()

    def _bind(self) -> None:
        """Items of memoryviews are Python integers, and cost a third of numpy's."""
        arrays = self.memory.arrays
        self._words, self._opened = memoryview(arrays.words), memoryview(arrays.opened)
        self._generation = memoryview(arrays.generation)
        # Typed as Any: memoryview's annotations know of one dimension only.
        self._answered: Any = memoryview(arrays.answered)
        self._rows: Any = memoryview(arrays.progress)

    def __getstate__(self) -> NamedMemory:
        return self.memory

    def __setstate__(self, memory: NamedMemory) -> None:
        self.memory = memory
        self._bind()

    @property
    def quit(self) -> bool:
        """True tells the workers to close their environments and end."""
        return bool(self._words[_QUIT])

    @quit.setter
    def quit(self, value: bool) -> None:
        self._words[_QUIT] = value

    @property
    def do_eval(self) -> bool:
        """True while the gates open for an evaluation, False for a training batch."""
        return bool(self._words[_DO_EVAL])

    @do_eval.setter
    def do_eval(self, value: bool) -> None:
        self._words[_DO_EVAL] = value

    @property
    def do_call(self) -> bool:
        """True while the gates open for a call on the environments, which lies in the mailbox."""
        return bool(self._words[_DO_CALL])

    @do_call.setter
    def do_call(self, value: bool) -> None:
        self._words[_DO_CALL] = value

    @property
    def stop_eval(self) -> bool:
        """True ends the running evaluation at the next step: enough trajectories have finished."""
        return bool(self._words[_STOP_EVAL])

    @stop_eval.setter
    def stop_eval(self, value: bool) -> None:
        self._words[_STOP_EVAL] = value

    @property
    def itr(self) -> int:
        """The caller's iteration count, of the batch that is running or was last run."""
        return int(self._words[_ITR])

    @itr.setter
    def itr(self, value: int) -> None:
        self._words[_ITR] = value

    def opened(self, worker_rank: int) -> int:
        """How often the main process has opened this worker's gate."""
        return self._opened[worker_rank]

    def open(self, worker_rank: int) -> None:
        """Count one more opening of this worker's gate."""
        self._opened[worker_rank] += 1

    def question(self, worker_rank: int) -> int:
        """What this worker has asked the inference server and not been answered; 0 for nothing."""
        return self.last_question(worker_rank)[1]

    def last_question(self, worker_rank: int) -> tuple[int, int]:
        """The number of the last question of this worker, and what it asked; 0 if that has been answered."""
        word: int = self._rows[worker_rank, _ASKED]
        number = word >> _KIND_BITS
        return number, 0 if number == self._answered[worker_rank, 0] else word & _KIND

    def answered(self, worker_rank: int) -> int:
        """How many questions of this worker have been answered."""
        answered: int = self._answered[worker_rank, 0]
        return answered

    def answer(self, worker_rank: int, asked: int) -> None:
        """Inference server: question number `asked` of this worker is answered. Not a later one, which a replacement
        may have asked meanwhile."""
        self._answered[worker_rank, 0] = asked

    def generation(self, worker_rank: int) -> int:
        """How many workers had this rank before and failed."""
        return self._generation[worker_rank]

    def version(self, server_rank: int) -> int:
        """The version of the parameters with which the inference server acts, or last acted."""
        version: int = self._rows[server_rank, _VERSION]
        return version

    def progress(self, worker_rank: int) -> Progress:
        """The writing end of one worker's row; only that worker may use it."""
        return Progress(self, worker_rank)

    def arrived(self, worker_rank: int) -> int:
        """How many gate openings this worker has answered."""
        arrived: int = self._rows[worker_rank, _ARRIVED]
        return arrived

    def has_arrived(self, worker_rank: int) -> bool:
        """Whether this worker has answered the last opening of its gate: it stands at barrier_out."""
        arrived: bool = self._rows[worker_rank, _ARRIVED] == self._opened[worker_rank]
        return arrived

    def trajectories(self, worker_rank: int) -> int:
        """How many trajectories this worker has finished since its gate was last opened."""
        # Until the worker has taken notice of the opening, the count is that of the batch before.
        return int(self._rows[worker_rank, _TRAJECTORIES]) if self.has_begun(worker_rank) else 0

    def begun(self, worker_rank: int) -> int:
        """The last gate opening that this worker has taken notice of; 0 before its first batch."""
        begun: int = self._rows[worker_rank, _BEGUN]
        return begun

    def has_begun(self, worker_rank: int) -> bool:
        """Whether this worker has taken notice of the last opening of its gate."""
        return self.begun(worker_rank) == self.opened(worker_rank)

    def reset_row(self, worker_rank: int) -> None:
        """Make a dead worker's row its replacement's. What it had answered stays answered and promised;
        totals go on, and what it had asked is dropped. (The row's one writer is dead, the next is not yet born.)"""
        row = self.memory.arrays.progress[worker_rank]
        row[_T], row[_ENV_RANK] = -1, 0
        if row[_ARRIVED] != self.opened(worker_rank):
            row[[_BEGUN, _TRAJECTORIES]] = 0
        row[_ASKED] &= ~_KIND
        row[_PHASE], row[_HEARTBEAT] = Phase.STARTING, time.monotonic_ns()
        # Last: who sees a question of the new worker sees this too.
        self._generation[worker_rank] += 1

    def snapshot(self, worker_rank: int) -> ProgressSnapshot:
        """A readable copy of one progress row."""
        row = self.memory.arrays.progress[worker_rank].tolist()
        seconds = [row[word] * 1e-9 for word in (_STEPPING, _ACTING, _RESETTING, _WAITING)]
        return ProgressSnapshot(
            Phase(row[_PHASE]), row[_T], row[_ENV_RANK], row[_HEARTBEAT] * 1e-9, row[_BATCHES], row[_STEPS], *seconds
        )

    def timeline(self, worker_rank: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """Time stamps of the worker's last batch, `[2 T + 1]` seconds of `time.monotonic`: row t began
        acting at `[2 t]` and stepping at `[2 t + 1]`; the last entry is the end."""
        stamps: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = self.memory.arrays.timeline[worker_rank]
        return stamps


@dataclass(frozen=True)
class ProgressSnapshot:
    """One worker's progress row. `heartbeat` is `time.monotonic` seconds; the other times are totals
    in seconds since the sampler was initialized; `steps` counts environment steps."""

    phase: Phase
    t: int
    env_rank: int
    heartbeat: float
    batches: int
    steps: int
    stepping: float
    acting: float
    resetting: float
    waiting: float


class Progress:
    """The row that one worker writes: where it is, that it lives, and where its time went.

    `words[Progress.ENV_RANK] = rank` is what a collector's inner loop writes, once per environment
    step; a `memoryview` item costs 30 ns where a numpy one costs 50.
    """

    PHASE, ENV_RANK, HEARTBEAT, RESETTING = _PHASE, _ENV_RANK, _HEARTBEAT, _RESETTING
    IS_STEPPING, IS_RESETTING = _IS_STEPPING, _IS_RESETTING

    def __init__(self, control: ControlBlock, worker_rank: int) -> None:
        self._control = control
        self._main = memoryview(control.memory.arrays.words)
        self.words = memoryview(control.memory.arrays.progress[worker_rank])
        self._answered = memoryview(control.memory.arrays.answered[worker_rank])
        # The same two as arrays, for what is compiled.
        self._row, self._stamp_array = control.memory.arrays.progress[worker_rank], control.timeline(worker_rank)
        # Typed as Any: memoryview's annotations know of integer items only.
        self._stamps: Any = memoryview(cast(Any, control.timeline(worker_rank)))

    def enter(self, phase: Phase) -> int:
        """Note a change of phase, and a sign of life; returns `time.monotonic_ns()`."""
        now = time.monotonic_ns()
        self.words[_PHASE] = phase
        self.words[_HEARTBEAT] = now
        return now

    def at_env(self, env_rank: int) -> None:
        """Note which environment is being worked on."""
        self.words[_ENV_RANK] = env_rank

    def begin_acting(self, t: int) -> None:
        """Row t of a batch begins. Raises `StopCollecting` once the sampler is shutting down."""
        if not mark(self._row, self._stamp_array, 2 * t, _IS_ACTING, t, time.monotonic()):
            self._stamps[2 * t] = self.begin_row(t)
        elif self._main[_QUIT]:
            raise StopCollecting

    def begin_stepping(self, t: int) -> None:
        """The agent has acted on row t of a batch; the environments are about to step."""
        now = time.monotonic()
        if not mark(self._row, self._stamp_array, 2 * t + 1, _IS_STEPPING, t, now):
            self.words[_PHASE] = _IS_STEPPING
            self._stamps[2 * t + 1] = now

    def begin_row(self, t: int) -> float:
        """As `begin_acting`, outside a batch: nothing is stamped. Returns `time.monotonic()`."""
        now = time.monotonic()
        words = self.words
        words[_PHASE] = _IS_ACTING
        words[_T] = t
        words[_HEARTBEAT] = int(now * 1e9)
        if self._main[_QUIT]:
            raise StopCollecting
        return now

    def end_batch(self, batch_T: int, n_steps: int) -> None:
        """A training batch of `batch_T` rows and `n_steps` environment steps is complete: add to the totals."""
        self._stamps[2 * batch_T] = time.monotonic()
        stamps = np.asarray(self._stamps)[: 2 * batch_T + 1] - self._stamps[0]  # small numbers, whatever the uptime
        began, acted, stepped = (float(np.add.reduce(part)) for part in (stamps[:-1:2], stamps[1::2], stamps[2::2]))
        self.words[_ACTING] += int((acted - began) * 1e9)
        self.words[_STEPPING] += int((stepped - acted) * 1e9)
        self.words[_BATCHES] += 1
        self.words[_STEPS] += n_steps

    def add_resetting_since(self, began_ns: int) -> None:
        """Add time spent in `env.reset`; within a batch it is part of the stepping time too."""
        self.words[_RESETTING] += time.monotonic_ns() - began_ns

    def add_waiting(self, seconds: float) -> None:
        """Add time spent at barrier_in."""
        self.words[_WAITING] += int(seconds * 1e9)

    def begin(self) -> None:
        """Take notice of the gate's opening: what is counted from here on belongs to it."""
        self.words[_TRAJECTORIES] = 0
        self.words[_PHASE] = Phase.BEGINNING
        self.words[_T] = -1  # no row has been begun: what the batch holds is still the one before
        self.words[_BEGUN] = self.arrived + 1

    def ask(self, question: int) -> None:
        """Ask the inference server; the row of the step buffer has been written."""
        words = self.words
        words[_PHASE] = _IS_ASKING
        words[_ASKED] = ((words[_ASKED] >> _KIND_BITS) + 1) << _KIND_BITS | question  # last: all else is ready

    @property
    def is_answered(self) -> bool:
        """Whether the inference server has answered the last question. Raises `StopCollecting` once the sampler
        is shutting down."""
        if self._answered[0] == self.words[_ASKED] >> _KIND_BITS:
            return True
        if self._main[_QUIT]:
            raise StopCollecting
        return False

    @property
    def version(self) -> int:
        """The version of the parameters that are acted with. For the inference server to set."""
        return self.words[_VERSION]

    @version.setter
    def version(self, value: int) -> None:
        self.words[_VERSION] = value

    @property
    def trajectories(self) -> int:
        """Finished trajectories of this batch: the number that is promised to the main process."""
        return self.words[_TRAJECTORIES]

    @trajectories.setter
    def trajectories(self, value: int) -> None:
        self.words[_TRAJECTORIES] = value

    @property
    def stop_eval(self) -> bool:
        """The main process has seen enough trajectories of the running evaluation."""
        return bool(self._main[_STOP_EVAL])

    @property
    def arrived(self) -> int:
        """The last gate opening that this worker has answered."""
        return self.words[_ARRIVED]

    @arrived.setter
    def arrived(self, value: int) -> None:
        self.words[_ARRIVED] = value
