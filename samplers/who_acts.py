"""Who acts: the workers, or the caller as here; or an inference server (`central.py`)."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, ClassVar

from penstock.samplers.config import SamplerConfig
from penstock.samplers.sampler_plan import EnvRange, SamplerPlan, make_plans
from penstock.workers.affinity import cpus_to_fill, usable_cpus
from penstock.workers.claims import CpuClaims
from penstock.workers.plan import Affinity, PoolOptions, assign_cpus
from penstock.workers.pool import Pool, WorkerPool

if TYPE_CHECKING:
    from penstock.samplers.allocation import Allocation
    from penstock.samplers.inference_server import InferenceServer

_log = logging.getLogger("penstock")

#: What the supervisor imports for every sampler.
PRELOAD = ("penstock.samplers.sampler_program", "gymnasium.envs.classic_control")

#: Also for workers that have a copy of the agent. torch imports the second when it first unpickles a tensor.
PRELOAD_TO_ACT = ("torch", "torch.utils.serialization.config")


class Acting(ABC):
    """Who acts for which environments, and where. `Sampler.acting` makes one for each run."""

    #: Whether an inference server acts for all workers, which have no agent then.
    is_central: ClassVar[bool] = False

    #: Whether workers are processes, so that memory must be shared.
    has_processes: ClassVar[bool] = True

    #: Whether workers write records of `TrajInfo` itself into shared memory. Otherwise the pool takes all trajectories.
    has_records: ClassVar[bool] = True

    #: The name in `refusals` of what cannot repeat episodes, and save and continue runs; empty if it can.
    refused_as: ClassVar[str] = ""

    @property
    def server(self) -> InferenceServer | None:
        """The inference server, if there is one. Raises `ConfigError` if it is in another process."""
        return None

    def plans(
        self, config: SamplerConfig, affinity: Affinity, env_range: EnvRange, resources: ExitStack
    ) -> tuple[SamplerPlan, ...]:
        """Divide the environments among workers: one plan for each. `make_plans` makes them from the CPUs of each
        worker. By default, there is one worker for each CPU, and none without an environment.

        `env_range` are this sampler's environments among those on all machines. What must be closed with the workers
        goes onto `resources`. Raises `ConfigError` if the arguments of the user do not allow it.
        """
        claims, mask = CpuClaims(), usable_cpus()
        resources.callback(claims.close)
        wanted, n_workers = config.n_workers, self.count_workers(config, mask)
        if wanted is not None and wanted > n_workers:
            _log.warning("n_workers=%d for batch_B=%d environments: %d are enough", wanted, config.batch_B, n_workers)
        cpus = self.assign_cpus(claims, affinity, n_workers, mask)
        unit, threads = config.rows_per_env, affinity.torch_threads
        return make_plans(*config.env_counts, cpus, env_range, torch_threads=threads, unit=unit)

    def count_workers(self, config: SamplerConfig, mask: Sequence[int]) -> int:
        """The number of workers on the CPUs `mask`: as asked, else as many as these can run, and never more than
        environments."""
        return min(config.n_workers or cpus_to_fill(mask), config.n_built)

    def assign_cpus(
        self, claims: CpuClaims, affinity: Affinity, n_workers: int, mask: Sequence[int]
    ) -> Sequence[tuple[int, ...]]:
        """The CPUs of each worker, out of `mask`; empty if it is not pinned."""
        return claims.assign(affinity, n_workers, mask)

    @abstractmethod
    def start(self, allocation: Allocation, options: PoolOptions, resources: ExitStack) -> Pool:
        """Start the workers, and a server if there is one. The pool becomes the owner of `resources`, and closes them.

        Worker i has the plan `allocation.layout.plans[i]`, runs `allocation.program`, and gets
        `allocation.worker_data[i]`.
        """


class WorkersAct(Acting):
    """Each worker acts for its environments, with its own copy of the agent."""

    def start(self, allocation: Allocation, options: PoolOptions, resources: ExitStack) -> WorkerPool:
        layout = allocation.layout
        programs = [allocation.program] * len(layout.plans)
        return WorkerPool(layout.plans, programs, allocation.worker_data, layout.memory, options, resources)


class CallerSteps(Acting):
    """One worker, in the process of the caller."""

    has_processes = False

    def plans(
        self, config: SamplerConfig, affinity: Affinity, env_range: EnvRange, resources: ExitStack
    ) -> tuple[SamplerPlan, ...]:
        cpus = affinity.cpus
        # It has no effect, but one that no sampler accepts raises here too.
        assign_cpus(affinity, len(cpus) if isinstance(cpus, Sequence) else 1, usable_cpus())
        return make_plans(*config.env_counts, [()], env_range)

    def start(self, allocation: Allocation, options: PoolOptions, resources: ExitStack) -> WorkerPool:
        layout, programs = allocation.layout, [allocation.program]
        return WorkerPool(
            layout.plans, programs, allocation.worker_data, layout.memory, options, resources, in_place=True
        )


def pool_options(kind: str, config: SamplerConfig, allocation: Allocation, *, has_death_logger: bool) -> PoolOptions:
    """The options of the pool, from `config`."""
    return config.pool_options(
        kind=kind,
        batch_T=config.batch_T,
        crash_dir=config.crash_dir,
        has_death_logger=has_death_logger,
        episode_of=None if allocation.log_reader is None else allocation.log_reader.of_failure,
        preload=(*PRELOAD_TO_ACT, *PRELOAD),
    )
