"""When the workers collect: on demand, as here, or ahead of the learner (`asynchronous.py`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.buffers import Samples
from penstock.collectors import TrajInfo
from penstock.samplers.run import Run

if TYPE_CHECKING:
    from penstock.samplers.allocation import Allocation


class Schedule(ABC):
    """When the workers collect batches. `Sampler.schedule` makes one for each run.

    `obtain_samples(itr)` calls `begin` and `finish`; `start_samples` and `wait_samples` call one of them. All three
    methods work on a `Run`.
    """

    #: Whether the workers also collect between two calls of the user. Then a thread logs their deaths.
    is_ahead: ClassVar[bool] = False

    #: The name in `refusals` of what cannot repeat episodes, and save and continue runs; empty if it can.
    refused_as: ClassVar[str] = ""

    def connect(self, run: Run, allocation: Allocation, resources: ExitStack) -> Allocation:
        """The workers are about to start. Returns what they get, which may have more memory than `allocation`. What
        must be closed with the workers goes onto `resources`. By default, nothing is changed."""
        return allocation

    @abstractmethod
    def begin(self, run: Run, itr: int) -> None:
        """Let the workers collect the batch of `itr`, if they do not do so already."""

    @abstractmethod
    def finish(self, run: Run) -> tuple[Samples, list[TrajInfo]]:
        """Wait for the batch that `begin` has begun. Returns what `obtain_samples` returns."""

    @abstractmethod
    def pause(self, run: Run, call: str) -> None:
        """`call`, an evaluation or a call on the environments, is the next command of the workers. Wait for the
        batches that they still collect, and take the trajectories of these: the next command overwrites them."""


class OnDemand(Schedule):
    """A batch is collected between `begin` and `finish`, and at no other time."""

    def begin(self, run: Run, itr: int) -> None:
        run.submit(itr)

    def finish(self, run: Run) -> tuple[Samples, list[TrajInfo]]:
        return run.wait()

    def pause(self, run: Run, call: str) -> Any:
        """No batch runs then."""
