"""GpuSampler and AlternatingSampler: one process computes the actions of all environments, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from penstock.agents.remote_agent import RemoteAgent
from penstock.arguments import must_be, number, one_of, true_or_false
from penstock.envs import EnvFn
from penstock.errors import ConfigError
from penstock.samplers.allocation import Allocation
from penstock.samplers.config import SamplerConfig, SamplerOptions
from penstock.samplers.inference_server import InferenceServer, ServerOptions, ServerProgram
from penstock.samplers.readiness import Halves, Readiness, first_half, readiness_maker
from penstock.samplers.refusals import (
    ALTERNATING,
    BATCH_STATE,
    FIRST_READY,
    MIXED_BATCHES,
    SERVER_PROCESS,
    STATES,
    refuse,
)
from penstock.samplers.sampler import Sampler
from penstock.samplers.sampler_plan import SamplerPlan
from penstock.samplers.stats import ServerStats
from penstock.samplers.who_acts import PRELOAD, Acting
from penstock.workers.affinity import cpus_to_fill, threads_here
from penstock.workers.claims import CpuClaims
from penstock.workers.plan import Affinity, PoolOptions
from penstock.workers.pool import WorkerPool
from penstock.workers.program import WorkerProgram
from penstock.workers.spinning import SPIN_SECONDS

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MOST_SPIN_SECONDS = 0.01


class ServerActs(Acting):
    """An inference server acts for the environments of all workers.

    Args:
        place: "caller": it runs in the caller's process, while that waits. "process": it has a process of its own.
        readiness: makes the rule that says for whom it acts next, from the plans of the workers. With `Halves`, two
            workers share each CPU, one of each half, and one CPU is left for the server.
        spin_seconds: the longest time that server and workers spin for each other before they sleep.
        compile_options: arguments of `torch.compile`; None: the model is not compiled.
        mixes_batches: whether the environments that it acts for may be in different batches.
    """

    is_central = True

    def __init__(
        self,
        place: Literal["caller", "process"],
        readiness: Callable[[Sequence[SamplerPlan]], Readiness],
        *,
        spin_seconds: float = SPIN_SECONDS,
        compile_options: Mapping[str, Any] | None = None,
        mixes_batches: bool = False,
    ) -> None:
        self._is_process, self._readiness = place == "process", readiness
        self._in_halves = isinstance(readiness, Halves)
        self._spin_seconds, self._compile_options, self._mixes_batches = spin_seconds, compile_options, mixes_batches
        self._server: InferenceServer | None = None  # if it runs in the caller's process

    @property
    def server(self) -> InferenceServer:
        refuse({STATES: True, SERVER_PROCESS: self._server is None})
        assert self._server is not None
        return self._server

    def count_workers(self, config: SamplerConfig, mask: Sequence[int]) -> int:
        if not self._in_halves:
            return super().count_workers(config, mask)
        return max(2, min(config.n_workers or count_alternating(cpus_to_fill(mask)), config.n_built))

    def assign_cpus(
        self, claims: CpuClaims, affinity: Affinity, n_workers: int, mask: Sequence[int]
    ) -> Sequence[tuple[int, ...]]:
        if self._in_halves and affinity.cpus is None and affinity.pin and mask:
            # Worker i of one half shares its CPU with worker i of the other.
            middle = first_half(n_workers)
            chosen = claims.assign(affinity, middle, mask)
            cpus = [chosen[i % middle] for i in range(n_workers)] if all(chosen) else None
            affinity = replace(affinity, cpus=cpus, pin=bool(cpus))
        return super().assign_cpus(claims, affinity, n_workers, mask)

    def start(self, allocation: Allocation, options: PoolOptions, resources: ExitStack) -> WorkerPool:
        agent, layout = allocation.agents.agents[0], allocation.layout
        plans, readiness = layout.plans, self._readiness(layout.plans)
        mixes_batches = self._mixes_batches and not readiness.needs_all_idle
        refuse({MIXED_BATCHES: mixes_batches, BATCH_STATE: getattr(agent, "record_state", None) == "batch"})
        server_options = ServerOptions.of(
            agent, plans, allocation.program, readiness, self._spin_seconds, self._compile_options
        )
        options = replace(options, spin_seconds=self._spin_seconds, preload=PRELOAD)
        program = replace(allocation.program, agents=(RemoteAgent(agent),))
        programs: list[WorkerProgram] = [program] * len(plans)
        if not self._is_process:
            self._server = server = InferenceServer(server_options, layout.memory)
            resources.callback(server.close)
            data = allocation.worker_data
            return WorkerPool(plans, programs, data, layout.memory, options, resources, server=server)
        server_plan = SamplerPlan(
            worker_rank=len(plans),
            # A fork inherits OpenMP's record of threads that do not exist there, and would wait for them.
            torch_threads=1 if options.start_method == "fork" else threads_here(),
            server_name="the inference server",
        )
        programs, worker_data = [*programs, ServerProgram(server_options)], [*allocation.worker_data, None]
        return WorkerPool([*plans, server_plan], programs, worker_data, layout.memory, options, resources)


def count_alternating(n_cpus: int) -> int:
    """The default number of workers of an `AlternatingSampler`: two per CPU, except that of the process that acts."""
    return 2 * max(1, n_cpus - 1)


class GpuSampler(Sampler):
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
        self._readiness: Callable[[Sequence[SamplerPlan]], Readiness] = readiness_maker(
            min_ready, max_wait, self.batch_B
        )
        given = SPIN_SECONDS if spin_seconds is None else spin_seconds
        self._spin_seconds = number("spin_seconds", given, _MOST_SPIN_SECONDS)
        fits = isinstance(compile_model, bool | Mapping)
        must_be("compile_model", compile_model, fits, "True, False or arguments of torch.compile")
        compile_options = {} if isinstance(compile_model, bool) else dict(compile_model)
        self._compile_options = None if compile_model is False else compile_options
        self._place = one_of("server", server, ("caller", "process"))

    def acting(self) -> Acting:
        """An inference server acts."""
        spin_seconds, compile_options = self._spin_seconds, self._compile_options
        return ServerActs(self._place, self._readiness, spin_seconds=spin_seconds, compile_options=compile_options)

    @property
    def server_stats(self) -> ServerStats:
        """How many environments the agent acted for at once, and where its time and that of the workers went. `print`
        says what most of the time is, and what to change."""
        return self._require_run("server_stats").server_stats()


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
        refuse({ALTERNATING: True, FIRST_READY: not {"min_ready", "max_wait"}.isdisjoint(options)})
        super().__init__(env_fn, server=server, compile_model=compile_model, spin_seconds=spin_seconds, **options)
        self._readiness = Halves(true_or_false("overlap", overlap))
        if self.config.n_built < 2:
            raise ConfigError(f"AlternatingSampler needs at least two environments, got batch_B={self.batch_B}")
        if self.config.n_workers == 1:
            raise ConfigError("AlternatingSampler needs at least two workers, got n_workers=1: leave it out, or use 2")
