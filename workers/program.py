"""What a worker runs: its program, and what the program finds in its process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.buffers.descriptors import InheritedFd
from penstock.buffers.mailbox import Mailbox
from penstock.buffers.reports import ReportBoard
from penstock.buffers.results import ObjectPipe
from penstock.workers.control import Command, ControlBlock
from penstock.workers.gates import Gate
from penstock.workers.plan import WorkerPlan
from penstock.workers.progress import Progress
from penstock.workers.stacks import StackFile


class SharedMemory(Protocol):
    """The shared memory of a pool. Its descriptors are sent to each worker that is started."""

    @property
    def control(self) -> ControlBlock:
        """Flags, commands and counts."""

    @property
    def mailbox(self) -> Mailbox:
        """Holds the message of a command that has one."""

    def count_lost(self, plan: WorkerPlan, command: Command | None, t: int, n_results: int) -> int:
        """How many trajectories are lost with a worker that dies in row `t` of `command` (None: between two), having
        noted `n_results`."""

    def close(self) -> None:
        """Close the descriptors; arrays stay valid."""


class WorkerProgram(Protocol):
    """What a worker does. The pool sends it by cloudpickle, so user classes and closures are fine.

    Programs that many workers share are pickled once: what differs between them comes in the context's `share`.
    """

    share_name: str  #: what errors call the share: the user's argument

    def pickled_parts(self) -> dict[str, Any]:
        """Its data by the user's names: errors name the part that cannot be pickled."""

    def build(self, context: WorkerContext) -> None:
        """In the worker: build everything. Raises what the user's code raises."""

    def idle(self) -> None:
        """Do the work that can be done before barrier_in."""

    def run(self, command: Command) -> None:
        """Run one command. May raise `StopCollecting` once `quit` is set."""

    def close(self) -> None:
        """Close everything that `build` has built. Raises what the user's code raises."""


class ResultQueue(Protocol):
    """Where a program puts objects for the main process. Their number goes into `Progress.n_results`."""

    def put(self, messages: Any, /) -> None:
        """Send these `ObjectMessage`s."""


@dataclass(frozen=True)
class WorkerContext:
    """What a program finds in its worker."""

    plan: WorkerPlan
    share: Any  #: the part of the program's data that is this worker's alone
    memory: Any  #: the pool's `SharedMemory`; each program knows its own class
    progress: Progress
    results: ResultQueue
    request: Callable[[int], None] | None = None  #: sends a request to the inference server and waits for the reply
    gate: Gate | None = None  #: None where the program runs in the main process
    main_process: InheritedFd | None = None  #: a pidfd of the main process, where the system has one
    gates: tuple[Gate, ...] = ()  #: the gates of all workers, for the inference server


@dataclass(frozen=True)
class WorkerProcessArgs:
    """What a worker process is started with. It contains descriptors, so it can be pickled only at that moment.

    The program lies in a mailbox: `multiprocessing` would send it through a pipe, and would wait for ever if the worker
    died before it had read all of it.
    """

    plan: WorkerPlan
    mailbox: Mailbox
    environ: slice  #: where the environment variables lie in it, pickled
    program: slice  #: the program
    share: slice  #: and this worker's share
    memory: SharedMemory
    gate: Gate
    reports: ReportBoard
    pipe: ObjectPipe
    stacks: StackFile
    main_process: InheritedFd | None
    dies_with_starter: bool  #: whether the death of the starting process or thread is the main process's
    gates: tuple[Gate, ...] = ()

    def load(self, part: slice) -> Any:
        """One part of the mailbox; unpickling the program imports the user's modules."""
        return pickle.loads(self.mailbox.read(part))

    def context(self) -> WorkerContext:
        """The context of this worker's program."""
        progress = self.memory.control.progress(self.plan.worker_rank)
        gate, main_process = self.gate, self.main_process
        return WorkerContext(
            plan=self.plan,
            share=self.load(self.share),
            memory=self.memory,
            progress=progress,
            results=self.pipe,
            request=lambda kind: gate.request(progress, kind, main_process),
            gate=gate,
            main_process=main_process,
            gates=self.gates,
        )
