"""SerialSampler: one worker in the caller's own process. For debugging, and for the reference in tests."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from penstock.buffers.control import Phase
from penstock.buffers.trajectory_queue import Frame
from penstock.errors import SamplerBrokenError, WorkerError
from penstock.samplers.allocation import Allocation
from penstock.samplers.base import Sampler
from penstock.samplers.failures import Witness
from penstock.samplers.interrupts import interrupts
from penstock.samplers.plan import Affinity, WorkerPlan, make_plans
from penstock.samplers.restarts import RestartPolicy, Restarts
from penstock.samplers.team import Team
from penstock.samplers.worker import Worker

__all__ = ["SerialSampler"]


class SerialSampler(Sampler):
    """The same collectors and the same results as `ParallelSampler`, without processes.

    `breakpoint()` works in environments, agents and collectors, and nothing needs to be pickled; but a model must
    allow `copy.deepcopy`, since the environments are acted in with a copy here too.
    `n_workers`, `affinity`, `start_method` and the timeouts have no effect.
    """

    _shared_memory = False

    def _make_plans(self, affinity: Affinity, rank: int) -> tuple[WorkerPlan, ...]:
        return make_plans(self.batch_B, self.config.eval_n_envs, [()], rank=rank)

    def _make_team(self, allocation: Allocation) -> Team:
        return _InProcess(self._plans[0], allocation)


class _InProcess:
    """A team of one, who works while the gates open and has always arrived when it is waited for."""

    def __init__(self, plan: WorkerPlan, allocation: Allocation) -> None:
        self._plan, self._control = plan, allocation.control
        self._frames: list[Frame] = []
        self.restarts = Restarts(RestartPolicy(0, 0.0))  # there is no process that could be replaced
        self._failure: SamplerBrokenError | None = None
        self._worker: Worker | None = None
        with self._catching("start-up"):
            self._worker = Worker(plan, allocation.job, allocation.state, self)
            self._worker.progress.enter(Phase.WAITING)

    def put(self, frames: Sequence[Frame]) -> None:
        """The worker's end of the trajectory queue."""
        self._frames += frames

    def take_frames(self, promised: Sequence[int]) -> list[Frame]:
        frames, self._frames = self._frames, []
        return frames

    def open_gates(self) -> None:
        control, rank = self._control, self._plan.worker_rank
        control.open(rank)
        with self._catching(f"{'evaluation, ' if control.do_eval else ''}itr={control.itr}"):
            assert self._worker is not None  # start-up would have failed
            self._worker.collector.reset_if_needed()
            self._worker.run()
            self._worker.progress.arrived += 1
            self._worker.progress.enter(Phase.WAITING)

    def wait_out(
        self,
        occasion: str,
        *,
        starting: bool = False,
        on_wake: Callable[[], None] | None = None,
        look_again: float = 1.0,
    ) -> None:
        if self._failure is not None:
            raise self._failure

    def witnesses(self) -> list[Witness]:
        return [Witness(self._plan, os.getpid(), self._control.snapshot(self._plan.worker_rank))]

    @contextmanager
    def _catching(self, occasion: str) -> Iterator[None]:
        """Keep a failure for `wait_out`, where a `ParallelSampler` would give it."""
        try:
            with interrupts.passing():  # here the environments are at work, which may hang
                yield
        except BaseException as error:
            (witness,) = self.witnesses()
            self._failure = WorkerError(
                f"{witness} raised {type(error).__name__}: {error} while {witness.doing} ({occasion})"
            )
            self._failure.__cause__ = error
            if not isinstance(error, Exception):  # Ctrl-C: the user wants out of here, now
                raise

    def close(self, *, broken: bool = False) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        try:
            worker.close()
        except Exception as error:
            if not broken:
                warnings.warn(f"closing an environment raised {error!r}", RuntimeWarning, stacklevel=2)
