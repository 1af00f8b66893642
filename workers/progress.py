"""Progress rows: what each worker says of itself, in shared words that it alone writes."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.buffers.ordering import fence

if TYPE_CHECKING:
    from penstock.workers.control import Command, ControlBlock


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


# Plain integers for the loop over time: storing an enum's member takes 50 ns more.
_IS_ACTING, _IS_STEPPING, _IS_REQUESTING, _IS_RESETTING = (
    int(phase) for phase in (Phase.ACTING, Phase.STEPPING, Phase.REQUESTING, Phase.RESETTING)
)


class StopCollecting(Exception):
    """Raised inside a collector when the sampler shuts down in the middle of a batch."""


# The words of a row.
PHASE, T, ENV_RANK, HEARTBEAT, BEGUN, ARRIVED, OFFERED, BATCHES = range(8)
STEPPING, ACTING, RESETTING, WAITING, STEPS, REQUESTED, VERSION, ASLEEP = range(8, 16)
# OFFERED: the opening of the gate for which the step buffer has the first inputs. The other words: see `Progress`.
RING = 8  # commands that may be open at once
ROW_WORDS = 16  # 128 bytes: two workers never write to the same pair of cache lines
KIND_BITS = 2  # number and kind of a request are in one word, so that one store publishes both
URGENT = 2  # the kind of requests that are answered at once

# Words that the inference server writes for each worker. REPLIED: the number of the last request that has its reply.
# ACTED: the last opening of the gate before which the server wrote the actions of the first time step.
REPLIED, ACTED = range(2)

# Words that the main process writes for all workers. It has its own ASLEEP.
QUIT, STOP_EVAL, MAIN_ASLEEP = range(3)

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


class Progress:
    """The row that one worker writes: its phase, its heartbeat, its results, and how long things took.

    A collector's inner loop writes `words[Progress.ENV_RANK]` once per environment step: a memoryview item costs 30 ns
    where a numpy one costs 50.
    """

    PHASE, ENV_RANK, HEARTBEAT, RESETTING = PHASE, ENV_RANK, HEARTBEAT, RESETTING
    IS_STEPPING, IS_RESETTING = _IS_STEPPING, _IS_RESETTING

    def __init__(self, control: ControlBlock, worker_rank: int) -> None:
        self._control, self._rank = control, worker_rank
        self._main = memoryview(control.memory.arrays.words)
        self.words = memoryview(control.memory.arrays.progress[worker_rank])
        #: From the phase to the env_rank: `step_ordinary` writes them.
        self.loop_words = self.words[PHASE : ENV_RANK + 1]
        self._replied = memoryview(control.memory.arrays.replied[worker_rank])
        self._stamps = memoryview(control.memory.arrays.timeline[worker_rank])
        # How many results each command has sent, by the number of its opening: the main process may read the count of
        # one command while the worker runs the next.
        self._n_results = memoryview(control.memory.arrays.n_results[worker_rank])

    def enter(self, phase: Phase) -> int:
        """Note a change of phase and a heartbeat; returns `time.monotonic_ns()`."""
        now = time.monotonic_ns()
        self.words[PHASE] = phase
        self.words[HEARTBEAT] = now
        return now

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

    def begin_row(self, t: int) -> None:
        """As `begin_acting`, outside a batch: the timeline stays as it is."""
        self.words[T] = t
        self.enter(Phase.ACTING)
        if self._main[QUIT]:
            raise StopCollecting

    def end_batch(self, batch_T: int, n_steps: int) -> None:
        """A training batch of `batch_T` rows and `n_steps` environment steps is complete: add to the totals."""
        stamps = self._stamps
        stamps[2 * batch_T] = time.monotonic_ns()
        began_acting, began_stepping = sum(stamps[: 2 * batch_T : 2]), sum(stamps[1 : 2 * batch_T : 2])
        self.words[ACTING] += began_stepping - began_acting
        self.words[STEPPING] += began_acting - stamps[0] + stamps[2 * batch_T] - began_stepping
        self.words[BATCHES] += 1
        self.words[STEPS] += n_steps

    def add_resetting_since(self, began_ns: int) -> None:
        """Add time spent in `env.reset`; within a batch it counts as stepping too."""
        self.words[RESETTING] += time.monotonic_ns() - began_ns

    def add_waiting(self, seconds: float) -> None:
        """Add time spent at barrier_in."""
        self.words[WAITING] += int(seconds * 1e9)

    # ---- gates -----------------------------------------------------------------------------

    @property
    def arrived(self) -> int:
        """How many gate openings this worker has completed."""
        return self.words[ARRIVED]

    @arrived.setter
    def arrived(self, value: int) -> None:
        fence()
        self.words[ARRIVED] = value

    @property
    def command(self) -> Command:
        """The command to run next: that of the first opening that is not completed."""
        return self._control.command(self._rank, self.arrived + 1)

    def begin(self) -> None:
        """A command begins: results are counted from here."""
        words = self.words
        number = words[ARRIVED] + 1
        self._n_results[number % RING] = 0
        words[PHASE] = Phase.BEGINNING
        words[T] = -1  # no time step yet: the batch still holds the one before
        words[BEGUN] = number

    @property
    def n_results(self) -> int:
        """How many results this worker has sent for this command."""
        return self._n_results[(self.words[ARRIVED] + 1) % RING]

    @n_results.setter
    def n_results(self, value: int) -> None:
        self._n_results[(self.words[ARRIVED] + 1) % RING] = value

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

    def offer_inputs(self) -> None:
        """The step buffer has the inputs of the agent for the first time step of the next command, if that collects a
        batch; the observations are in the last row of this batch. The inference server may act on them when that
        command is given."""
        fence()
        self.words[OFFERED] = self.words[ARRIVED] + 2  # + 1 is the opening that runs, + 2 the next

    @property
    def has_first_actions(self) -> bool:
        """Whether the inference server has acted on the inputs that were offered for the running command."""
        return self._replied[ACTED] == self.words[ARRIVED] + 1

    def note_version(self, version: int) -> None:
        """Note the version of the parameters in use. The one who acts notes it: worker or inference server."""
        fence()  # the parameters have been read
        self.words[VERSION] = version
