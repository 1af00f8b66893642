"""The control block: the words that the main process and the workers share.

Every word has one writer. Loads and stores of aligned 8-byte words are atomic, so reading one needs no lock.
Order of writes: first the data, then the word that announces it. Each worker has a row of words about its progress,
which it alone writes.

The rings keep what happened, for `tracing.py`: a later entry overwrites the oldest.
"""

from __future__ import annotations

import enum
import itertools
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from penstock.buffers.named import NamedArrays
from penstock.buffers.ordering import HAS_FULL_FENCE, fence, full_fence
from penstock.buffers.shared import ArraySpec
from penstock.errors import SamplerStateError
from penstock.workers.about import RunMemory


class Phase(enum.IntEnum):
    """What a worker is doing."""

    STARTING = 0
    BUILDING = 1
    RESETTING = 2
    DECORRELATING = 3
    WAITING = 4
    ACTING = 5
    STEPPING = 6
    SENDING = 7
    CLOSING = 8
    CLOSED = 9
    BEGINNING = 10
    CALLING = 11
    REQUESTING = 12
    SERVING = 13
    RENEWING = 14
    UNREADABLE = 15

    @classmethod
    def _missing_(cls, value: object) -> Phase:
        return cls.UNREADABLE  # a crash of C code may write anything


# Plain integers for the loop over time: storing an enum's member takes 50 ns more.
_IS_ACTING, _IS_STEPPING, _IS_REQUESTING, _IS_RESETTING = (
    int(phase) for phase in (Phase.ACTING, Phase.STEPPING, Phase.REQUESTING, Phase.RESETTING)
)


class StopCollecting(Exception):
    """Raised inside a collector when the sampler shuts down in the middle of a batch."""


# The words of a row.
PHASE, T, ENV_RANK, HEARTBEAT, BEGUN, ARRIVED, BATCHES = range(7)
STEPPING, ACTING, RESETTING, WAITING, STEPS, REQUESTED, VERSION, ASLEEP = range(7, 15)
BETWEEN_BATCHES = -2  # the word T while no batch runs. -1: the command has not begun its first time step
BEFORE_BATCHES = -3  # the word T from the first random step before the first batch on
RING = 8  # commands that may be open at once
ROW_WORDS = 16  # 128 bytes: two workers never write to the same pair of cache lines
KIND_BITS = 2  # number and kind of a request are in one word, so that one store publishes both
URGENT = 2  # the kind of requests that are answered at once

# Words that the inference server writes for each worker. REPLIED: the number of the last request that has its reply.
# BEGAN_WITH: the version of the parameters at the first time step of the worker's batch.
REPLIED, BEGAN_WITH = range(2)

# Words that the main process writes for all workers. It has its own ASLEEP.
QUIT, STOP_EVAL, MAIN_ASLEEP = range(3)

# In a worker's row of `n_results`, behind the counts of the commands.
LATE = RING  # how many rewards have come for agents that did not act
RENEWALS, CUTS = RING + 1, RING + 2  # how often an environment was built again, and how many episodes it has cut
# The parts of RESETTING: at the start, in evaluations and calls, between batches, and within them.
FIRST, APART, BETWEEN, WITHIN = range(RING + 3, RING + 7)
PID = RING + 7  # of the process that runs the worker

# The rings: how many entries each has. Entry k of `records` and `openings` is at k % N_KEPT.
N_KEPT, N_RESETS, N_EVENTS, N_NAMES = 512, 256, 1024, 64
# A record is a copy of the worker's row at barrier_out, except for these two words: when the worker came to barrier_in,
# and when it saw the opening.
CAME, SAW = PHASE, T
# The words of an opening. ASKED, DONE: when the main process began and ended its wait for it; while it waits, DONE
# is older. TOGETHER: each worker counts this opening by the same number.
NUMBER, ITR, KIND, NEWEST, OPENED, ASKED, DONE, TOGETHER = range(8)
PUBLISHED, MARKED, RESTARTED = 1, 2, 3  # the kinds of events; 0: none
_ROW_BYTES = 1 << 16  # of each worker's stamps
LONG_RESET_NS = 100_000  # a shorter reset is not kept
_MANY_ROWS = 16  # from here on, numpy adds faster than Python

# The word ENV_RANK has, above these bits, which policy acts: its index + 1, or 0 where there is only one.
WHO_BITS = 32

# What must wake a process, as its word ASLEEP says. AWAKE: nothing, it does not sleep. FOR_ANY: whatever is published
# for it. n above 0: that the first n workers are all idle, or that one of them has an urgent request.
AWAKE, FOR_ANY = 0, -1


@dataclass(frozen=True)
class ProgressSnapshot:
    """One worker's progress row. `heartbeat` is in seconds of `time.monotonic`. The other times are totals in seconds
    since the sampler was initialized; `steps` counts environment steps."""

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
    who: int = 0  #: which policy acts: see WHO_BITS
    late_rewards: int = 0  #: how many rewards have come for agents that did not act
    renewals: int = 0  #: how often an environment was built again after its game had failed
    cut_episodes: int = 0  #: how many episodes have ended with it
    first_resets: float = 0.0  #: the seconds of resets at the start
    resets_between: float = 0.0  #: the same between batches
    resets_within: float = 0.0  #: the same in batches; `stepping` leaves them out


class Progress:
    """The row that one worker writes: its phase, its heartbeat, its results, and how long things took.

    A collector's inner loop writes `words[Progress.ENV_RANK]` once per environment step: a memoryview item costs 30 ns
    where a numpy one costs 50.
    """

    PHASE, ENV_RANK, HEARTBEAT, RESETTING = PHASE, ENV_RANK, HEARTBEAT, RESETTING
    IS_STEPPING, IS_RESETTING = _IS_STEPPING, _IS_RESETTING

    def __init__(self, control: ControlBlock, worker_rank: int) -> None:
        self._control, self.rank = control, worker_rank
        self._main = memoryview(control.memory.arrays.words)
        self.words = memoryview(control.memory.arrays.progress[worker_rank])
        #: From the phase to the env_rank: `step_ordinary` writes them.
        self.loop_words = self.words[PHASE : ENV_RANK + 1]
        self._replied = memoryview(control.memory.arrays.replied[worker_rank])
        # The stamps of the last openings, and the part for this one.
        self._timeline = control.memory.arrays.timeline[worker_rank]
        self._row, (self._n_rows, self._row_words) = 0, self._timeline.shape
        self._all_stamps: Any = memoryview(self._timeline.reshape(-1))
        self._stamps: Any = self._all_stamps[: self._row_words]
        # The time acting is the sum of all stamps times these signs.
        self._signs = np.resize([-1, 1], self._row_words)
        self._signs[-1] = 0
        self._records: Any = memoryview(control.memory.arrays.records[worker_rank].reshape(-1))
        self._copied = self.words[SAW + 1 :]  # into each record
        self._resets = control.memory.arrays.resets[worker_rank]
        self._next_reset = int(self._resets[:, -1].argmin())  # the oldest: this worker may replace another
        # How many results each command has sent, by the number of its opening: the main process may read the count of
        # one command while the worker runs the next.
        self._n_results = memoryview(control.memory.arrays.n_results[worker_rank])
        self._n_results[PID] = os.getpid()
        self._resetting, self._part = self.words[RESETTING], FIRST  # what has been counted, and where the rest belongs

    def _count_resets(self, part: int) -> int:
        """The resets since the last call belong to this part. Returns their nanoseconds."""
        passed, self._resetting = self.words[RESETTING] - self._resetting, self.words[RESETTING]
        self._n_results[part] += passed
        return passed

    def enter(self, phase: Phase) -> int:
        """Note a change of phase and a heartbeat; returns `time.monotonic_ns()`."""
        now = time.monotonic_ns()  # one clock for all processes, on macOS too
        self.words[PHASE] = phase
        self.words[HEARTBEAT] = now
        return now

    def announce(self, seconds: float) -> None:
        """What runs now may take this long: the heartbeat is in the future."""
        self.words[HEARTBEAT] = time.monotonic_ns() + int(seconds * 1e9)

    def at_env(self, env_rank: int) -> None:
        """Note which environment is in use."""
        self.words[ENV_RANK] = env_rank

    def begin_acting(self, t: int) -> None:
        """Row t of a batch begins. Raises `StopCollecting` once the sampler shuts down."""
        words = self.words
        words[PHASE], words[T] = _IS_ACTING, t
        self._stamps[2 * t] = words[HEARTBEAT] = time.monotonic_ns()
        if self._main[QUIT]:
            raise StopCollecting

    def begin_stepping(self, t: int) -> None:
        """The agent has acted on row t of a batch; the environments step next."""
        words = self.words
        words[PHASE] = _IS_STEPPING
        self._stamps[2 * t + 1] = words[HEARTBEAT] = time.monotonic_ns()

    def begin_random_step(self, env_rank: int) -> None:
        """A random step of this environment comes next, before the first batch."""
        self.words[ENV_RANK], self.words[T] = env_rank, BEFORE_BATCHES
        self.enter(Phase.DECORRELATING)

    def begin_row(self, t: int) -> int:
        """As `begin_acting`, outside a batch: it has no stamps. Returns `time.monotonic_ns()`."""
        self.words[T] = t
        now = self.enter(Phase.ACTING)
        if self._main[QUIT]:
            raise StopCollecting
        return now

    def leave_batch(self) -> None:
        """Note that no batch runs: errors then say "between two batches"."""
        self.words[T] = BETWEEN_BATCHES

    def end_batch(self, n_rows: int, n_steps: int, ended_ns: int) -> None:
        """A training batch of `n_rows` rows and `n_steps` environment steps is complete: add to the totals. Its last
        row ended at `ended_ns`. Resets are no part of the time of stepping."""
        words, stamps, end = self.words, self._stamps, 2 * n_rows
        if end + 1 == self._row_words:
            stamps[end] = ended_ns
        else:
            self._timeline[self._row, end:] = ended_ns
        if n_rows >= _MANY_ROWS:
            acting = int(self._signs.dot(self._timeline[self._row]))
        else:
            acting = sum(stamps[1:end:2]) - sum(stamps[:end:2])
        words[ACTING] += acting
        words[STEPPING] += ended_ns - stamps[0] - acting - self._count_resets(WITHIN)
        words[BATCHES] += 1
        words[STEPS] += n_steps

    def add_resetting_since(self, began_ns: int) -> None:
        """Add time spent in `env.reset`."""
        took = time.monotonic_ns() - began_ns
        self.words[RESETTING] += took
        if took >= LONG_RESET_NS:
            self.note_long_reset(began_ns, took)

    def note_long_reset(self, began_ns: int, took_ns: int) -> None:
        """Keep, for traces, a reset of the environment in use."""
        env_rank, t = self.words[ENV_RANK] & (1 << WHO_BITS) - 1, self.words[T]
        self._resets[self._next_reset] = env_rank, t, began_ns, began_ns + took_ns
        self._next_reset = (self._next_reset + 1) % N_RESETS

    def begin_record(self, came_ns: int, saw_ns: int) -> None:
        """The worker came to barrier_in, and has seen the opening. The time between is that of waiting."""
        words, records = self.words, self._records
        words[WAITING] += saw_ns - came_ns
        at = (words[ARRIVED] + 1) % N_KEPT * ROW_WORDS
        records[at], records[at + 1] = came_ns, saw_ns

    # ---- gates -----------------------------------------------------------------------------

    @property
    def arrived(self) -> int:
        """How many gate openings this worker has completed."""
        return self.words[ARRIVED]

    @arrived.setter
    def arrived(self, value: int) -> None:
        if self.words[RESETTING] != self._resetting:
            self._count_resets(self._part)
        self._part = BETWEEN
        at = value % N_KEPT * ROW_WORDS
        self._records[at + SAW + 1 : at + ROW_WORDS] = self._copied
        fence()
        self.words[ARRIVED] = value

    @property
    def command(self) -> Command:
        """The command to run next: that of the first opening that is not completed."""
        return self._control.command(self.rank, self.arrived + 1)

    def begin(self) -> None:
        """A command begins: results are counted from here."""
        words = self.words
        if words[RESETTING] != self._resetting:
            self._count_resets(self._part)
        self._part = APART
        number = words[ARRIVED] + 1
        self._n_results[number % RING] = 0
        words[PHASE] = Phase.BEGINNING
        words[T] = -1  # no time step yet: the batch still holds the one before
        words[BEGUN] = number
        self._row = row = number % self._n_rows
        at = row * self._row_words
        self._stamps = self._all_stamps[at : at + self._row_words]

    @property
    def n_results(self) -> int:
        """How many results this worker has sent for this command."""
        return self._n_results[(self.words[ARRIVED] + 1) % RING]

    @n_results.setter
    def n_results(self, value: int) -> None:
        self._n_results[(self.words[ARRIVED] + 1) % RING] = value

    def add_late_rewards(self, n: int) -> None:
        """Count rewards for agents that did not act."""
        self._n_results[LATE] += n

    def count_renewal(self, *, is_cut: bool) -> None:
        """An environment is built again after its game has failed; `is_cut`: and its episode has ended with it."""
        self._n_results[RENEWALS] += 1
        self._n_results[CUTS] += is_cut

    @property
    def stop_eval(self) -> bool:
        """Whether the main process ends the running evaluation."""
        return bool(self._main[STOP_EVAL])

    # ---- requests --------------------------------------------------------------------------

    def request(self, kind: int) -> None:
        """Publish a request to the inference server; the row of the step buffer is complete."""
        words = self.words
        words[PHASE] = _IS_REQUESTING
        fence()
        words[REQUESTED] = ((words[REQUESTED] >> KIND_BITS) + 1) << KIND_BITS | kind  # last: it announces the row

    @property
    def n_requests(self) -> int:
        """The number of the last request."""
        return self.words[REQUESTED] >> KIND_BITS

    @property
    def has_reply(self) -> bool:
        """Whether the last request has its reply. Raises `StopCollecting` once the sampler shuts down."""
        if self._replied[REPLIED] == self.words[REQUESTED] >> KIND_BITS:
            return True
        if self._main[QUIT]:
            raise StopCollecting
        return False

    def note_version(self, version: int) -> None:
        """Note the version of the parameters in use. The one who acts notes it: worker or inference server."""
        fence()  # the parameters have been read
        self.words[VERSION] = version


class UntimedProgress(Progress):
    """For rows that do not belong to the stamps and the totals of training: an evaluation, or a second policy."""

    def begin_acting(self, t: int) -> None:
        self.begin_row(t)

    def begin_stepping(self, t: int) -> None:
        self.enter(Phase.STEPPING)


_KIND = (1 << KIND_BITS) - 1
_WORDS = struct.Struct("5q")  # a command
_OPENING, _ENTRY = struct.Struct("8q"), struct.Struct("4q")
_COMMAND_BYTES = 64  # of each command: a cache line


class Command(NamedTuple):
    """What a worker does between barrier_in and barrier_out. The default: collect a batch; in a vector environment, do
    the steps that were requested."""

    itr: int = 0  #: the caller's iteration count
    do_eval: bool = False  #: evaluate the agent instead
    has_message: bool = False  #: do what the message in the mailbox says
    version: int = 0  #: act with this version of the parameters; 0: with the newest
    batch: int = 0  #: the number of the batch, which says into which slot of the samples buffer it goes

    @property
    def is_batch(self) -> bool:
        """Whether a sampler's worker collects a batch."""
        return not (self.do_eval or self.has_message)


class ControlBlock:
    """Flags, commands and gate counts for `n_workers` workers, one progress row each, and the rings.

    The main process writes `quit`, `stop_eval`, the commands, `opened`, `generation`, and the rings `openings`,
    `events` and `names`. Each worker writes its progress row, its row of `n_results`, and its rings `timeline`,
    `records` and `resets`. `replied`, with REPLIED and BEGAN_WITH for each worker, and the ring `served` belong to the
    inference server, in whichever process that runs. All times are in nanoseconds of `time.monotonic_ns`.
    """

    def __init__(self, n_workers: int, most_rows: int, *, shared: bool) -> None:
        int64, stamps = np.dtype(np.int64), 2 * most_rows + 1
        n_rows = max(2, min(N_KEPT, _ROW_BYTES // (8 * stamps)))
        specs = NamedArrays(
            words=ArraySpec((ROW_WORDS,), int64),
            commands=ArraySpec((n_workers, RING, _COMMAND_BYTES // 8), int64),
            n_results=ArraySpec((n_workers, ROW_WORDS), int64),
            opened=ArraySpec((n_workers,), int64),
            generation=ArraySpec((n_workers,), int64),
            replied=ArraySpec((n_workers, ROW_WORDS), int64),
            progress=ArraySpec((n_workers, ROW_WORDS), int64),
            # By opening: in row t, the worker began to act at [2 t] and to step at [2 t + 1]; then the end.
            timeline=ArraySpec((n_workers, n_rows, stamps), int64),
            records=ArraySpec((n_workers, N_KEPT, ROW_WORDS), int64),
            openings=ArraySpec((N_KEPT, 8), int64),
            resets=ArraySpec((n_workers, N_RESETS, 4), int64),  # env_rank, t, begin, end
            served=ArraySpec((N_EVENTS, 4), int64),  # begin, end, environments, version
            events=ArraySpec((N_EVENTS, 4), int64),  # kind, begin, end; the version, index in `names` or worker
            names=ArraySpec((N_NAMES,), np.dtype("S32")),  # of marks
        )
        self.memory = RunMemory(specs, shared=shared, purpose="the control block")
        self.memory.arrays.progress[:, T] = -1  # no time step yet
        self._bind()

    def _bind(self) -> None:
        """Make memoryviews of the arrays: reading an item takes a third of the time of numpy, and gives an int."""
        arrays = self.memory.arrays
        self._words = memoryview(arrays.words)
        #: How often the main process has opened each worker's gate.
        self.opened = memoryview(arrays.opened)
        self._generation = memoryview(arrays.generation)
        self._commands = memoryview(arrays.commands).cast("B")
        # Typed as Any: the annotations of memoryview know one dimension only.
        self._replied: Any = memoryview(arrays.replied)
        self._rows: Any = memoryview(arrays.progress)
        #: The first arguments of the functions in spinning.py.
        self.block: tuple[Any, Any, Any] = self._rows, self.opened, self._replied
        self.quit_word, self.main_asleep = self._words[QUIT : QUIT + 1], self._words[MAIN_ASLEEP : MAIN_ASLEEP + 1]
        self._n_results: Any = memoryview(arrays.n_results)
        self._openings, self._served = memoryview(arrays.openings).cast("B"), memoryview(arrays.served).cast("B")
        self._opening_words: Any = self._openings.cast("q")
        self._events = memoryview(arrays.events).cast("B")
        #: Called after each wait that ended well; see `tracing.SlowBatches`.
        self.watcher: Callable[[int, ControlBlock, Callable[[], Any]], None] | None = None
        #: How often gates were opened; how many workers there are; whether each opening was for all of them.
        self.n_openings, self._n_ranks, self._is_together = 0, 0, True
        self._n_served, self._n_events = itertools.count(), itertools.count()  # several threads may note events
        self._marks, self._n_marks = dict[bytes, int](), itertools.count()

    def __getstate__(self) -> RunMemory:
        return self.memory

    def __setstate__(self, memory: RunMemory) -> None:
        self.memory = memory
        self._bind()

    # ---- flags -----------------------------------------------------------------------------

    @property
    def quit(self) -> bool:
        """True tells the workers to close their environments and exit."""
        return bool(self._words[QUIT])

    @quit.setter
    def quit(self, value: bool) -> None:
        self._words[QUIT] = value

    @property
    def stop_eval(self) -> bool:
        """True ends the running evaluation at its next step."""
        return bool(self._words[STOP_EVAL])

    @stop_eval.setter
    def stop_eval(self, value: bool) -> None:
        self._words[STOP_EVAL] = value

    # ---- gates and commands ----------------------------------------------------------------

    def open(self, command: Command, ranks: Sequence[int]) -> list[int]:
        """Main process: publish one more command for each of these workers, and count the opening of its gate. Returns
        which of them sleep and must be woken."""
        opened, rows, asleep, now = self.opened, self._rows, [], time.monotonic_ns()
        for rank in ranks:
            number = opened[rank] + 1
            # The same command may be written over itself.
            if number - rows[rank, ARRIVED] > RING and self.command(rank, number) != command:
                raise SamplerStateError(f"worker {rank} has {RING} commands open: wait for it before the next")
            _WORDS.pack_into(self._commands, (rank * RING + number % RING) * _COMMAND_BYTES, *command)
            fence()
            opened[rank] = number  # last: it announces the command
        self.note_opening(command, now, len(ranks))
        full_fence()
        for rank in ranks:
            if rows[rank, ASLEEP] != AWAKE or not HAS_FULL_FENCE:
                asleep.append(rank)
        return asleep

    def note_opening(self, command: Command, now: int, n_ranks: int) -> None:
        """Main process: at time `now`, it has opened the gates of `n_ranks` workers for `command`."""
        self.n_openings = opening = self.n_openings + 1
        if n_ranks != self._n_ranks:  # the first opening is for all
            self._n_ranks, self._is_together = n_ranks, opening == 1
        itr, do_eval, has_message, version, _ = command
        kind, at = do_eval + 2 * has_message, opening % N_KEPT * _OPENING.size
        _OPENING.pack_into(self._openings, at, opening, itr, kind, version, now, now, 0, self._is_together)

    def note_wait(self, opening: int, word: int, recorded: Callable[[], Any] | None = None) -> None:
        """Main process: it begins (ASKED) or has ended (DONE) its wait for this opening; without an error, if it has
        `recorded` to show."""
        self._opening_words[opening % N_KEPT * 8 + word] = time.monotonic_ns()
        if recorded is not None and self.watcher is not None:
            self.watcher(opening, self, recorded)

    def note_taken(self, opening: int, recorded: Callable[[], Any]) -> None:
        """Main process: it asks for this opening, which is complete."""
        if not self._opening_words[opening % N_KEPT * 8 + DONE]:  # for the first time
            self.note_wait(opening, ASKED)
            self.note_wait(opening, DONE, recorded)

    def note_served(self, began_ns: int, ended_ns: int, n_envs: int, version: int) -> None:
        """Inference server: it has acted for `n_envs` environments, or computed values if this is 0."""
        _ENTRY.pack_into(
            self._served, next(self._n_served) % N_EVENTS * _ENTRY.size, began_ns, ended_ns, n_envs, version
        )

    def note_event(self, kind: int, began_ns: int, value: int) -> None:
        """Main process: something has ended now; `value` is the version, the index of the mark's name, or the
        worker."""
        at = next(self._n_events) % N_EVENTS * _ENTRY.size
        _ENTRY.pack_into(self._events, at, kind, began_ns, time.monotonic_ns(), value)

    def note_mark(self, name: str, began_ns: int) -> None:
        """Main process: the mark of this name ends. The last of the names stands for all that find no place."""
        text, last = name.encode()[:32].decode(errors="ignore").encode(), N_NAMES - 1
        if (index := self._marks.get(text, -1)) < 0:
            index = min(next(self._n_marks), last)  # not the length of the dict: two threads would get one number
            self.memory.arrays.names[index] = text if index < last else b"other marks"
            if index < last:
                self._marks[text] = index
        self.note_event(MARKED, began_ns, index)

    def command(self, worker_rank: int, number: int) -> Command:
        """The command of opening `number` of this worker's gate."""
        at = (worker_rank * RING + number % RING) * _COMMAND_BYTES
        itr, do_eval, has_message, version, batch = _WORDS.unpack_from(self._commands, at)
        return Command(itr, bool(do_eval), bool(has_message), version, batch)

    def has_arrived(self, worker_rank: int) -> bool:
        """Whether this worker has completed the last opening of its gate."""
        return self._rows[worker_rank, ARRIVED] == self.opened[worker_rank]  # type: ignore[no-any-return]

    def arrived(self, worker_rank: int) -> int:
        """How many openings of its gate this worker has completed."""
        return self._rows[worker_rank, ARRIVED]  # type: ignore[no-any-return]

    def have_completed(self, number: int, n_workers: int) -> bool:
        """Whether each of the first `n_workers` workers has completed opening `number` of its gate."""
        rows = self._rows
        for rank in range(n_workers):
            if rows[rank, ARRIVED] < number:
                return False
        fence()
        return True

    def pending(self, n_workers: int) -> list[int]:
        """Which of the first `n_workers` workers have not arrived yet."""
        rows, opened = self._rows, self.opened
        pending = []
        for rank in range(n_workers):
            if rows[rank, ARRIVED] != opened[rank]:
                pending.append(rank)
        return pending

    def is_asleep(self, worker_rank: int) -> bool:
        """Whether this worker, or the inference server, sleeps and must be woken. What it waits for is published."""
        full_fence()
        return self._rows[worker_rank, ASLEEP] != AWAKE  # type: ignore[no-any-return]

    def begun(self, worker_rank: int) -> int:
        """The last gate opening that this worker has seen; 0 before its first command."""
        return self._rows[worker_rank, BEGUN]  # type: ignore[no-any-return]

    def is_running(self, worker_rank: int) -> bool:
        """Whether this worker has begun a command and has not completed it."""
        return self._rows[worker_rank, BEGUN] > self._rows[worker_rank, ARRIVED]  # type: ignore[no-any-return]

    def n_results(self, worker_rank: int, number: int) -> int:
        """How many results this worker has sent for opening `number` of its gate, one of the last eight."""
        rows = self._rows
        # Until the worker has begun the command, the count is that of an earlier one.
        has_begun = rows[worker_rank, BEGUN] >= number or rows[worker_rank, ARRIVED] >= number
        return self._n_results[worker_rank, number % RING] if has_begun else 0

    def n_results_since(self, worker_rank: int, number: int) -> int:
        """How many results this worker has sent for completed commands after opening `number`."""
        arrived = self.arrived(worker_rank)
        return sum(self.n_results(worker_rank, n) for n in range(max(number, arrived - RING) + 1, arrived + 1))

    def n_results_by_rank(self, n_workers: int, number: int | None = None) -> list[int]:
        """How many results each of the first `n_workers` workers has sent for opening `number`, or for the last."""
        opened, rows, results, counts = self.opened, self._rows, self._n_results, []
        for rank in range(n_workers):  # as `n_results`, without a call for each
            opening = opened[rank] if number is None else number
            has_begun = rows[rank, ARRIVED] >= opening or rows[rank, BEGUN] >= opening
            counts.append(results[rank, opening % RING] if has_begun else 0)
        return counts

    # ---- requests to the inference server --------------------------------------------------

    def last_request(self, worker_rank: int) -> tuple[int, int]:
        """Number and kind of this worker's last request; kind 0 if it has its reply."""
        word: int = self._rows[worker_rank, REQUESTED]
        number = word >> KIND_BITS
        return number, 0 if number == self._replied[worker_rank, REPLIED] else word & _KIND

    def is_requesting(self, worker_rank: int) -> bool:
        """Whether this worker waits for a reply."""
        return self.last_request(worker_rank)[1] != 0

    def replied(self, worker_rank: int) -> int:
        """The number of the last request of this worker that has its reply."""
        return self._replied[worker_rank, REPLIED]  # type: ignore[no-any-return]

    def reply(self, worker_ranks: Sequence[int], numbers: Sequence[int]) -> list[int]:
        """Inference server: request `numbers[rank]` of each of these workers has its reply. Returns which of them
        sleep. A replacement ignores replies to the worker before it, since its own requests have later numbers."""
        rows, replied = self._rows, self._replied
        fence()
        for rank in worker_ranks:
            replied[rank, REPLIED] = numbers[rank]
        full_fence()
        return [rank for rank in worker_ranks if rows[rank, ASLEEP]]

    def note_began_with(self, worker_rank: int, version: int) -> None:
        """Inference server: the batch of this worker begins with this version of the parameters."""
        self._replied[worker_rank, BEGAN_WITH] = version

    def began_with(self, worker_rank: int) -> int:
        """The version of the parameters with which the batch of this worker began; later steps may have newer ones."""
        return self._replied[worker_rank, BEGAN_WITH]  # type: ignore[no-any-return]

    def version(self, worker_rank: int) -> int:
        """The version of the parameters with which this worker or inference server acts, or last acted. The server has
        the last rank, which is also rank -1."""
        return self._rows[worker_rank, VERSION]  # type: ignore[no-any-return]

    # ---- progress rows ---------------------------------------------------------------------

    def generation(self, worker_rank: int) -> int:
        """How many workers with this rank have failed and been replaced; more, if a saved run continues."""
        return self._generation[worker_rank]

    def raise_generation(self, generation: int) -> None:
        """Count the generations of all workers from here: a worker that is started from now on has a later one."""
        for worker_rank in range(len(self._generation)):
            self._generation[worker_rank] = generation

    @property
    def n_replaced(self) -> int:
        """The sum of the generations: it changes when a worker is replaced."""
        return sum(self._generation)

    def progress(self, worker_rank: int) -> Progress:
        """The writing end of one worker's row; only that worker may use it."""
        return Progress(self, worker_rank)

    def reset_row(self, worker_rank: int) -> None:
        """Hand a dead worker's row to its replacement; no process writes it now.

        Commands that the dead worker completed stay completed, and their results stay counted. Totals continue. An
        open request is dropped.
        """
        row = self.memory.arrays.progress[worker_rank]
        row[T], row[ENV_RANK] = -1, 0
        if row[ARRIVED] != self.opened[worker_rank]:
            row[BEGUN] = 0
            self._n_results[worker_rank, (row[ARRIVED] + 1) % RING] = 0
        row[VERSION] = 0
        row[REQUESTED] &= ~_KIND
        row[PHASE], row[HEARTBEAT] = Phase.STARTING, time.monotonic_ns()
        # Last: a server that sees a request of the new worker sees the new generation too.
        fence()
        self._generation[worker_rank] += 1

    def snapshot(self, worker_rank: int) -> ProgressSnapshot:
        """A readable copy of one progress row."""
        row = self.memory.arrays.progress[worker_rank].tolist()
        stepping, acting, resetting, waiting = np.multiply(row[STEPPING:STEPS], 1e-9).tolist()  # they follow each other
        env_rank, who = row[ENV_RANK] & (1 << WHO_BITS) - 1, row[ENV_RANK] >> WHO_BITS
        words = row[T], env_rank, row[HEARTBEAT] * 1e-9, row[BATCHES], row[STEPS]
        counts: Any = [self._n_results[worker_rank, word] for word in (LATE, RENEWALS, CUTS)]
        counts += [self._n_results[worker_rank, word] * 1e-9 for word in (FIRST, BETWEEN, WITHIN)]
        return ProgressSnapshot(Phase(row[PHASE]), *words, stepping, acting, resetting, waiting, who, *counts)
