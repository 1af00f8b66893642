"""Where the time went: a sampler's statistics."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.buffers.control import ControlBlock
from penstock.samplers.plan import WorkerPlan

__all__ = ["SamplerStats", "WorkerStats"]


@dataclass(frozen=True)
class WorkerStats:
    """One worker since the sampler was initialized. Times are in seconds; `steps` counts environment
    steps of training batches, and `stepping` and `acting` are the time spent in those.

    `resetting` is the time in `env.reset`, wherever it was called (within batches it is part of
    `stepping`); `waiting` is the time at barrier_in, while the learner trained or others finished.
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


@dataclass(frozen=True)
class SamplerStats:
    """All workers, and the bytes of memory that they share with the main process."""

    workers: tuple[WorkerStats, ...]
    bytes_shared: int


def worker_stats(plan: WorkerPlan, control: ControlBlock) -> WorkerStats:
    """Read one worker's totals from its progress row."""
    row = control.snapshot(plan.worker_rank)
    times = row.stepping, row.acting, row.resetting, row.waiting
    return WorkerStats(plan.worker_rank, plan.env_ranks, plan.cpus, row.batches, row.steps, *times)
