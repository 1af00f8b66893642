"""Where the time went: a sampler's statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.workers.control import ControlBlock
from penstock.workers.plan import WorkerPlan
from penstock.workers.restarts import Restarts

__all__ = ["SamplerStats", "WorkerStats", "worker_stats"]


@dataclass(frozen=True)
class WorkerStats:
    """One worker, with those that it has replaced, since the sampler was initialized. Times are in seconds;
    `steps` counts environment steps of training batches, and `stepping` and `acting` are the time spent in
    those.

    `resetting` is the time in `env.reset`, wherever it was called (within batches it is part of
    `stepping`); `waiting` is the time at barrier_in, while the learner trained or others finished.
    `trajectories` are those that the sampler's calls have returned, from training and evaluation;
    `lost_trajectories` those that went down with a worker that was replaced.
    """

    worker_rank: int
    env_ranks: range
    cpus: tuple[int, ...]
    batches: int
    steps: int
    stepping: float
    acting: float
    resetting: float
    waiting: float
    trajectories: int
    restarts: int
    lost_trajectories: int


@dataclass(frozen=True)
class SamplerStats:
    """All workers, and the bytes of memory that they share with the main process."""

    workers: tuple[WorkerStats, ...]
    bytes_shared: int

    @property
    def restarts(self) -> int:
        """How often a worker has been replaced."""
        return sum(worker.restarts for worker in self.workers)

    @property
    def lost_trajectories(self) -> int:
        """Trajectories that went down with workers that were replaced."""
        return sum(worker.lost_trajectories for worker in self.workers)


def worker_stats(
    plan: WorkerPlan, control: ControlBlock, delivered: Mapping[int, int], restarts: Restarts
) -> WorkerStats:
    """One worker's totals; `delivered` counts trajectories by worker rank."""
    rank = plan.worker_rank
    row = control.snapshot(rank)
    return WorkerStats(
        worker_rank=rank,
        env_ranks=plan.env_ranks,
        cpus=plan.cpus,
        batches=row.batches,
        steps=row.steps,
        stepping=row.stepping,
        acting=row.acting,
        resetting=row.resetting,
        waiting=row.waiting,
        trajectories=delivered.get(rank, 0),
        restarts=restarts.per_worker[rank],
        lost_trajectories=restarts.lost_per_worker[rank],
    )
