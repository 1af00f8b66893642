"""GpuSampler and AlternatingSampler: one process computes the actions of all environments, a batch at a time."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from penstock.agents import Agent
from penstock.agents.remote_agent import RemoteAgent
from penstock.arguments import true_or_false
from penstock.buffers import Samples
from penstock.collectors import TrajInfo
from penstock.envs import EnvFn
from penstock.errors import ConfigError
from penstock.samplers.allocation import Allocation
from penstock.samplers.config import SamplerOptions
from penstock.samplers.inference_server import InferenceServer, ServerOptions, ServerProgram
from penstock.samplers.parallel import ParallelSampler, pool_options
from penstock.samplers.readiness import Alternating, Readiness, readiness_maker
from penstock.samplers.refusals import SERVER_PROCESS, STATES, refuse
from penstock.samplers.sampler_plan import EnvRange, SamplerPlan
from penstock.samplers.stats import ServerStats
from penstock.workers.affinity import cpus_to_fill, threads_here, usable_cpus
from penstock.workers.plan import Affinity, PoolOptions
from penstock.workers.pool import WorkerPool
from penstock.workers.program import WorkerProgram
from penstock.workers.spinning import SPIN_SECONDS

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MOST_SPIN_SECONDS = 0.01


class GpuSampler(ParallelSampler):
    """The workers only step environments; one process computes the actions of all of them.

    Use it when the policy needs a GPU, or when environments differ in speed. On CPUs alone, `ParallelSampler` is
    faster, also with large networks. The agent acts on the device that its model is on when the sampler is initialized,
    with a copy that follows `agent.sync_shared_memory()`. Workers need no torch.

    By default the caller's process acts, in `wait_samples`. Between `start_samples` and `wait_samples` the workers wait
    for their first actions. With `server="process"` a dedicated process acts, and workers collect the batch while the
    caller trains.

    It has the arguments of `Sampler`, and these:

    Args:
        min_ready: how many environments must wait before the agent acts for them: an integer, or a float up to 1.0 as a
            fraction of all. Slow steps of some then do not delay the others. Each environment still makes
            `batch_T` steps in a batch. None: the agent acts for all of them together.
        max_wait: the longest time in seconds that an environment waits for others. After it, the agent acts for all
            that wait, even if they are fewer than `min_ready`. None: no limit. The samples do not depend on it.
        server: "caller", or "process" for a dedicated process. That is supervised as the workers are, and
            `step_timeout` applies to the agent's steps too. If it fails, the run ends: it keeps noise and state of
            every environment. Its libraries use as many threads as torch does in this process (if forked: one).
        compile_model: run the model through `torch.compile`, with its defaults or with these arguments. It is compiled
            during `initialize`, for all environments together. For other numbers of environments (`min_ready`, halves,
            values at episode ends) torch compiles it again when they first occur; with `server="process"`,
            `step_timeout` must allow for that.
        spin_seconds: the longest time that server and workers spin for each other before they sleep. They spin for
            about twice as long as their recent waits took, or not at all if these took longer than this. By default
            1 ms, at most 10 ms: while they spin they notice nothing else.

    On CPUs, `torch.set_num_threads(1)` in the main process is faster for small policies: while it waits for
    the workers and acts, the main process then avoids the CPUs that workers are pinned to. If the agent has
    `inference="numpy"`, also call `threadpoolctl.threadpool_limits(1)` there.
    """

    _central = True

    def __init__(
        self,
        env_fn: EnvFn,
        *,
        min_ready: int | float | None = None,
        max_wait: float | None = None,
        server: Literal["caller", "process"] = "caller",
        compile_model: bool | Mapping[str, Any] = False,
        spin_seconds: float | None = None,
        **options: Unpack[SamplerOptions],
    ) -> None:
        super().__init__(env_fn, **options)
        self._make_readiness = readiness_maker(min_ready, max_wait, self.batch_B)
        self._spin_seconds = SPIN_SECONDS if spin_seconds is None else _checked_spin_seconds(spin_seconds)
        if server not in ("caller", "process"):
            raise ConfigError(f'server must be "caller" or "process", got {server!r}')
        if not isinstance(compile_model, bool | Mapping):
            raise ConfigError(f"compile_model must be True, False or arguments of torch.compile, got {compile_model!r}")
        compile_options = {} if isinstance(compile_model, bool) else dict(compile_model)
        self._compile_options = None if compile_model is False else compile_options
        self._is_process = server == "process"

    @property
    def server_stats(self) -> ServerStats:
        """How many environments the agent acted for at once, and where its time and that of the workers went. `print`
        says what most of the time is, and what to change."""
        return self._server_stats()

    def _finish(self) -> tuple[Samples, list[TrajInfo]]:
        batch = super()._finish()
        if self._is_process:  # it began a little later than `start_samples`, with the parameters of that time
            self.policy_version = self._memory.control.version(len(self._plans))
        return batch

    # ---- resuming --------------------------------------------------------------------------

    def _server_agent(self) -> Agent | None:
        refuse({STATES: True, SERVER_PROCESS: self._is_process})
        return self._server.agent

    def _resume_server(self, generation: int) -> None:
        self._server.resume(generation)

    @property
    def _server(self) -> InferenceServer:
        self._require_pool("the inference server")
        return self._server_here

    # ---- the pool --------------------------------------------------------------------------

    def _readiness(self) -> Readiness:
        return self._make_readiness(self._plans)

    def _make_pool(self, allocation: Allocation, resources: ExitStack) -> WorkerPool:
        plans, memory, agent = self._plans, allocation.memory, self._agent
        server_options = ServerOptions.of(
            agent,
            plans,
            allocation.program,
            readiness=self._readiness(),
            spin_seconds=self._spin_seconds,
            compile_options=self._compile_options,
        )
        options = pool_options(self.config, allocation, self._spin_seconds, preload=())
        if self._is_process:
            return pool_with_server(agent, plans, allocation, options, resources, server_options)
        program = replace(allocation.program, agents=(RemoteAgent(agent),))
        server = InferenceServer(server_options, memory)
        resources.callback(server.close)
        self._server_here = server
        programs, worker_data = [program] * len(plans), allocation.worker_data
        return WorkerPool(plans, programs, worker_data, memory, options, resources, server=server)


def pool_with_server(
    agent: Agent,
    plans: Sequence[SamplerPlan],
    allocation: Allocation,
    options: PoolOptions,
    resources: ExitStack,
    server_options: ServerOptions,
) -> WorkerPool:
    """Start the workers, and a process that acts for all of them."""
    server_plan = SamplerPlan(
        worker_rank=len(plans),
        # A fork inherits OpenMP's record of threads that do not exist there, and would wait for them.
        torch_threads=1 if options.start_method == "fork" else threads_here(),
        server_name="the inference server",
    )
    program = replace(allocation.program, agents=(RemoteAgent(agent),))
    programs: list[WorkerProgram] = [*[program] * len(plans), ServerProgram(server_options)]
    worker_data = [*allocation.worker_data, None]
    return WorkerPool([*plans, server_plan], programs, worker_data, allocation.memory, options, resources)


def _checked_spin_seconds(spin_seconds: Any) -> float:
    is_number = isinstance(spin_seconds, numbers.Real) and not isinstance(spin_seconds, bool)
    if not (is_number and 0 <= spin_seconds <= _MOST_SPIN_SECONDS):
        raise ConfigError(
            f"spin_seconds must be a number of seconds from 0 to {_MOST_SPIN_SECONDS}, got {spin_seconds!r}"
        )
    return float(spin_seconds)


def count_alternating(n_cpus: int) -> int:
    """The default number of workers of an `AlternatingSampler`: two per CPU, except that of the process that acts."""
    return 2 * max(1, n_cpus - 1)


class AlternatingSampler(GpuSampler):
    """The workers form two halves: one steps its environments while the actions of the other are computed.

    By default there are two workers per CPU, one of each half, and one CPU is left for the process that acts: it acts
    nearly all the time. Within a half, the agent acts for all environments together.

    It has the arguments of `GpuSampler` except `min_ready` and `max_wait`, and this one:

    Args:
        overlap: a half continues as soon as its actions are computed. False: only one half steps at a time, so that it
            has the CPUs for itself; the actions of the other wait until it has finished.
    """

    def __init__(
        self,
        env_fn: EnvFn,
        *,
        overlap: bool = True,
        server: Literal["caller", "process"] = "caller",
        compile_model: bool | Mapping[str, Any] = False,
        spin_seconds: float | None = None,
        **options: Unpack[SamplerOptions],
    ) -> None:
        if given := [name for name in ("min_ready", "max_wait") if name in options]:
            raise ConfigError(f"AlternatingSampler serves halves in turn: {given[0]} is for GpuSampler")
        super().__init__(env_fn, server=server, compile_model=compile_model, spin_seconds=spin_seconds, **options)
        self._overlap = true_or_false("overlap", overlap)
        if self.config.n_built < 2:
            raise ConfigError(f"AlternatingSampler needs at least two environments, got batch_B={self.batch_B}")
        if self.config.n_workers == 1:
            raise ConfigError("AlternatingSampler needs at least two workers, got n_workers=1: leave it out, or use 2")

    def _count_workers(self, mask: Sequence[int]) -> int:
        return max(2, min(self.config.n_workers or count_alternating(cpus_to_fill(mask)), self.config.n_built))

    def _readiness(self) -> Readiness:
        ranks = range(len(self._plans))
        middle = len(ranks) - len(ranks) // 2
        return Alternating((ranks[:middle], ranks[middle:]), overlap=self._overlap)

    def _make_plans(self, affinity: Affinity, env_range: EnvRange, resources: ExitStack) -> tuple[SamplerPlan, ...]:
        mask = usable_cpus()
        if affinity.cpus is None and affinity.pin and mask:
            # Worker i of one half shares its CPU with worker i of the other.
            n_workers = self._count_workers(mask)
            middle = n_workers - n_workers // 2
            chosen = self._cpu_claims.assign(affinity, middle, mask)
            cpus = [chosen[i % middle] for i in range(n_workers)] if all(chosen) else None
            affinity = replace(affinity, cpus=cpus, pin=bool(cpus))
        return super()._make_plans(affinity, env_range, resources)
