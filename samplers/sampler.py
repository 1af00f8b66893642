"""The sampler: what the user holds. Its states and calls. Subclasses choose who acts, and when: two are here."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from penstock.agents import Agent, FunctionAgent
from penstock.arguments import integer, one_of, true_or_false
from penstock.buffers import Samples
from penstock.buffers.object_pipe import ObjectMessage
from penstock.buffers.samples import for_each_policy
from penstock.collectors import TrajInfo
from penstock.envs import EnvFn, fresh_seed
from penstock.envs.calls import EnvCall, results
from penstock.envs.recorded_episode import RecordedEpisode
from penstock.envs.seeding import EpisodePlan
from penstock.errors import ConfigError, SamplerStateError
from penstock.samplers.config import SamplerConfig, SamplerOptions, SamplerState, require_env_fn, show_arguments
from penstock.samplers.refusals import NEW_CHOOSER, RESTART, refuse
from penstock.samplers.results import evaluate, warn_if_unfinished
from penstock.samplers.run import Run
from penstock.samplers.sampler_plan import EnvRange
from penstock.samplers.schedule import OnDemand, Schedule
from penstock.samplers.stats import SamplerStats, describe
from penstock.samplers.who_acts import Acting, CallerSteps, WorkersAct, pool_options
from penstock.workers import sigint, tracing
from penstock.workers.call_guard import CallGuard, GuardedCall
from penstock.workers.control import Command
from penstock.workers.launcher import naming_descriptor_limit
from penstock.workers.marking import marked
from penstock.workers.plan import Affinity

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self, Unpack

    from penstock.samplers.allocation import SeatingPlan
    from penstock.samplers.resuming import ResumeReport
    from penstock.samplers.seating import PolicyOf

#: The states in which evaluations and calls on the environments are allowed.
_IDLE = SamplerState.READY, SamplerState.RUNNING, SamplerState.PAUSED


class Sampler(ABC):
    """Samples batches `[batch_T, batch_B]` from `batch_B` environments.

    Raises `ConfigError` for arguments that cannot work.
    """

    #: Of options whose default is another one in this class.
    _defaults: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        show_arguments(cls, Sampler)

    def __new__(cls, *args: object, **options: Any) -> Self:
        require_env_fn(cls.__name__, options)
        return super().__new__(cls)

    def __init__(self, env_fn: EnvFn, **options: Unpack[SamplerOptions]) -> None:
        # These two come first, so that repr and shutdown work even if the rest fails.
        self._guard = CallGuard(SamplerState, "sampler", "shutdown", owned_by_process=False)
        self._run: Run | None = None
        self.config = SamplerConfig.of(type(self).__name__, env_fn, options)
        self.batch_T, self.batch_B = self.config.batch_T, self.config.batch_B
        #: The seed in use; useful where none was given.
        self.seed: int | None = None
        #: In a sampler that replaces a lost one: how often the environments have been built again. It is set
        #: before `initialize`.
        self.generation = 0
        # In the sampler of a shard: who sits where in its environments, as the driver says. The driver also makes the
        # trajectory infos.
        self._seats: SeatingPlan | None = None

    # ---- for subclasses --------------------------------------------------------------------

    @abstractmethod
    def acting(self) -> Acting:
        """Who acts: `initialize` calls this once. Return a `WorkersAct`, a `ServerActs`, or your own `Acting`."""

    def schedule(self) -> Schedule:
        """When the workers collect: `initialize` calls this once. By default on demand."""
        return OnDemand()

    # ---- initialize ------------------------------------------------------------------------

    def initialize(
        self,
        agent: Agent | Mapping[str, Any],
        *,
        policy_of: PolicyOf | None = None,
        record: Sequence[str] | None = None,
        seed: int | None = None,
        affinity: Affinity | Sequence[int | Sequence[int]] | None = None,
        bootstrap_value: bool = False,
        traj_info_kwargs: Mapping[str, Any] | None = None,
        rank: int = 0,
        world_size: int = 1,
        first_env_rank: int | None = None,
        n_envs: int | None = None,
        first_eval_env_rank: int | None = None,
        n_eval_envs: int | None = None,
    ) -> Any:
        """Allocate the samples buffer, start the workers and wait until all are ready.

        Args:
            agent: initialized here from the environment's spaces, unless it already was. With several agents in an
                environment, it plays all of them; or give a dict of agents, the policies by name. A function
                in the dict is a scripted player: see `FunctionAgent`.
            policy_of: with a dict of agents, `policy_of(agent_id)` returns the name of the policy that plays an agent
                of the environment. It may have a second parameter, `env_rank`. In games in turns it may also have
                `game`, the number of the game in this environment, and `rng`, a generator for this seat and game:
                then it is called for each game. By default, the agents' ids are the names.
            record: with a dict of agents, the names of the policies whose decisions are recorded, such as `["main"]`:
                the others, frozen opponents or scripted players, act but are not in the batch, and need no `value`.
                None records all.
            seed: fixes every random stream; None takes a new one (see `sampler.seed`).
            affinity: CPUs per worker, or an `Affinity`. None pins each worker to one CPU that no other run of this
                user on this machine has claimed. If too few CPUs are free, no worker is pinned.
            bootstrap_value: record `agent.bootstrap_value` and `agent.final_value`.
            traj_info_kwargs: arguments of `traj_info_cls`, for example `{"discount": 0.99}`.
            rank, world_size: this sampler's index among several on many machines, and their number; `env_rank` is
                `rank * batch_B + b`.
            first_env_rank, n_envs: the same for samplers of unequal `batch_B`: the `env_rank` of column 0, and the
                number of environments on all machines.
            first_eval_env_rank, n_eval_envs: the same for the evaluation environments.

        Returns an example of every recorded field, without the leading dimensions; with a dict of agents, one for each.

        Raises `ConfigError`, `SpaceError`, or a `SamplerBrokenError` if a worker fails to start.
        """
        # Imported here, with all kinds of environments: a process may only need the class.
        from penstock.samplers.allocation import InitArguments, allocate, checked_traj_info_kwargs
        from penstock.samplers.seating import SHARED

        with GuardedCall(self._guard, "initialize", SamplerState.CREATED):
            given = (first_env_rank, first_eval_env_rank), (n_envs, n_eval_envs)
            env_range = EnvRange.of(self.config.env_counts, rank, world_size, given, self.generation)
            self.seed = seed = fresh_seed() if seed is None else integer("seed", seed, 0, None)
            bootstrap_value = true_or_false("bootstrap_value", bootstrap_value)
            if not isinstance(affinity, Affinity):
                affinity = Affinity(cpus=affinity)
            if isinstance(agent, Mapping):  # a scripted player may be a function
                is_function = {name: not isinstance(part, Agent) and callable(part) for name, part in agent.items()}
                agent = {name: FunctionAgent(part) if is_function[name] else part for name, part in agent.items()}
            agents = dict(agent) if isinstance(agent, Mapping) else {SHARED: agent}
            acting, schedule = self.acting(), self.schedule()
            if acting.has_processes:
                self._guard.own()
            with naming_descriptor_limit(), ExitStack() as resources:
                arguments = InitArguments(
                    config=self.config,
                    agents=agent,
                    plans=acting.plans(self.config, affinity, env_range, resources),
                    seed=seed,
                    env_range=env_range,
                    bootstrap_value=bootstrap_value,
                    traj_info_kwargs=checked_traj_info_kwargs(self.config.traj_info_cls, traj_info_kwargs),
                    shared=acting.has_processes,
                    central=acting.is_central,
                    policy_of=policy_of,
                    record=record,
                    seats=self._seats,
                )
                # Ctrl-C may end this: it runs the user's code, and `resources` undoes the rest.
                with marked, sigint.allowed():
                    allocation = allocate(arguments, resources)
                run = Run(arguments, agents, allocation, acting, schedule, self._guard)
                self._guard.announce(run.memory.control)
                #: The spaces of the agent. With a dict of agents, a dict of the spaces of each.
                self.observation_space = run.by_policy({name: a.observation_space for name, a in agents.items()})
                self.action_space = run.by_policy({name: a.action_space for name, a in agents.items()})
                if acting.has_processes:  # so that a learner on a GPU copies batches at full speed
                    resources.enter_context(run.agent.runtime.page_locked(run.memory.samples.whole))
                allocation = schedule.connect(run, allocation, resources)
                options = pool_options(type(self).__name__, self.config, allocation, has_death_logger=schedule.is_ahead)
                run.pool = acting.start(allocation, options, resources)
            self._run = run
            self._guard.start(self, run.pool)
            self._guard.state = SamplerState.READY
            if self._seats is None:  # a shard may have no column of a policy
                return for_each_policy(lambda arrays: arrays[0, 0].copy(), run.batches.views[0])
            return None

    @property
    def run(self) -> Run:
        """The workers, their memory and what has been counted. Raises `SamplerStateError` before `initialize`."""
        return self._require_run("run")

    def _require_run(self, call: str) -> Run:
        if self._run is None:
            raise SamplerStateError(f"{call} was called before initialize: call sampler.initialize(agent) first")
        return self._run

    @property
    def policy_version(self) -> Any:
        """The version of the parameters at the beginning of the current batch, or of the last batch if none is running.
        None before the first batch. `initialize` publishes version 1. Each `agent.sync_shared_memory()` adds one. If
        you publish right after `start_samples`, the number may be too small: workers load the newest parameters. With
        a dict of agents, a dict of the versions of each."""
        return None if self._run is None else self._run.policy_version

    @property
    def samples_np(self) -> Any:
        """The last batch as `Samples` of numpy arrays. The tensors of `obtain_samples` use the same memory."""
        return self._require_run("samples_np").samples_np

    def seats(self) -> dict[str, list[tuple[int, Any]]]:
        """With several agents in an environment: for each policy, whose its columns are, as (env_rank, agent id). The
        policy that plays all seats is called "agent".

        Raises `ConfigError` if the environments have one agent.
        """
        seating = self._require_run("seats").seating
        if not seating.has_games:
            raise ConfigError("seats is for environments of several agents: here, column b is environment b")
        return seating.by_policy()

    def set_policy_of(self, policy_of: PolicyOf) -> None:
        """From the next game of each environment on, this function says which policy plays which agent. Running games
        are played to their end as they are. It is for a sampler whose first `policy_of` has a parameter `game` or
        `rng`.

        Raises `ConfigError` for a sampler with another one, or with `on_worker_failure="restart"`: a new worker would
        begin with the first function.
        """
        with GuardedCall(self._guard, "set_policy_of", *_IDLE):
            run = self._require_run("set_policy_of")
            refuse({NEW_CHOOSER: True, RESTART: self.config.on_worker_failure == "restart"})
            if run.seating.chooser is None:
                raise ConfigError("set_policy_of needs games in turns, and a first policy_of with game or rng")
            from penstock.samplers.resuming import ChooseMessage

            message = ChooseMessage(run.seating.chooser.like(policy_of))
            run.schedule.pause(run, "set_policy_of")
            run.send(message, "set_policy_of")

    def set_episode_plan(self, plan: EpisodePlan | None) -> None:
        """From the next reset of each training environment on, this function says with which options it begins: see
        `episode_plan`. None: without options. Running episodes go on as they are. A worker that replaces another, and
        a run that continues this one, follow the newest plan.

        Raises `ConfigError` for a sampler without `seed_episodes=True` or a first `episode_plan`.
        """
        with GuardedCall(self._guard, "set_episode_plan", *_IDLE):
            run = self._require_run("set_episode_plan")
            if run.log_reader is None:
                raise ConfigError("set_episode_plan needs a first episode_plan, or seed_episodes=True")
            from penstock.samplers.resuming import PlanMessage

            run.schedule.pause(run, "set_episode_plan")
            run.log_reader.set_plan(plan)
            run.send(PlanMessage(), "set_episode_plan")

    # ---- sampling --------------------------------------------------------------------------

    def obtain_samples(self, itr: int) -> tuple[Samples, list[TrajInfo]]:
        """Collect one batch.

        Returns torch tensors `[batch_T, batch_B, ...]` and the trajectories that finished in this batch, ordered by
        time step, then env_rank. The samples are views of shared memory: THE NEXT BATCH OVERWRITES THEM (with
        `n_slots=n`, the nth batch after this one). Use `samples.copy()` to keep them. A backward pass through a graph
        on overwritten samples raises an error of torch.

        Raises a `SamplerBrokenError` if a worker fails; the sampler cannot be used again.
        """
        with GuardedCall(self._guard, "obtain_samples", SamplerState.READY):
            run = self._run
            assert run is not None
            run.schedule.begin(run, itr)
            batch = run.schedule.finish(run)
            self._guard.state = SamplerState.READY  # also if the schedule has begun another batch
            return batch

    def start_samples(self, itr: int) -> None:
        """Begin a batch and return; `wait_samples` returns it. From now on the workers overwrite the samples."""
        with GuardedCall(self._guard, "start_samples", SamplerState.READY):
            self.run.schedule.begin(self.run, itr)
            self._guard.state = SamplerState.SAMPLING

    def wait_samples(self) -> tuple[Samples, list[TrajInfo]]:
        """Wait for the batch that `start_samples` began; returns as `obtain_samples` does."""
        with GuardedCall(self._guard, "wait_samples", SamplerState.SAMPLING):
            batch = self.run.schedule.finish(self.run)
            self._guard.state = SamplerState.READY
            return batch

    def evaluate_agent(self, itr: int) -> list[TrajInfo]:
        """Run the agent in the evaluation environments and return the trajectories that finished, ordered by number,
        then env_rank.

        Episode `k = info.number * eval_n_envs + info.env_rank` is reset with a seed that depends on k and on the seed
        of the sampler alone: `info.seed`. With `eval_episodes`, each call meets the same episodes, with any
        `eval_n_envs`.

        Training is not disturbed: environments, agent state and random streams are separate. The agent decides in
        `eval_mode` how it acts. `CategoricalPgAgent` and `GaussianPgAgent` draw random actions here too, unless they
        were made with `greedy_eval=True`.
        """
        with GuardedCall(self._guard, "evaluate_agent", *_IDLE):
            run = self._require_run("evaluate_agent")
            if not self.config.eval_n_envs:
                raise ConfigError("there are no evaluation environments: construct the sampler with eval_n_envs=...")
            itr = integer("itr", itr)
            infos = evaluate(run, itr)
        if run.makes_infos:  # otherwise the driver counts those of all shards
            warn_if_unfinished(self.config, itr, sum(info.agent_id is None for info in infos))  # games, not seats
        return infos

    # ---- calls on the environments ------------------------------------------------------

    def call(self, name: str, /, *args: object, evaluation: bool = False, **kwargs: object) -> list[Any]:
        """Call the method `name` of every training (or evaluation) environment, between two batches.

        Wrappers are searched from the outermost inwards. Returns the results by env_rank; of batched environments, one
        for that of each worker. Raises `EnvCallError` naming the environment if one raises; the sampler stays usable.
        """
        return self._call(EnvCall("call", name, evaluation, args, kwargs))

    def get_attr(self, name: str, /, *, evaluation: bool = False) -> list[Any]:
        """The attribute `name` of every environment; see `call`."""
        return self._call(EnvCall("get_attr", name, evaluation))

    def set_attr(self, name: str, /, value: object, *, evaluation: bool = False) -> None:
        """Set the attribute `name` of every environment to `value`; a list or tuple has one value per environment (of
        batched ones: one for that of each worker).

        If an environment has no such attribute, it is created, and a `RuntimeWarning` names the nearest one. A worker
        that replaces another builds its environments again, without these values.
        """
        sizes = [1] * (self.config.eval_n_envs if evaluation else self.batch_B)
        if self.config.batched:
            sizes = [n for plan in self.run.plans if (n := len(plan.eval_columns if evaluation else plan.columns))]
        n_envs = len(sizes)
        values = value if isinstance(value, list | tuple) else [value] * n_envs
        if len(values) != n_envs:
            raise ConfigError(f"set_attr({name!r}) got {len(values)} values for {n_envs} environments")
        rows = [value for value, n in zip(values, sizes, strict=True) for _ in range(n)]
        answers = self._call(EnvCall("set_attr", name, evaluation, values=rows))
        if created := [(env_rank, near) for env_rank, (is_new, near) in enumerate(answers) if is_new]:
            env_rank, near = created[0]
            hint = f"; did you mean {near!r}?" if near else ""
            warnings.warn(
                f"set_attr has created the attribute {name!r}: {len(created)} of {n_envs} environments did not have it "
                f"(the first is number {env_rank}){hint}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _call(self, call: EnvCall) -> list[Any]:
        return results(call, self._perform(call))

    def _perform(self, call: EnvCall) -> list[ObjectMessage]:
        """What the workers send for `call`."""
        with GuardedCall(self._guard, call.verb, *_IDLE):
            run, during = self._require_run(call.verb), f"{call.verb} {call.name!r} on the environments"
            run.schedule.pause(run, during)
            take = run.pool.take_messages
            return run.pool.run(Command(has_message=True), during, take, message=call.dumps())

    # ---- one episode --------------------------------------------------------------------

    def episode(self, env_rank: int, t: int) -> RecordedEpisode:
        """The episode of an environment until step t of the last batch; with several agents, that of the whole game.
        `RecordedEpisode.run` repeats it in this process. This needs `seed_episodes=True`.

        Raises `ConfigError` if the environment waited for a reset at t, or for an argument out of range.
        """
        from penstock.samplers.log_reader import episode_of

        with GuardedCall(self._guard, "episode", *_IDLE):
            return episode_of(self._require_run("episode"), env_rank, t)

    # ---- save and continue a run --------------------------------------------------------

    def state_dict(self, *, env_state: Literal["auto", "require", "never"] = "auto") -> dict[str, Any]:
        """Everything that a new sampler needs to continue after the last batch, as numbers, text and bytes.

        It contains counters, environments, unfinished trajectories, random streams, noise and recurrent state. It does
        not contain the agent's parameters: save `agent.state_dict()` too. It may contain code: load only your own.

        With `env_state="auto"`, each environment is saved exactly if a check shows that this works (`check_env_state`),
        or if `seed_episodes=True` makes it possible to repeat its running episode. The others are "reseeded": they
        begin new episodes with new seeds. "require" raises a `ConfigError` if there are such environments. With
        "never", all are reseeded. A batched environment is saved as a whole, or all its rows are reseeded.
        """
        from penstock.samplers.resuming import save_run

        one_of("env_state", env_state, ("auto", "require", "never"))
        with GuardedCall(self._guard, "state_dict", *_IDLE):
            return save_run(self._require_run("state_dict"), env_state)

    def load_state_dict(self, state: Mapping[str, Any]) -> ResumeReport:
        """Continue the run that `state_dict` has saved. Call this after `initialize`, before the first batch. Load the
        agent's parameters first: this call publishes them. The number of workers, `batch_T` and the kind of sampler may
        differ from those of the saved run. But a central sampler (`GpuSampler`, `AlternatingSampler`) cannot continue
        the run of another kind, or the other way round. Batched environments need as many workers as in the saved run.

        Returns which environments continue exactly, and which began new episodes. The new seeds depend on how often the
        run was continued, so none of its episodes comes again.

        Raises `ConfigError` if `state` belongs to another run (another seed, other environments, spaces or classes), or
        if a part of it is missing or damaged; nothing has changed then. Raises `SamplerBrokenError` if an environment
        cannot be loaded: this sampler cannot be used any more, since other environments may continue the saved run.
        """
        from penstock.samplers.resuming import continue_run

        with GuardedCall(self._guard, "load_state_dict", *_IDLE):
            return continue_run(self._require_run("load_state_dict"), state, type(self).__name__)

    # ---- inspection ------------------------------------------------------------------------

    @property
    def state(self) -> SamplerState:
        """The state of the sampler."""
        return self._guard.state

    @property
    def n_workers(self) -> int:
        """The number of workers; 0 before `initialize`."""
        return 0 if self._run is None else len(self._run.plans)

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers by rank, then that of the inference server if it is a process. Without
        those that have ended. Empty before `initialize` and for a sampler without processes."""
        return [] if self._run is None else list(self._run.pool.pids)

    def stats(self) -> SamplerStats:
        """Where the workers' time went since `initialize`."""
        return self._require_run("stats").stats()

    def metrics(self) -> dict[str, float]:
        """The figures of the run as a flat dict of floats, for TensorBoard, W&B or a CSV file; always the same keys.

        `sampler/`: `env_steps`, `steps_per_second` (with the time of the learner), `idle_share`, `policy_version` and
        others. `worker_0/` and so on: `idle_share` (at barrier_in), `acting_share`, `stepping_share` and
        `resetting_share`. `server/`: `idle_share` and `envs_per_step` of an inference server. `train/` is of the newest
        100 trajectories of batches. Where agents share a game, it is of the newest 100 games, but of at most 2,000
        trajectories. `eval/` is of the last evaluation. Both have
        `Return_mean`, `Return_min`, `Return_max` and the same for each number in a `TrajInfo`; NaN while no trajectory
        has finished. Rates and shares refer to the time since the last call. `docs/recipes.md` lists all keys.
        """
        run = self._require_run("metrics")
        server = None if run.memory.totals is None else run.memory.totals.stats
        version = run.policy_version
        if version is None:  # before the first batch there are the same keys
            version = run.by_policy(dict.fromkeys(run.agents))
        return run.metrics.figures(self.stats(), server, version)

    def trace(
        self, path: str | os.PathLike[str], *, profile: torch.profiler.profile | str | os.PathLike[str] | None = None
    ) -> Path:
        """Write what the workers and this process have done lately into a file, and return its path. Open it at
        https://ui.perfetto.dev: it shows which worker was slow, what it waited for, and what hangs. Nothing has to be
        switched on before. The file has the last 512 batches. If `batch_T` is large, it has the time steps of fewer: of
        the last 31 with `batch_T=128`. docs/see.md explains it. Call it at any time after `initialize`, also after a
        failure, after `shutdown`, and from another thread while a call hangs.

        `profile` is a `torch.profiler.profile` that was stopped, or the file that it has exported: its events are
        beside the others, on the same clock.

        Raises `ConfigError` if the file cannot be written, if `profile` cannot be read, or if a crash of a worker has
        written into the shared memory; `SamplerStateError` before `initialize`.
        """
        return tracing.write(path, self._require_run("trace").pool.recorded(), profile)

    def trace_when_slow(
        self, folder: str | os.PathLike[str], *, factor: float = 3.0, least: float = 0.1, most: int = 5
    ) -> None:
        """From now on, write a trace into `folder` after each batch that takes `factor` times as long as the last 50 on
        average, and at least `least` seconds; `most` files in all. A warning of the logger "penstock" says which worker
        was the last, and where its time went. The first 20 batches only count for the average.

        Raises `ConfigError` for wrong arguments, or if the folder cannot be made; else as `mark` does.
        """
        run = self._require_run("trace_when_slow")
        self._guard.check_alive("trace_when_slow")
        env_ranks = [plan.env_ranks for plan in run.plans]
        run.memory.control.watcher = tracing.SlowBatches(folder, factor, least, most, env_ranks)

    def mark(self, name: str) -> AbstractContextManager[None]:
        """A span of the trace: `with sampler.mark("update"): ...`. Marks may be nested, and any thread may make them.
        The first 63 names are kept, each cut to 32 bytes; later ones are shown as "other marks".

        Raises `ConfigError` in the `with` statement if `name` is no printable text; `SamplerStateError` before
        `initialize`, after `shutdown` and in a fork; after a failure its error.
        """
        control = self._require_run("mark").memory.control
        self._guard.check_alive("mark")
        return tracing.mark(control, name)

    def __repr__(self) -> str:
        state = self._guard.state
        heading = f"{type(self).__name__} {state.name.lower()}"
        if "config" in vars(self):
            heading += f": batch_T={self.batch_T}, batch_B={self.batch_B}"
        if (run := self._run) is None:
            return f"<{heading}>"
        has_ended = state in (SamplerState.BROKEN, SamplerState.CLOSED)
        return f"<{heading}, seed={self.seed}, {describe(run.plans, run.pool, has_ended=has_ended)}>"

    # ---- closing ---------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the workers, and close everything: processes, descriptors, claims. It raises no error of its own. It may
        be called twice, and from any thread.

        The last samples stay readable. This waits for environments to close, see `close_timeout`; Ctrl-C ends the wait,
        and comes out of this call when all is closed. A worker that takes longer, or about two seconds for anything
        else, is killed and named in a `RuntimeWarning`.
        After a failure, environments have less than a second to close. A call that another thread runs raises
        `SamplerClosedError`. If this call is in the user's code (a step in the main process, for example), it closes
        the rest when that code returns.
        """
        self._guard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


show_arguments(Sampler, Sampler)


class ParallelSampler(Sampler):
    """Each worker holds a copy of the agent and a share of the environments.

    It writes its columns of the batch straight into shared memory. After a batch, while the learner trains, it resets
    the environments that need a reset. Then it waits at barrier_in. Use this sampler when the policy is small enough
    for a CPU core: for such policies it is the fastest.
    """

    def acting(self) -> Acting:
        """Each worker acts."""
        return WorkersAct()


class SerialSampler(Sampler):
    """The same collectors and the same results as `ParallelSampler`, without processes.

    `breakpoint()` works in environments, agents and collectors, and nothing needs to be pickled. But a model must allow
    `copy.deepcopy`, since this sampler acts with a copy too. `n_workers`, `affinity`, `start_method` and the timeouts
    have no effect. `start_samples` collects the whole batch before it returns.
    """

    def acting(self) -> Acting:
        """The caller's process is the only worker."""
        return CallerSteps()
