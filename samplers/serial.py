"""SerialSampler: one worker in the caller's process. For debugging, and the reference in tests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from penstock.samplers.allocation import Allocation
from penstock.samplers.parallel import pool_options
from penstock.samplers.sampler import Sampler
from penstock.samplers.sampler_plan import EnvRange, SamplerPlan, make_plans
from penstock.workers.affinity import usable_cpus
from penstock.workers.plan import Affinity, assign_cpus
from penstock.workers.pool import WorkerPool


class SerialSampler(Sampler):
    """The same collectors and the same results as `ParallelSampler`, without processes.

    `breakpoint()` works in environments, agents and collectors, and nothing needs to be pickled. But a model must allow
    `copy.deepcopy`, since this sampler acts with a copy too. `n_workers`, `affinity`, `start_method` and the timeouts
    have no effect. `start_samples` collects the whole batch before it returns.
    """

    _shared_memory = False

    def _make_plans(self, affinity: Affinity, env_range: EnvRange, resources: ExitStack) -> tuple[SamplerPlan, ...]:
        cpus = affinity.cpus
        # It has no effect, but one that no sampler accepts raises here too.
        assign_cpus(affinity, len(cpus) if isinstance(cpus, Sequence) else 1, usable_cpus())
        return make_plans(self.batch_B, self.config.eval_n_envs, [()], env_range)

    def _make_pool(self, allocation: Allocation, resources: ExitStack) -> WorkerPool:
        programs, options = [allocation.program], pool_options(self.config, allocation)
        return WorkerPool(
            self._plans, programs, allocation.worker_data, self._memory, options, resources, in_place=True
        )
