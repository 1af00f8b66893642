"""GpuSampler and AlternatingSampler: one process computes the actions of all environments, a batch at a time."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from penstock.agents import Agent
from penstock.buffers.step_buffer import StepBuffer
from penstock.collectors.central import RemoteAgent
from penstock.envs import ColumnStreams, EnvFn, Purpose
from penstock.errors import ConfigError
from penstock.samplers.action_server import ActionServer, Desk, ServerStats
from penstock.samplers.allocation import Allocation
from penstock.samplers.local_worker import LocalWorker
from penstock.samplers.parallel import ParallelSampler, crew_rules
from penstock.samplers.readiness import Alternating, FirstReady, LockStep, Readiness, columns_wanted
from penstock.samplers.served_crew import ServedCrew
from penstock.samplers.worker import Job
from penstock.workers.affinity import usable_cpus
from penstock.workers.crew import Crew
from penstock.workers.plan import Affinity, WorkerPlan
from penstock.workers.spinning import SPIN_SECONDS
from penstock.workers.team import Team

__all__ = ["AlternatingSampler", "GpuSampler"]


class GpuSampler(ParallelSampler):
    """The workers step environments only; the agent acts for all of them at once, in the caller's process.

    Use it when the policy is too large for a CPU core, or when environments are of uneven speed. The agent acts on
    the device that its model is on when the sampler is initialized, with a copy that follows
    `agent.sync_shared_memory()` as every sampler's copies do. Workers need no torch.

    `obtain_samples` and `wait_samples` compute the actions: nothing is sampled between `start_samples` and
    `wait_samples` but the steps that were under way.

    Args beside those of every sampler:
        min_ready: the agent acts as soon as this many environments wait for it (a whole number), or this fraction
            of them (a float up to 1.0), so that slow steps of some hold up nobody else. Each environment still makes
            `batch_T` steps in a batch. None: the agent acts for all of them together.
        serve_envs: environments that the serving process steps itself, beside acting for all. Where CPUs are few this
            saves wake-ups from one to another, which cost as much as several steps. "auto" takes an equal share, and by
            default one worker less. Their errors are told as those of a worker, but a crash or a hang is the caller's.
        spin_seconds: how long server and workers look for each other before they sleep. By default 50 µs
            where there are more CPUs than workers, and not at all otherwise.

    On CPUs, `torch.set_num_threads(1)` in the main process pays for small policies: while it acts, it then keeps to
    CPUs that no worker is pinned to.
    """

    def __init__(
        self,
        env_fn: EnvFn,
        *,
        min_ready: int | float | None = None,
        serve_envs: int | Literal["auto"] = 0,
        spin_seconds: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(env_fn, **kwargs)
        self._min_columns = None if min_ready is None else columns_wanted(min_ready, self.batch_B)
        self._spin_seconds = None if spin_seconds is None else _seconds(spin_seconds)
        is_count = isinstance(serve_envs, int) and not isinstance(serve_envs, bool) and 0 <= serve_envs < self.batch_B
        if not is_count and serve_envs != "auto":
            raise ConfigError(
                'serve_envs must be "auto" or a number of environments from 0 to '
                f"batch_B - 1 = {self.batch_B - 1}, got {serve_envs!r}"
            )
        self._serve_envs: int | str = serve_envs

    @property
    def server_stats(self) -> ServerStats:
        """How many environments the agent has acted for at once, and where its time went."""
        self._require_initialized("server_stats")
        return self._server.stats

    def _readiness(self) -> Readiness:
        if self._min_columns is None:
            return LockStep()
        return FirstReady(self._min_columns, lambda rank: len(self._plans[rank].columns))

    @property
    def _keeps_some(self) -> bool:
        return self._serve_envs != 0 and self.batch_B > 1

    def _n_workers(self, mask: Sequence[int]) -> int:
        if self._keeps_some and self.config.n_workers is None:
            return max(1, min(len(mask) - 1, self.batch_B - 1))
        return super()._n_workers(mask)

    def _kept(self, n_workers: int) -> tuple[int, int]:
        if not self._keeps_some:
            return 0, 0
        n_envs = self.batch_B // (n_workers + 1) if self._serve_envs == "auto" else int(self._serve_envs)
        return max(1, n_envs), self.config.eval_n_envs * n_envs // self.batch_B

    def _make_team(self, allocation: Allocation) -> Team:
        plans, spin = self._plans, self._spin_seconds
        if spin is None:
            # Each has a CPU to itself then: the workers, and the server.
            n_processes = len(plans) + (not self._keeps_some)
            spin = SPIN_SECONDS if len(usable_cpus()) >= n_processes else 0.0
        arrays, n_evals = allocation.buffer.memory.arrays, self.config.eval_n_envs
        steps = StepBuffer(arrays, self.batch_B, shared=True)
        eval_steps = StepBuffer(arrays, n_evals, shared=True) if n_evals else None
        agent, job = self._agent.server_copy(), allocation.job
        agent.attach(allocation.parameters)
        agent.pull_shared_memory()
        train = _desk(agent, job, plans, steps, Purpose.ACTION)
        evaluation = None if eval_steps is None else _desk(agent, job, plans, eval_steps, Purpose.EVAL_ACTION)
        self._server = ActionServer(
            allocation.control, plans, job.seed, (train, evaluation), self._readiness(), spin_seconds=spin
        )
        job = replace(job, agent=RemoteAgent(self._agent))
        state = replace(allocation.state, steps=steps, eval_steps=eval_steps)
        rules = crew_rules(self.config, spin, with_torch=False)
        own, server = LocalWorker(plans[-1], state) if self._keeps_some else None, self._server
        crew = Crew(plans[:-1] if own else plans, job, state, rules, on_replace=lambda plan, pipe: server.replace(plan))
        return ServedCrew(crew, self._server, allocation.control, own, job, state)


def _seconds(spin_seconds: Any) -> float:
    is_number = isinstance(spin_seconds, numbers.Real) and not isinstance(spin_seconds, bool)
    if not (is_number and math.isfinite(spin_seconds) and spin_seconds >= 0):
        raise ConfigError(f"spin_seconds must be a number of seconds, 0 or more, got {spin_seconds!r}")
    return float(spin_seconds)


def _desk(agent: Agent, job: Job, plans: Sequence[WorkerPlan], steps: StepBuffer, purpose: Purpose) -> Desk:
    is_eval = purpose is Purpose.EVAL_ACTION
    shares = [plan.eval_columns if is_eval else plan.columns for plan in plans]
    ranks = [plan.eval_env_ranks if is_eval else plan.env_ranks for plan in plans]
    env_ranks = range(ranks[0].start, ranks[-1].stop)
    copy = agent.column_copy(ColumnStreams(job.seed, env_ranks).rngs(purpose))
    copy.set_columns(env_ranks, len(env_ranks) * job.world_size)
    return Desk(copy, steps, shares)


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
        if self.batch_B < 2:
            raise ConfigError(f"AlternatingSampler needs at least two environments, got batch_B={self.batch_B}")
        if self.config.n_workers == 1:
            raise ConfigError("AlternatingSampler needs at least two workers, got n_workers=1: leave it out, or use 2")

    def _n_workers(self, mask: Sequence[int]) -> int:
        return max(2, min(self.config.n_workers or 2 * max(1, len(mask)), self.batch_B))

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
