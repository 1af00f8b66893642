"""ParallelSampler: worker processes that each have a copy of the agent and step their own environments."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from penstock.samplers.allocation import Allocation
from penstock.samplers.config import SamplerConfig
from penstock.samplers.sampler import Sampler
from penstock.samplers.sampler_plan import EnvRange, SamplerPlan, make_plans
from penstock.workers.affinity import cpus_to_fill, usable_cpus
from penstock.workers.plan import Affinity, PoolOptions
from penstock.workers.pool import WorkerPool
from penstock.workers.spinning import SPIN_SECONDS

_log = logging.getLogger("penstock")

#: What the supervisor imports for every sampler. With the modules of vector environments, so that these need no
#: supervisor of their own.
PRELOAD = ("penstock.samplers.sampler_program", "penstock.vector.step_program", "gymnasium.envs.classic_control")


#: Also for workers that have a copy of the agent. torch imports the second when it first unpickles a tensor.
PRELOAD_TO_ACT = ("torch", "torch.utils.serialization.config")


class ParallelSampler(Sampler):
    """Each worker holds a copy of the agent and a share of the environments.

    It writes its columns of the batch straight into shared memory. After a batch, while the learner trains, it resets
    the environments that need a reset. Then it waits at barrier_in. Use this sampler when the policy is small enough
    for a CPU core: for such policies it is the fastest.
    """

    def _make_plans(self, affinity: Affinity, env_range: EnvRange, resources: ExitStack) -> tuple[SamplerPlan, ...]:
        mask = usable_cpus()
        wanted, n_workers = self.config.n_workers, self._count_workers(mask)
        if wanted is not None and wanted > n_workers:
            _log.warning("n_workers=%d for batch_B=%d environments: %d are enough", wanted, self.batch_B, n_workers)
        return make_plans(
            self.batch_B,
            self.config.eval_n_envs,
            self._cpu_claims.assign(affinity, n_workers, mask),
            env_range,
            torch_threads=affinity.torch_threads,
            unit=self.config.rows_per_env,
        )

    def _count_workers(self, mask: Sequence[int]) -> int:
        """The number of workers: as asked, else as many as the CPUs can run, and never more than environments."""
        return min(self.config.n_workers or cpus_to_fill(mask), self.config.n_built)

    def _make_pool(self, allocation: Allocation, resources: ExitStack) -> WorkerPool:
        programs, options = [allocation.program] * len(self._plans), pool_options(self.config, allocation)
        return WorkerPool(self._plans, programs, allocation.worker_data, self._memory, options, resources)


def pool_options(
    config: SamplerConfig,
    allocation: Allocation,
    spin_seconds: float = SPIN_SECONDS,
    *,
    preload: Sequence[str] = PRELOAD_TO_ACT,
    has_lookout: bool = False,
) -> PoolOptions:
    """The options of the pool, from `config`. `preload`: modules that the supervisor imports for this sampler."""
    return PoolOptions(
        start_method=config.start_method,
        step_timeout=config.step_timeout,
        start_timeout=config.start_timeout,
        close_timeout=config.close_timeout,
        max_restarts=config.max_restarts if config.on_worker_failure == "restart" else 0,
        restart_window=config.restart_window,
        spin_seconds=spin_seconds,
        has_lookout=has_lookout,
        episode_of=None if allocation.episodes is None else allocation.episodes.of_failure,
        preload=(*preload, *PRELOAD),
    )
