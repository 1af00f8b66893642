"""The program that a worker runs, and its arguments."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from penstock.buffers.descriptors import InheritedFd
from penstock.buffers.object_pipe import Mailbox, ObjectMessage, ObjectPipe
from penstock.buffers.reports import ReportBoard
from penstock.workers.control import Command, ControlBlock, Progress
from penstock.workers.gates import Gate
from penstock.workers.handle import StackFile
from penstock.workers.plan import WorkerPlan


class SharedMemory(Protocol):
    """The shared memory of a pool. Its descriptors are sent to each worker that is started."""

    @property
    def control(self) -> ControlBlock:
        """Flags, commands and counts."""

    @property
    def mailbox(self) -> Mailbox:
        """Holds the message of a command that has one."""

    def count_lost(self, plan: WorkerPlan, command: Command | None, t: int, n_results: int) -> int:
        """How many trajectories are lost with a worker that died in row `t` of `command` (None: between two commands),
        after it had sent `n_results` results."""


class RequestServer(Protocol):
    """Replies to the requests of the workers, in the process that waits for them (central inference)."""

    def begin(self, command: Command, number: int) -> None:
        """The gates are about to be opened for `command`; it is opening `number`."""

    def serve(self, wake: Callable[[int], None]) -> None:
        """Reply to requests, then spin for others. `wake(rank)` wakes a worker."""

    @property
    def has_work(self) -> bool:
        """Whether `serve` must be called now."""

    @property
    def sleep_seconds(self) -> float:
        """How many seconds this process may sleep before it must call `serve`; inf: no limit."""

    @property
    def wake_for_any(self) -> bool:
        """Whether each request must wake this process."""


class WorkerProgram(Protocol):
    """What a worker does. The pool pickles it with cloudpickle, so user classes and closures are fine.

    A program that several workers run is pickled once. What differs from worker to worker is in `WorkerContext.data`.
    """

    data_name: str  #: the name of `WorkerContext.data` in errors: the argument that the user gave

    def pickled_parts(self) -> dict[str, Any]:
        """Its data, by the names of the user's arguments. If pickling fails, the error names the part."""

    def build(self, context: WorkerContext) -> None:
        """In the worker: build everything. Raises what the user's code raises."""

    def idle(self) -> None:
        """Do the work that can be done before barrier_in."""

    def run(self, command: Command) -> None:
        """Run one command. May raise `StopCollecting` once `quit` is set."""

    def close(self) -> None:
        """Close everything that `build` has built. Raises what the user's code raises."""


@dataclass(frozen=True)
class WorkerContext:
    """What a worker gives to its program."""

    plan: WorkerPlan
    data: Any  #: data for this worker only
    memory: Any  #: the pool's `SharedMemory`; each program knows its own class
    progress: Progress
    put: Callable[
        [Sequence[ObjectMessage]], None
    ]  #: sends results to the main process; `Progress.n_results` counts them
    #: Sends a request to the inference server and waits for the reply; None without a server.
    request: Callable[[int], None] | None = None
    gate: Gate | None = None  #: None where the program runs in the main process
    wakers: Sequence[InheritedFd] | None = None  #: for the inference server: `notify` wakes the worker of this rank


@dataclass(frozen=True)
class WorkerProcessArgs:
    """What a worker process is started with. It contains descriptors, so it can be pickled only while the process is
    being started. The program lies in a mailbox, which all workers read.
    """

    plan: WorkerPlan
    mailbox: Mailbox
    program: slice  #: the mailbox's part with the program
    data: slice  #: the part with this worker's data
    memory: SharedMemory
    gate: Gate
    reports: ReportBoard
    pipe: ObjectPipe
    stacks: StackFile
    wakers: Sequence[InheritedFd] | None = None  #: only for the inference server
    torch_dtype: str = ""  #: torch's default dtype in the main process, if torch is loaded there

    def load(self, part: slice) -> Any:
        """Unpickle one part of the mailbox. For the program, this imports the user's modules."""
        return pickle.loads(self.mailbox.read(part))

    def context(self) -> WorkerContext:
        """The context of this worker's program."""
        progress = self.memory.control.progress(self.plan.worker_rank)
        return WorkerContext(
            plan=self.plan,
            data=self.load(self.data),
            memory=self.memory,
            progress=progress,
            put=self.pipe.put,
            request=partial(self.gate.request, progress),
            gate=self.gate,
            wakers=self.wakers,
        )
