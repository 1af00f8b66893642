"""ParallelSampler: worker processes that act and step on their own, between two gates per batch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from penstock.samplers.allocation import Allocation
from penstock.samplers.base import Sampler
from penstock.samplers.config import SamplerConfig
from penstock.samplers.plan import SamplerPlan, make_plans
from penstock.workers.affinity import usable_cpus
from penstock.workers.monitor import Limits
from penstock.workers.plan import Affinity, assign_cpus, n_workers_default
from penstock.workers.pool import PoolOptions, WorkerPool
from penstock.workers.restarts import RestartPolicy
from penstock.workers.spinning import SPIN_SECONDS

_log = logging.getLogger("penstock")


class ParallelSampler(Sampler):
    """Each worker holds a copy of the agent and a share of the environments.

    It writes its columns of the batch straight into shared memory. Between two batches it waits at barrier_in; before
    that it resets what needs a reset, while the learner trains. Use it when the policy is small enough for a CPU core:
    it is the fastest sampler then.
    """

    def _make_plans(self, affinity: Affinity, rank: int) -> tuple[SamplerPlan, ...]:
        mask = usable_cpus()
        wanted, n_workers = self.config.n_workers, self._count_workers(mask)
        if wanted is not None and wanted > n_workers:
            _log.warning("n_workers=%d for batch_B=%d environments: %d are enough", wanted, self.batch_B, n_workers)
        return make_plans(
            self.batch_B,
            self.config.eval_n_envs,
            assign_cpus(affinity, n_workers, mask),
            torch_threads=affinity.torch_threads,
            rank=rank,
            n_local=self._count_local_envs(n_workers),
        )

    def _count_local_envs(self, n_workers: int) -> tuple[int, int]:
        """How many training and evaluation environments the main process steps itself."""
        return 0, 0

    def _count_workers(self, mask: Sequence[int]) -> int:
        return n_workers_default(self.config.n_workers, self.batch_B, mask)

    def _make_pool(self, allocation: Allocation, resources: ExitStack) -> WorkerPool:
        programs, options = [allocation.program] * len(self._plans), pool_options(self.config)
        return WorkerPool(self._plans, programs, allocation.shares, allocation.memory, options, resources.pop_all())


def pool_options(
    config: SamplerConfig, spin_seconds: float = SPIN_SECONDS, *, preload: Sequence[str] = ("torch",)
) -> PoolOptions:
    """The pool's part of `config`; `preload` are modules that only the workers of this sampler import."""
    return PoolOptions(
        start_method=config.start_method,
        limits=Limits(config.step_timeout, config.start_timeout),
        restarts=RestartPolicy.of(config.on_worker_failure, config.max_restarts, config.restart_window),
        spin_seconds=spin_seconds,
        preload=(*preload, "penstock.samplers.program", "gymnasium.envs.classic_control"),
    )
