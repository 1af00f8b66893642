"""What a crew is given to do: the job as it travels, the memory that is shared, and the work in each process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.buffers.descriptors import InheritedFd
from penstock.buffers.trajectory_queue import ObjectMessage
from penstock.workers.control import ControlBlock
from penstock.workers.gates import Gate
from penstock.workers.plan import WorkerPlan

__all__ = ["FrameQueue", "Job", "Memory", "Station", "Task", "Work"]


class FrameQueue(Protocol):
    """Where a worker puts objects for the main process; it promises their number in its progress row."""

    def put(self, frames: Sequence[ObjectMessage]) -> None:
        """Hand `frames` over."""


class Memory(Protocol):
    """The memory that workers write into and read from. Its descriptors travel while a worker is started."""

    @property
    def control(self) -> ControlBlock:
        """The shared words."""

    def count_finished(self, plan: WorkerPlan, t: int) -> int:
        """How many trajectories have ended in rows 0 to `t` of the batch that `plan`'s worker is in."""


@dataclass(frozen=True)
class Station:
    """What a worker finds in its own process."""

    plan: WorkerPlan
    memory: Any  #: the crew's `Memory`; each job knows its own
    gate: Gate
    frames: FrameQueue
    main_process: InheritedFd | None  #: a pidfd of the main process, where there is such a thing
    served: Sequence[Gate]  #: the gates of all workers, if this is the inference server


class Work(Protocol):
    """What one worker does between its gates."""

    def prepare(self) -> None:
        """Do what can be done before barrier_in, while nobody waits for it."""

    def run(self) -> None:
        """Do what the control block says. May raise `StopCollecting` once `quit` is set."""

    def close(self) -> None:
        """Close everything that was built; may raise what the user's code raises."""


class Job(Protocol):
    """What all workers are to do. Travels by cloudpickle: user classes and closures included."""

    def arguments(self) -> Mapping[str, Any]:
        """What it is made of, by the names that the user knows it by."""

    def common(self) -> Job:
        """The part that all workers need."""

    def share_of(self, plan: WorkerPlan) -> Any:
        """The part that only `plan`'s worker needs."""

    def with_share(self, share: Any) -> Task:
        """The common part made whole by a worker's own."""


class Task(Protocol):
    """What one worker is to do."""

    def start_work(self, station: Station) -> Work:
        """In the worker: build everything."""
