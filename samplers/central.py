"""GpuSampler and AlternatingSampler: one process computes the actions of all environments, a batch at a time."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from penstock.buffers import Samples
from penstock.collectors import TrajInfo
from penstock.collectors.central import RemoteAgent
from penstock.envs import EnvFn
from penstock.errors import ConfigError
from penstock.samplers.allocation import Allocation
from penstock.samplers.central_pool import ServedCrew
from penstock.samplers.inference_server import InferenceServer, ServerJob
from penstock.samplers.local import LocalWorker
from penstock.samplers.parallel import ParallelSampler, crew_rules
from penstock.samplers.readiness import Alternating, FirstReady, LockStep, Readiness, columns_wanted
from penstock.samplers.server_program import ServedJob
from penstock.samplers.server_totals import ServerStats
from penstock.workers.affinity import threads_here, usable_cpus
from penstock.workers.plan import Affinity, WorkerPlan, server_plan
from penstock.workers.pool import WorkerPool
from penstock.workers.spinning import SPIN_SECONDS
from penstock.workers.team import Team

__all__ = ["AlternatingSampler", "GpuSampler"]

_MOST_SPIN_SECONDS = 0.01


class GpuSampler(ParallelSampler):
    """The workers step environments only; the agent acts for all of them at once, in one process.

    Use it when the policy is too large for a CPU core, or when environments are of uneven speed. The agent acts on
    the device that its model is on when the sampler is initialized, with a copy that follows
    `agent.sync_shared_memory()` as every sampler's copies do. Workers need no torch.

    By default that process is the caller's, and `obtain_samples` and `wait_samples` compute the actions: nothing is
    sampled between `start_samples` and `wait_samples` but the steps that were under way. With `server="process"` it is
    one of its own, and the batch goes on while the caller trains.

    Args beside those of every sampler:
        min_ready: the agent acts as soon as this many environments wait for it (a whole number), or this fraction
            of them (a float up to 1.0), so that slow steps of some hold up nobody else. Each environment still makes
            `batch_T` steps in a batch. None: the agent acts for all of them together.
        serve_envs: environments that the serving process steps itself, beside acting for all. Where CPUs are few this
            saves wake-ups from one to another, which cost as much as several steps. "auto" takes an equal share, and by
            default one worker less. Their errors are told as those of a worker, but a crash or a hang is the caller's.
        server: "caller", or "process" for a process that does nothing but act. It is supervised as the workers are, and
            `step_timeout` counts for the agent's steps too; but it is never replaced, since what the agent remembers
            of each environment would be lost. It uses as many torch threads as this process does (a forked one: one).
            It steps no environments: `serve_envs` is for "caller".
        compile_model: run the model through `torch.compile`, with its defaults or with these arguments. It is compiled
            while the sampler is initialized, for all environments together. For other numbers of them (`min_ready`,
            halves, values at the ends of episodes) torch compiles it once more when they first come, and where the
            server is a process `step_timeout` must leave time for that.
        spin_seconds: how long server and workers look out for each other before they sleep, letting others run in
            between. By default 200 µs; at most 10 ms, for while they do they see nothing else.

    On CPUs, `torch.set_num_threads(1)` in the main process pays for small policies: while it acts, it then keeps to
    CPUs that no worker is pinned to.
    """

    _central = True

    def __init__(
        self,
        env_fn: EnvFn,
        *,
        min_ready: int | float | None = None,
        serve_envs: int | Literal["auto"] = 0,
        server: Literal["caller", "process"] = "caller",
        compile_model: bool | Mapping[str, Any] = False,
        spin_seconds: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(env_fn, **kwargs)
        self._min_columns = None if min_ready is None else columns_wanted(min_ready, self.batch_B)
        self._spin_seconds = None if spin_seconds is None else _seconds(spin_seconds)
        is_word = isinstance(serve_envs, str) and serve_envs == "auto"
        is_count = isinstance(serve_envs, int | np.integer) and not isinstance(serve_envs, bool)
        if not is_word and not (is_count and 0 <= int(serve_envs) < self.batch_B):
            raise ConfigError(
                'serve_envs must be "auto" or a number of environments from 0 to '
                f"batch_B - 1 = {self.batch_B - 1}, got {serve_envs!r}"
            )
        if server not in ("caller", "process"):
            raise ConfigError(f'server must be "caller" or "process", got {server!r}')
        if not isinstance(compile_model, bool | Mapping):
            raise ConfigError(f"compile_model must be True, False or arguments of torch.compile, got {compile_model!r}")
        options = {} if isinstance(compile_model, bool) else dict(compile_model)
        self._compile_options = None if compile_model is False else options
        self._is_process = server == "process"
        if self._is_process and serve_envs:
            raise ConfigError(
                f'serve_envs={serve_envs!r} is for server="caller": a server that is a process of its own steps no '
                "environments"
            )
        self._serve_envs: int | str = serve_envs if isinstance(serve_envs, str) else int(serve_envs)

    @property
    def server_stats(self) -> ServerStats:
        """How many environments the agent has acted for at once, and where its time went."""
        self._require_initialized("server_stats")
        totals = self._allocation.totals
        assert totals is not None
        return totals.stats

    def _finish(self) -> tuple[Samples, list[TrajInfo]]:
        batch = super()._finish()
        if self._is_process:  # it began a moment after `start_samples`, and what it took over then is what counts
            self._orders.policy_version = self._allocation.control.version(len(self._plans))
        return batch

    def _readiness(self) -> Readiness:
        if self._min_columns is None:
            return LockStep()
        return FirstReady(self._min_columns, [len(plan.columns) for plan in self._plans].__getitem__)

    @property
    def _keeps_some(self) -> bool:
        return self._serve_envs != 0 and self.batch_B > 1

    @property
    def _most_workers(self) -> int:
        """So many that each has an environment."""
        if not self._keeps_some:
            return self.batch_B
        return self.batch_B - (1 if self._serve_envs == "auto" else int(self._serve_envs))

    def _n_workers(self, mask: Sequence[int]) -> int:
        if self._keeps_some and self.config.n_workers is None:
            return max(1, min(len(mask) - 1, self._most_workers))
        return min(super()._n_workers(mask), self._most_workers)

    def _kept(self, n_workers: int) -> tuple[int, int]:
        if not self._keeps_some:
            return 0, 0
        n_envs = self.batch_B // (n_workers + 1) if self._serve_envs == "auto" else int(self._serve_envs)
        return n_envs, self.config.eval_n_envs * n_envs // self.batch_B

    def _make_team(self, allocation: Allocation) -> Team:
        plans, config, job = self._plans, self.config, allocation.job
        spin = SPIN_SECONDS if self._spin_seconds is None else self._spin_seconds
        server_job = ServerJob(
            agent=self._agent.runtime.server_copy(),
            plans=plans,
            readiness=self._readiness(),
            seed=job.seed,
            world_size=job.world_size,
            spin_seconds=spin,
            compile_options=self._compile_options,
            sign_of_life=min(1.0, (config.step_timeout or 4.0) / 4),
            # A fork inherits what OpenMP believes about threads that are not there, and would wait for them.
            torch_threads=1 if config.start_method == "fork" else threads_here(),
        )
        job = replace(job, agent=RemoteAgent(self._agent))
        rules = crew_rules(config, spin, with_torch=False)
        if self._is_process:
            all_plans = [*plans, server_plan(plans, server_job.torch_threads)]
            return WorkerPool(all_plans, ServedJob(job, server_job), allocation.state, rules)
        server = InferenceServer(server_job, allocation.state)
        own = LocalWorker(plans[-1], allocation.state) if self._keeps_some else None
        try:
            crew = WorkerPool(plans[:-1] if own else plans, job, allocation.state, rules)
            return ServedCrew(crew, server, allocation.control, own, job)
        except BaseException:
            server.close()
            raise


def _seconds(spin_seconds: Any) -> float:
    is_number = isinstance(spin_seconds, numbers.Real) and not isinstance(spin_seconds, bool)
    if not (is_number and 0 <= spin_seconds <= _MOST_SPIN_SECONDS):
        raise ConfigError(
            f"spin_seconds must be a number of seconds from 0 to {_MOST_SPIN_SECONDS}, got {spin_seconds!r}"
        )
    return float(spin_seconds)


class AlternatingSampler(GpuSampler):
    """The workers are divided into two halves: one steps its environments while the other's actions are computed.

    By default there are two workers to every CPU, one of each half. Within a half, the agent acts for all environments
    together.

    Args beside those of `GpuSampler`, of which `min_ready` has no place here:
        overlap: a half goes on as soon as its actions are computed. False: only one half steps at a time, so that it
            has the CPUs to itself; the other's actions wait until it has come back.
    """

    def __init__(self, env_fn: EnvFn, *, overlap: bool = True, **kwargs: Any) -> None:
        if kwargs.get("min_ready") is not None:
            raise ConfigError("AlternatingSampler serves halves in turn: min_ready is for GpuSampler")
        super().__init__(env_fn, **kwargs)
        if not isinstance(overlap, bool | np.bool_):
            raise ConfigError(f"overlap must be True or False, got {overlap!r}")
        self._overlap = bool(overlap)
        if self._most_workers < 2:
            kept = f" and serve_envs={self._serve_envs!r}" if self._keeps_some else ""
            raise ConfigError(
                f"AlternatingSampler needs at least two environments for its workers, got batch_B={self.batch_B}{kept}"
            )
        if self.config.n_workers == 1:
            raise ConfigError("AlternatingSampler needs at least two workers, got n_workers=1: leave it out, or use 2")

    def _n_workers(self, mask: Sequence[int]) -> int:
        return max(2, min(self.config.n_workers or 2 * max(1, len(mask)), self._most_workers))

    def _readiness(self) -> Readiness:
        ranks = range(len(self._plans))
        middle = len(ranks) - len(ranks) // 2
        return Alternating((ranks[:middle], ranks[middle:]), overlap=self._overlap)

    def _make_plans(self, affinity: Affinity, rank: int) -> tuple[WorkerPlan, ...]:
        mask = usable_cpus()
        if affinity.cpus is None and affinity.pin and mask:
            # Worker i of the one half shares its CPU with worker i of the other.
            n_workers = self._n_workers(mask)
            middle = n_workers - n_workers // 2
            affinity = replace(affinity, cpus=[mask[i % middle % len(mask)] for i in range(n_workers)])
        return super()._make_plans(affinity, rank)
