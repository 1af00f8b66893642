"""ParallelSampler: worker processes that act and step for themselves, between two gates per batch."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from penstock.samplers.allocation import Allocation
from penstock.samplers.base import Sampler
from penstock.samplers.config import SamplerConfig
from penstock.workers.affinity import usable_cpus
from penstock.workers.monitor import Limits
from penstock.workers.plan import Affinity, WorkerPlan, assign_cpus, make_plans, n_workers_default
from penstock.workers.pool import PoolOptions, WorkerPool
from penstock.workers.restarts import RestartPolicy
from penstock.workers.spinning import SPIN_SECONDS
from penstock.workers.team import Team

__all__ = ["ParallelSampler", "crew_rules"]

_log = logging.getLogger("penstock")


class ParallelSampler(Sampler):
    """Each worker holds a copy of the agent and a share of the environments.

    It writes its columns of the batch straight into shared memory; between two batches it stands at
    barrier_in, having reset what needed resetting while the learner trained. Use it when the policy is
    small enough to run on a CPU core; it is the fastest sampler then.
    """

    def _make_plans(self, affinity: Affinity, rank: int) -> tuple[WorkerPlan, ...]:
        mask = usable_cpus()
        asked, n_workers = self.config.n_workers, self._n_workers(mask)
        if asked is not None and asked > n_workers:
            _log.warning("n_workers=%d for batch_B=%d environments: %d are enough", asked, self.batch_B, n_workers)
        cpus = assign_cpus(affinity, n_workers, mask)
        return make_plans(
            self.batch_B,
            self.config.eval_n_envs,
            cpus,
            torch_threads=affinity.torch_threads,
            rank=rank,
            kept=self._kept(n_workers),
        )

    def _kept(self, n_workers: int) -> tuple[int, int]:
        """How many environments, of training and evaluation, the main process keeps to itself."""
        return 0, 0

    def _n_workers(self, mask: Sequence[int]) -> int:
        return n_workers_default(self.config.n_workers, self.batch_B, mask)

    def _make_team(self, allocation: Allocation) -> Team:
        return WorkerPool(self._plans, allocation.job, allocation.state, crew_rules(self.config, SPIN_SECONDS))


def crew_rules(config: SamplerConfig, spin_seconds: float, *, with_torch: bool = True) -> PoolOptions:
    """What `config` says of processes and their failures; `with_torch`: whether agents act in them."""
    return PoolOptions(
        start_method=config.start_method,
        spin_seconds=spin_seconds,
        limits=Limits(config.step_timeout, config.start_timeout),
        restarts=RestartPolicy.of(config.on_worker_failure, config.max_restarts, config.restart_window),
        preload=("torch", "penstock.samplers.program") if with_torch else ("penstock.samplers.program",),
    )
