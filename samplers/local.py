"""A worker that is no process: the caller's own thread does its work."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

from penstock.buffers.trajectory_queue import ObjectMessage
from penstock.errors import WorkerError
from penstock.samplers.program import Connect, Job, SharedState, Worker
from penstock.workers.control import Phase, Progress
from penstock.workers.failures import WorkerStatus
from penstock.workers.plan import WorkerPlan

__all__ = ["LocalWorker"]


class LocalWorker:
    """A plan's environments, built by `build` and put to work by `open` and `work`."""

    def __init__(self, plan: WorkerPlan, state: SharedState) -> None:
        self._plan, self._state, self._control = plan, state, state.control
        self._worker: Worker | None = None
        self._frames: list[ObjectMessage] = []

    def build(self, job: Job, connect: Connect | None = None) -> None:
        """Build everything; this answers the first opening, as with every worker."""
        self.open()
        own_job = job.with_share(job.share_of(self._plan))
        self._worker = Worker(self._plan, own_job, self._state, self, connect)
        self._arrive()

    def open(self) -> None:
        """There is something to do: what the control block says."""
        self._control.open(self._plan.worker_rank)

    @property
    def is_at_work(self) -> bool:
        """Whether there is something to do, or something was left in the middle."""
        return self._worker is not None and not self._control.has_arrived(self._plan.worker_rank)

    def work(self) -> None:
        """Do it."""
        assert self._worker is not None  # start-up would have failed
        self._worker.prepare()
        self._worker.run()
        self._arrive()

    def _arrive(self) -> None:
        assert self._worker is not None
        self._worker.progress.arrived += 1
        self._worker.progress.enter(Phase.WAITING)

    def put(self, frames: Sequence[ObjectMessage]) -> None:
        """The worker's end of the trajectory queue."""
        self._frames += frames

    def take_frames(self) -> list[ObjectMessage]:
        """What has been put."""
        frames, self._frames = self._frames, []
        return frames

    @property
    def progress(self) -> Progress:
        """Its progress row."""
        return self._control.progress(self._plan.worker_rank)

    def witness(self) -> WorkerStatus:
        """Where it is now."""
        return WorkerStatus(self._plan, os.getpid(), self._control.snapshot(self._plan.worker_rank))

    def failure(self, error: BaseException, occasion: str) -> WorkerError:
        """What a process would be reported with that raised `error`, which is the cause."""
        witness = self.witness()
        failure = WorkerError(f"{witness} raised {type(error).__name__}: {error} while {witness.doing} ({occasion})")
        failure.__cause__ = error
        return failure

    def close(self, *, broken: bool) -> None:
        """Close the environments. Never raises; warns if one does, unless the sampler is `broken` already."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        try:
            worker.close()
        except Exception as error:
            if not broken:
                warnings.warn(f"closing an environment raised {error!r}", RuntimeWarning, stacklevel=3)
