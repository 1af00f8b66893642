"""SerialSampler: one worker in the caller's own process. For debugging, and for the reference in tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.buffers.trajectory_queue import ObjectMessage
from penstock.errors import SamplerBrokenError
from penstock.samplers.allocation import Allocation
from penstock.samplers.base import Sampler
from penstock.samplers.local import LocalWorker
from penstock.workers.failures import WorkerStatus
from penstock.workers.interrupts import interrupts
from penstock.workers.plan import Affinity, WorkerPlan, make_plans
from penstock.workers.restarts import RestartPolicy, Restarts
from penstock.workers.team import Team, Wait

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
        self._control = allocation.control
        self._worker = LocalWorker(plan, allocation.state)
        self.restarts = Restarts(RestartPolicy(0, 0.0))  # there is no process that could be replaced
        self._failure: SamplerBrokenError | None = None
        with self._catching("start-up"):
            self._worker.build(allocation.job)

    def take_frames(self, promised: Sequence[int]) -> list[ObjectMessage]:
        return self._worker.take_frames()

    def open_gates(self) -> None:
        control = self._control
        self._worker.open()
        with self._catching(f"{'evaluation, ' if control.do_eval else ''}itr={control.itr}"):
            self._worker.work()

    def wait_out(self, wait: Wait) -> None:
        if self._failure is not None:
            raise self._failure

    def witnesses(self) -> list[WorkerStatus]:
        return [self._worker.witness()]

    @contextmanager
    def _catching(self, occasion: str) -> Iterator[None]:
        """Keep a failure for `wait_out`, where a `ParallelSampler` would give it."""
        try:
            with interrupts.passing():  # here the environments are at work, which may hang
                yield
        except BaseException as error:
            self._failure = self._worker.failure(error, occasion)
            if not isinstance(error, Exception):  # Ctrl-C: the user wants out of here, now
                raise

    def close(self, *, broken: bool = False) -> None:
        self._worker.close(broken=broken)
