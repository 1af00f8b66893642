"""The control block: the words that the main process and the workers share.

Every word has one writer. Loads and stores of aligned 8-byte words are atomic, so reading one needs no lock.
Order of writes: first the data, then the word that announces it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.buffers.named import NamedArrays
from penstock.buffers.ordering import fence, full_fence
from penstock.buffers.shared import ArraySpec, NamedMemory
from penstock.workers.progress import (
    ACTING,
    ARRIVED,
    ASLEEP,
    AWAKE,
    BATCHES,
    BEGUN,
    ENV_RANK,
    HEARTBEAT,
    KIND_BITS,
    MAIN_ASLEEP,
    N_RESULTS,
    PHASE,
    QUIT,
    REQUESTED,
    RESETTING,
    ROW_WORDS,
    STEPPING,
    STEPS,
    STOP_EVAL,
    VERSION,
    WAITING,
    Phase,
    Progress,
    ProgressSnapshot,
    T,
)

_KIND = (1 << KIND_BITS) - 1
_RING = 8  # commands that may be open at once
_ITR, _DO_EVAL, _HAS_MESSAGE = range(3)  # the words of a command


class Command(NamedTuple):
    """What the workers do between two gates. The default: collect a batch, or step what was requested."""

    itr: int = 0  #: the caller's iteration count
    do_eval: bool = False  #: evaluate the agent instead
    has_message: bool = False  #: do what the message in the mailbox says instead


class ControlBlock:
    """Flags, commands and gate counts for `n_workers` workers, one progress row each, and the times of the last batch.

    The main process writes `quit`, `stop_eval`, the commands, `opened` and `generation`. Each worker writes its
    progress row. `replied` belongs to the inference server, in whichever process that runs.
    """

    def __init__(self, n_workers: int, batch_T: int, *, shared: bool) -> None:
        int64 = np.dtype(np.int64)
        specs = NamedArrays(
            words=ArraySpec((ROW_WORDS,), int64),
            commands=ArraySpec((n_workers, _RING, 4), int64),
            opened=ArraySpec((n_workers,), int64),
            generation=ArraySpec((n_workers,), int64),
            replied=ArraySpec((n_workers, ROW_WORDS), int64),
            progress=ArraySpec((n_workers, ROW_WORDS), int64),
            timeline=ArraySpec((n_workers, 2 * batch_T + 1), int64),  # nanoseconds of time.monotonic_ns
        )
        self.memory = NamedMemory(specs, shared=shared, purpose="the control block")
        self.memory.arrays.progress[:, T] = -1  # no time step yet
        self._bind()

    def _bind(self) -> None:
        """Items of memoryviews are Python integers and cost a third of numpy's."""
        arrays = self.memory.arrays
        self._words, self._opened = memoryview(arrays.words), memoryview(arrays.opened)
        self._generation = memoryview(arrays.generation)
        # Typed as Any: the annotations of memoryview know one dimension only.
        self._commands: Any = memoryview(arrays.commands)
        self._replied: Any = memoryview(arrays.replied)
        self._rows: Any = memoryview(arrays.progress)
        #: The first arguments of the functions in native.py.
        self.block: tuple[Any, Any, Any] = self._rows, self._opened, self._replied
        self.quit_word, self.main_asleep = self._words[QUIT : QUIT + 1], self._words[MAIN_ASLEEP : MAIN_ASLEEP + 1]

    def __getstate__(self) -> NamedMemory:
        return self.memory

    def __setstate__(self, memory: NamedMemory) -> None:
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

    def open(self, worker_rank: int, command: Command = Command()) -> None:  # noqa: B008 - immutable
        """Main process: publish one more command for this worker and count the opening of its gate."""
        number = self._opened[worker_rank] + 1
        slot = number % _RING
        # While the pool closes, a worker only sees that its gate opens; it runs no command.
        is_full = number - self._rows[worker_rank, ARRIVED] > _RING and not self.quit
        if is_full and self.command(worker_rank, slot) != command:
            raise RuntimeError(f"worker {worker_rank} has {_RING} commands open: wait for it before the next")
        commands = self._commands
        commands[worker_rank, slot, _ITR] = command.itr
        commands[worker_rank, slot, _DO_EVAL] = command.do_eval
        commands[worker_rank, slot, _HAS_MESSAGE] = command.has_message
        fence()
        self._opened[worker_rank] = number  # last: it announces the command

    def command(self, worker_rank: int, number: int) -> Command:
        """The command of this worker's gate opening `number`."""
        commands, slot = self._commands, number % _RING
        return Command(
            commands[worker_rank, slot, _ITR],
            bool(commands[worker_rank, slot, _DO_EVAL]),
            bool(commands[worker_rank, slot, _HAS_MESSAGE]),
        )

    def opened(self, worker_rank: int) -> int:
        """How often the main process has opened this worker's gate."""
        return self._opened[worker_rank]

    def has_arrived(self, worker_rank: int) -> bool:
        """Whether this worker has completed the last opening of its gate and waits at barrier_out."""
        return self._rows[worker_rank, ARRIVED] == self._opened[worker_rank]  # type: ignore[no-any-return]

    def pending(self, n_workers: int) -> list[int]:
        """Which of the first `n_workers` workers have not arrived yet."""
        rows, opened = self._rows, self._opened
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

    def has_begun(self, worker_rank: int) -> bool:
        """Whether this worker has seen the last opening of its gate."""
        return self.begun(worker_rank) == self.opened(worker_rank)

    def n_results_by_rank(self, n_workers: int) -> list[int]:
        """How many results each of the first `n_workers` workers has sent since its gate was last opened."""
        rows, opened = self._rows, self._opened
        counts = []
        for rank in range(n_workers):
            # Until the worker has seen the opening, the count is that of the command before.
            has_begun = rows[rank, BEGUN] == opened[rank]
            counts.append(rows[rank, N_RESULTS] if has_begun else 0)
        return counts

    # ---- requests to the inference server --------------------------------------------------

    def last_request(self, worker_rank: int) -> tuple[int, int]:
        """Number and kind of this worker's last request; kind 0 if it has its reply."""
        word: int = self._rows[worker_rank, REQUESTED]
        number = word >> KIND_BITS
        return number, 0 if number == self._replied[worker_rank, 0] else word & _KIND

    def is_requesting(self, worker_rank: int) -> bool:
        """Whether this worker waits for a reply."""
        return self.last_request(worker_rank)[1] != 0

    def replied(self, worker_rank: int) -> int:
        """The number of the last request of this worker that has its reply."""
        return self._replied[worker_rank, 0]  # type: ignore[no-any-return]

    def reply(self, worker_rank: int, number: int) -> None:
        """Inference server: request `number` of this worker has its reply. A replacement ignores replies to the
        worker before it, since its own requests have later numbers."""
        fence()
        self._replied[worker_rank, 0] = number

    def reply_all(self, worker_ranks: Sequence[int], numbers: Sequence[int]) -> list[int]:
        """Inference server: request `numbers[rank]` of each of these workers has its reply. Returns which of them
        sleep."""
        rows, replied = self._rows, self._replied
        fence()
        for rank in worker_ranks:
            replied[rank, 0] = numbers[rank]
        full_fence()
        return [rank for rank in worker_ranks if rows[rank, ASLEEP]]

    def version(self, server_rank: int) -> int:
        """The version of the parameters with which the inference server acts, or last acted."""
        return self._rows[server_rank, VERSION]  # type: ignore[no-any-return]

    # ---- progress rows ---------------------------------------------------------------------

    def generation(self, worker_rank: int) -> int:
        """How many workers with this rank have failed and been replaced."""
        return self._generation[worker_rank]

    @property
    def n_replaced(self) -> int:
        """How many workers have failed and been replaced."""
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
        if row[ARRIVED] != self.opened(worker_rank):
            row[[BEGUN, N_RESULTS]] = 0
        row[REQUESTED] &= ~_KIND
        row[PHASE], row[HEARTBEAT] = Phase.STARTING, time.monotonic_ns()
        # Last: a server that sees a request of the new worker sees the new generation too.
        fence()
        self._generation[worker_rank] += 1

    def snapshot(self, worker_rank: int) -> ProgressSnapshot:
        """A readable copy of one progress row."""
        row = self.memory.arrays.progress[worker_rank].tolist()
        seconds = [row[word] * 1e-9 for word in (STEPPING, ACTING, RESETTING, WAITING)]
        return ProgressSnapshot(
            Phase(row[PHASE]), row[T], row[ENV_RANK], row[HEARTBEAT] * 1e-9, row[BATCHES], row[STEPS], *seconds
        )

    def timeline(self, worker_rank: int) -> npt.NDArray[np.float64]:
        """Times of the worker's last batch, `[2 T + 1]`, in seconds of `time.monotonic`. In row t, the worker began to
        act at `[2 t]` and to step at `[2 t + 1]`. The last entry is the end of the batch."""
        stamps: npt.NDArray[np.float64] = self.memory.arrays.timeline[worker_rank] / 1e9
        return stamps
