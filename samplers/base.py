"""The sampler: what the user holds. States, calls and their order; subclasses supply the workers."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from penstock.agents import Agent
from penstock.buffers import Samples
from penstock.collectors import BaseEvalCollector, Collector, EvalCollector, ResetCollector, TrajInfo
from penstock.envs import EnvFn, InfoWanted, fresh_seed
from penstock.envs.calls import EnvCall
from penstock.errors import ConfigError, SamplerBrokenError, SamplerStateError
from penstock.samplers.allocation import Allocation, allocate
from penstock.samplers.config import EnvKwargs, SamplerConfig
from penstock.samplers.orders import Orders
from penstock.samplers.results import Deliveries
from penstock.samplers.state import LIFETIME, SamplerState
from penstock.samplers.stats import SamplerStats, worker_stats
from penstock.workers.arguments import integer
from penstock.workers.call_guard import Calls
from penstock.workers.interrupts import interrupts
from penstock.workers.plan import Affinity, WorkerPlan
from penstock.workers.team import Team

__all__ = ["Sampler"]

_Self = TypeVar("_Self", bound="Sampler")
_MAX_SHOWN = 16  # workers in a repr


class Sampler(ABC):
    """Samples batches `[batch_T, batch_B]` from `batch_B` environments.

    Args:
        env_fn: a callable that returns a `gymnasium.Env`, an environment id, or a list of `batch_B`
            callables. Lambdas and closures are fine. It is called once more in the main process, to read
            the spaces.
        env_kwargs: arguments for `env_fn`: one dict, or a list of `batch_B` dicts.
        batch_T: time steps per batch.
        batch_B: environments per batch.
        n_workers: worker processes; by default one per CPU of this process's mask. Never more than
            `batch_B`. `SerialSampler` has one worker whatever is given.
        collector_cls: the `Collector` subclass that runs in the workers.
        max_decorrelation_steps: each environment makes between 0 and this many random steps before
            the first batch.
        traj_info_cls: `TrajInfo` or a subclass of it.
        eval_n_envs: evaluation environments, in the same workers; 0 for none.
        eval_max_steps: steps of one evaluation at most, all its environments together.
        eval_max_trajectories: an evaluation also ends soon after this many have finished; the infos
            returned may be a few more.
        eval_episodes: run exactly this many whole episodes instead, each environment a fixed share of them,
            so that short ones are not favoured. What `eval_max_steps` cuts short is counted in a
            `RuntimeWarning`.
        eval_env_kwargs: as `env_kwargs`, for the evaluation environments; by default the same. Of lists,
            for env_fn too, the first entry then stands for all.
        eval_collector_cls: the `BaseEvalCollector` subclass that evaluates.
        start_method: "forkserver", "spawn" or "fork".
        step_timeout: seconds that a worker may go without progress (an environment step, a reset, an
            agent step) before `WorkerTimeoutError`; None waits for ever, as long as the worker lives.
        start_timeout: the same, while environments are built and reset for the first time.
        on_worker_failure: "raise" breaks the sampler when a worker raises, dies or hangs. "restart" replaces
            the worker: it builds its environments anew, with fresh but reproducible random streams, and
            collects its columns of the running batch again from the first step; no other column is touched.
        max_restarts: replacements within `restart_window` seconds at most; one more raises, with the history.
        restart_window: seconds.
        observation_dtype: record floating-point observations in this dtype (say, `np.float32`) instead
            of that of the space.
        record_final_obs: whether to record the last observation of each episode (`env.final_obs`),
            which takes as much memory as the observations.
        env_info: which entries of `info` to record as `samples.env.env_info`: names (`"stats.speed"` for nested
            ones), a dict of names and examples of their values, or True for every numeric one that a step of
            an example environment shows. `env_info._name` is True where `name` was given.
        check_finite: refuse NaN and inf in rewards and floating-point observations, with a `SpaceError`
            that names field, environment and value.
        debug: ask the spaces whether they contain each action before the environment gets it, and each
            observation. Slow. Shapes, dtypes and structure are checked in any case.

    `policy_version` counts the parameters' versions: that of the batch that is running, or was last collected.

    Raises `ConfigError` for arguments that cannot work.
    """

    def __init__(
        self,
        env_fn: EnvFn,
        *,
        env_kwargs: EnvKwargs = None,
        batch_T: int,
        batch_B: int,
        n_workers: int | None = None,
        collector_cls: type[Collector] = ResetCollector,
        max_decorrelation_steps: int = 100,
        traj_info_cls: type[TrajInfo] = TrajInfo,
        eval_n_envs: int = 0,
        eval_max_steps: int = 10_000,
        eval_max_trajectories: int | None = None,
        eval_episodes: int | None = None,
        eval_env_kwargs: EnvKwargs = None,
        eval_collector_cls: type[BaseEvalCollector] = EvalCollector,
        start_method: str = "forkserver",
        step_timeout: float | None = None,
        start_timeout: float = 120.0,
        on_worker_failure: str = "raise",
        max_restarts: int = 3,
        restart_window: float = 60.0,
        observation_dtype: npt.DTypeLike | None = None,
        record_final_obs: bool = True,
        env_info: InfoWanted = False,
        check_finite: bool = False,
        debug: bool = False,
    ) -> None:
        # First: repr and shutdown work even if the rest fails.
        self._calls = Calls(LIFETIME, of_this_process=self._shared_memory)
        arguments = {name: value for name, value in locals().items() if name in SamplerConfig.__dataclass_fields__}
        self.config = SamplerConfig(**arguments)
        self.batch_T, self.batch_B = self.config.batch_T, self.config.batch_B
        #: The seed in use, for the record where none was given.
        self.seed: int | None = None
        self._plans: tuple[WorkerPlan, ...] = ()

    # ---- for subclasses --------------------------------------------------------------------

    #: Whether workers are other processes, so that memory must be shared.
    _shared_memory = True

    #: Whether one agent acts for the environments of all workers, which hold none then.
    _central = False

    @abstractmethod
    def _make_plans(self, affinity: Affinity, rank: int) -> tuple[WorkerPlan, ...]:
        """Divide the environments among workers."""

    @abstractmethod
    def _make_team(self, allocation: Allocation) -> Team:
        """Start the workers; `wait_out` for their start-up follows."""

    # ---- initialize ------------------------------------------------------------------------

    def initialize(
        self,
        agent: Agent,
        *,
        seed: int | None = None,
        affinity: Affinity | Sequence[int | Sequence[int]] | None = None,
        bootstrap_value: bool = False,
        traj_info_kwargs: Mapping[str, Any] | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> Samples:
        """Allocate the samples buffer, start the workers and wait until all are ready.

        Args:
            agent: initialized here from the environment's spaces, unless it already was.
            seed: fixes every random stream; None takes a fresh one (see `sampler.seed`).
            affinity: CPUs per worker, or an `Affinity`. None pins worker i to the i-th CPU of this
                process's own mask.
            bootstrap_value: record `agent.bootstrap_value` and `agent.final_value`.
            traj_info_kwargs: arguments of `traj_info_cls`, for example `{"discount": 0.99}`.
            rank, world_size: this sampler's index among several on many machines, and their number;
                `env_rank` is `rank * batch_B + b`.

        Returns an example of every recorded field, without the leading dimensions.

        Raises `ConfigError`, `SpaceError`, or a `SamplerBrokenError` if a worker fails to start.
        """
        with self._calls.expecting("initialize", SamplerState.CREATED):
            rank, world_size = integer("rank", rank), integer("world_size", world_size, 1, 2**31)
            if not 0 <= rank < world_size:
                raise ConfigError(f"rank must be in range(world_size), got rank={rank!r}, world_size={world_size!r}")
            seed = seed if seed is None else integer("seed", seed, 0, None)
            if not isinstance(affinity, Affinity):
                affinity = Affinity(cpus=affinity)
            self.seed = fresh_seed() if seed is None else seed
            self._plans = self._make_plans(affinity, rank)
            self._agent = agent
            with interrupts.passing():  # the user's code runs here, and nothing is begun that must be ended
                allocation = allocate(
                    self.config,
                    self._plans,
                    agent,
                    seed=self.seed,
                    bootstrap_value=bootstrap_value,
                    traj_info_kwargs=traj_info_kwargs,
                    world_size=world_size,
                    shared=self._shared_memory,
                    central=self._central,
                )
            self._allocation = allocation
            self._deliveries = Deliveries(self._plans, allocation.control, allocation.rings, self.config.traj_info_cls)
            self.observation_space: gym.Space[Any] = agent.observation_space
            self.action_space: gym.Space[Any] = agent.action_space
            #: The same memory as the torch views that `obtain_samples` returns, as numpy arrays.
            self.samples_np: Samples = allocation.buffer.samples
            self._samples = self.samples_np.torch()
            try:
                self._team = self._make_team(allocation)
                # Runs when this object is collected and at exit, before multiprocessing joins children.
                self._finalizer = Finalize(self, _close, (self._team, allocation), exitpriority=100)
                self._orders = Orders(self._team, allocation, self._deliveries)
                self._orders.wait_for_start()
            except BaseException as error:
                if isinstance(error, SamplerBrokenError):
                    self._calls.break_with(error)
                if "_team" in vars(self):
                    self._team.close(broken=True)
                self._give_back()
                raise
            self._calls.state = SamplerState.READY
            example: Samples = self.samples_np[0, 0].copy()
            return example

    # ---- sampling --------------------------------------------------------------------------

    def obtain_samples(self, itr: int) -> tuple[Samples, list[TrajInfo]]:
        """Collect one batch.

        The samples are views of shared memory: THE NEXT BATCH OVERWRITES THEM. `samples.copy()` keeps
        one. Returns torch tensors `[batch_T, batch_B, ...]` and the trajectories that finished in this
        batch, ordered by time step, then env_rank.

        Raises a `SamplerBrokenError` if a worker fails; the sampler is of no further use then.
        """
        with self._calls.expecting("obtain_samples", SamplerState.READY):
            self._start(itr)
            return self._finish()

    def start_samples(self, itr: int) -> None:
        """Begin a batch and return; `wait_samples` gives it. The samples are being overwritten from now on."""
        with self._calls.expecting("start_samples", SamplerState.READY):
            self._start(itr)

    def wait_samples(self) -> tuple[Samples, list[TrajInfo]]:
        """Wait for the batch that `start_samples` began; returns as `obtain_samples` does."""
        with self._calls.expecting("wait_samples", SamplerState.SAMPLING):
            return self._finish()

    def _start(self, itr: int) -> None:
        with self._breaking():
            self._orders.begin_batch(integer("itr", itr))
        self._calls.state = SamplerState.SAMPLING

    def _finish(self) -> tuple[Samples, list[TrajInfo]]:
        with self._breaking():
            self._orders.wait_for_batch()
            self._calls.state = SamplerState.READY
            return self._samples, self._orders.take_traj_infos()

    def evaluate_agent(self, itr: int) -> list[TrajInfo]:
        """Run the agent in the evaluation environments and return the trajectories that finished.

        Training is not disturbed: environments, agent state and random streams are separate.
        """
        with self._calls.expecting("evaluate_agent", SamplerState.READY):
            if not self.config.eval_n_envs:
                raise ConfigError("there are no evaluation environments: construct the sampler with eval_n_envs=...")
            itr = integer("itr", itr)
            with self._breaking():
                infos = self._orders.evaluate(itr, self.config.eval_max_trajectories)
            wanted = self.config.eval_episodes
            if wanted is not None and len(infos) < wanted:
                warnings.warn(
                    f"evaluation, itr={itr}: {wanted - len(infos)} of {wanted} episodes had not ended after "
                    f"eval_max_steps={self.config.eval_max_steps} steps of all environments together",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return infos

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """What breaks the sampler in here breaks it for good."""
        try:
            yield
        except SamplerBrokenError as error:
            self._calls.break_with(error)
            self._team.close(broken=True)
            self._give_back()
            raise

    # ---- calls on the environments -----------------------------------------------------------

    def call(self, name: str, /, *args: Any, evaluation: bool = False, **kwargs: Any) -> list[Any]:
        """Call the method `name` of every training (or evaluation) environment, between two batches.

        Wrappers are searched from the outermost inwards. Returns the results by env_rank. Raises
        `EnvCallError` naming the environment if one raises; the sampler goes on working.
        """
        return self._perform(EnvCall("call", name, evaluation, args, kwargs))

    def get_attr(self, name: str, /, *, evaluation: bool = False) -> list[Any]:
        """The attribute `name` of every environment; see `call`."""
        return self._perform(EnvCall("get_attr", name, evaluation))

    def set_attr(self, name: str, /, value: Any, *, evaluation: bool = False) -> None:
        """Set the attribute `name` of every environment: to `value`, or, if that is a list or a tuple, each to
        its own. A worker that replaces another builds its environments anew, without what was set here."""
        n_envs = self.config.eval_n_envs if evaluation else self.batch_B
        values = value if isinstance(value, list | tuple) else [value] * n_envs
        if len(values) != n_envs:
            raise ConfigError(f"set_attr({name!r}) got {len(values)} values for {n_envs} environments")
        self._perform(EnvCall("set_attr", name, evaluation, values=values))

    def _perform(self, call: EnvCall) -> list[Any]:
        with self._calls.expecting(call.verb, SamplerState.READY), self._breaking():
            return self._orders.perform(call)

    # ---- looking at it ---------------------------------------------------------------------

    @property
    def state(self) -> SamplerState:
        """Where the sampler is in its life."""
        return self._calls.state

    @property
    def policy_version(self) -> int | None:
        """The version of the parameters that the running batch, or else the last, was begun with; None before the
        first. `initialize` publishes version 1, each `agent.sync_shared_memory()` one more.

        To be exact, do not synchronize right after `start_samples`: workers take over the newest as they begin.
        """
        return self._orders.policy_version if "_orders" in vars(self) else None

    @property
    def n_workers(self) -> int:
        """Workers in use; 0 before `initialize`."""
        return len(self._plans)

    def stats(self) -> SamplerStats:
        """Where the workers' time went since `initialize`."""
        self._require_initialized("stats")
        control, restarts = self._allocation.control, self._team.restarts
        workers = tuple(worker_stats(plan, control, self._deliveries.delivered, restarts) for plan in self._plans)
        return SamplerStats(workers, self._allocation.nbytes)

    def timeline(self) -> npt.NDArray[np.float64]:
        """Time stamps of the last batch `[n_workers, 2 * batch_T + 1]`, in `time.monotonic` seconds: row t
        of a worker began acting at `[2 * t]` and stepping at `[2 * t + 1]`; the last entry is the end."""
        self._require_initialized("timeline")
        return np.stack([self._allocation.control.timeline(plan.worker_rank) for plan in self._plans])

    def _require_initialized(self, call: str) -> None:
        if "_team" not in vars(self):
            raise SamplerStateError(f"{call} was called before initialize: call sampler.initialize(agent) first")

    def __repr__(self) -> str:
        name, state = type(self).__name__, self._calls.state.name.lower()
        if "config" not in vars(self):
            return f"<{name} {state}>"
        size = f"batch_T={self.batch_T}, batch_B={self.batch_B}"
        if "_team" not in vars(self):
            return f"<{name} {state}: {size}>"
        restarts = f", {n} restarts" if (n := self._team.restarts.total) else ""
        heading = f"<{name} {state}: {size}, seed={self.seed}, {len(self._plans)} workers{restarts}"
        if self.state in (SamplerState.CLOSED, SamplerState.BROKEN):
            return f"{heading}>"
        witnesses = self._team.witnesses()
        lines = [f"  {witness}: {witness.doing}" for witness in witnesses[:_MAX_SHOWN]]
        if len(witnesses) > _MAX_SHOWN:
            lines.append(f"  ... and {len(witnesses) - _MAX_SHOWN} more")
        return "\n".join([heading, *lines]) + ">"

    # ---- the end ---------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the workers and give everything back. Never raises; again, or from any thread, is harmless.

        The last samples stay readable. A worker that does not end within about two seconds is killed
        and named in a `RuntimeWarning`.
        """
        with interrupts.held():
            self._calls.close()
            self._give_back()

    def _give_back(self) -> None:
        if "_allocation" in vars(self):
            self._agent.runtime.unshare_memory(self._allocation.parameters)
            self._allocation.close()
        if "_finalizer" in vars(self) and not self._calls.is_foreign:
            _close(self._team, self._allocation)  # all of it again, should a second Ctrl-C have cut it short
            self._finalizer.cancel()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()


def _close(team: Team, allocation: Allocation) -> None:
    team.close()
    allocation.close()
