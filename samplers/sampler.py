"""The sampler: what the user holds. Its states and calls; subclasses choose the workers."""

from __future__ import annotations

import logging
import os
import pickle
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from penstock.agents import Agent, FunctionAgent
from penstock.agents.shared_parameters import UnpublishedChanges
from penstock.arguments import integer, one_of, true_or_false
from penstock.buffers import Samples
from penstock.buffers.object_pipe import ObjectMessage
from penstock.buffers.reports import in_one_line
from penstock.buffers.samples import for_each_policy, parts_of
from penstock.collectors import TrajInfo
from penstock.envs import EnvFn, fresh_seed
from penstock.envs.calls import EnvCall, pickled, results, single_results
from penstock.envs.factory import EnvFactory, descriptions, env_factories
from penstock.envs.recorded_episode import RecordedEpisode
from penstock.envs.seeding import ColumnStreams, eval_seed
from penstock.envs.video import warn_if_unwritten
from penstock.errors import ConfigError, SamplerBrokenError, SamplerStateError
from penstock.samplers.allocation import Allocation, InitArguments, allocate
from penstock.samplers.batches import Batches
from penstock.samplers.config import SamplerConfig, SamplerOptions, SamplerState, require_env_fn, show_arguments
from penstock.samplers.metrics import SamplerMetrics
from penstock.samplers.refusals import (
    BATCHED,
    EPISODE,
    NEW_CHOOSER,
    RAY,
    RESTART,
    SEATS,
    STATES,
    TIMELINE,
    TURNS,
    VIDEO,
    refuse,
)
from penstock.samplers.results import (
    EVAL_POLL_SECONDS,
    Trajectories,
    answers_to,
    infos_from_messages,
    keys_of_trajectories,
    stop_if_enough,
    video_message,
    warn_if_unfinished,
)
from penstock.samplers.resuming import (
    FORMAT,
    RESEEDED,
    ChooseMessage,
    LoadMessage,
    ResumeReport,
    SaveMessage,
    StateMessage,
    check_state,
    checksum,
    class_without_column_state,
    load_server_agent,
    reasons,
)
from penstock.samplers.sampler_plan import EnvRange, SamplerPlan
from penstock.samplers.seating import SHARED, Chooser, PolicyOf, Seating, column_streams
from penstock.samplers.stats import SamplerStats, ServerStats, WorkerStats, describe, worker_stats
from penstock.workers import sigint
from penstock.workers.call_guard import CallGuard
from penstock.workers.claims import CpuClaims
from penstock.workers.control import Command
from penstock.workers.limits import naming_descriptor_limit
from penstock.workers.marking import marked
from penstock.workers.monitor import POLL_SECONDS
from penstock.workers.plan import Affinity
from penstock.workers.pool import Pool

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

_log = logging.getLogger("penstock")

EVALUATION = -1  # in the place of a slot
_MOST_UNPUBLISHED = 5  # batches


class Sampler(ABC):
    """Samples batches `[batch_T, batch_B]` from `batch_B` environments.

    Raises `ConfigError` for arguments that cannot work.
    """

    #: The version of the parameters at the beginning of the current batch, or of the last batch if none is running.
    #: None before the first batch. `initialize` publishes version 1. Each `agent.sync_shared_memory()` adds one. If you
    #: publish right after `start_samples`, the number may be too small: workers load the newest parameters. With a dict
    #: of agents, a dict of the versions of each.
    policy_version: Any = None

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
        self._guard = CallGuard(SamplerState, "sampler", "shutdown", owned_by_process=self._shared_memory)
        self._pool: Pool | None = None
        self.config = SamplerConfig.of(type(self).__name__, env_fn, options)
        self.batch_T, self.batch_B = self.config.batch_T, self.config.batch_B
        #: The seed in use; useful where none was given.
        self.seed: int | None = None
        self._plans: tuple[SamplerPlan, ...] = ()
        self._seating: Seating | None = None  # who sits where, if several agents share an environment

    # ---- for subclasses --------------------------------------------------------------------

    #: Whether workers are processes, so that memory must be shared.
    _shared_memory = True

    #: Whether one agent acts for the environments of all workers. The workers hold no agent then.
    _central = False

    #: How often the environments have been built again, in a sampler that replaces a lost one.
    _generation = 0

    #: In the sampler of a shard: see `InitArguments.seats`.
    _seats: tuple[Seating, Sequence[EnvFactory]] | None = None

    #: Whether trajectories are returned as `TrajInfo`s. Otherwise they stay as the workers have sent them.
    _makes_infos = True

    #: The name in `refusals` of a sampler that cannot record evaluations as videos; empty if it can.
    _no_video = ""

    #: The same of a sampler that cannot repeat episodes, and save and continue runs.
    _no_restore = ""

    #: The states in which evaluations and calls on the environments are allowed.
    _idle_states: tuple[SamplerState, ...] = (SamplerState.READY,)

    @abstractmethod
    def _make_plans(self, affinity: Affinity, env_range: EnvRange, resources: ExitStack) -> tuple[SamplerPlan, ...]:
        """Divide the environments among workers. What must be closed goes onto `resources`."""

    @abstractmethod
    def _make_pool(self, allocation: Allocation, resources: ExitStack) -> Pool:
        """Start the workers. The pool becomes the owner of `resources`, and closes them."""

    def _server_agent(self) -> Agent | None:
        """The agent that acts for the environments of all workers; None if each worker has its own. Raises
        `ConfigError` if it is in another process."""
        return None

    def _resume_server(self, generation: int) -> None:
        """The inference server's streams are of this generation from now on."""

    def _finish_batches(self, pool: Pool, during: str) -> None:
        """An evaluation or a call on the environments comes next: finish the batches that run."""

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
                `episode`, the number of the game in this environment, and `rng`, a generator for this seat and game:
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
        with self._guard.call("initialize", SamplerState.CREATED):
            given = (first_env_rank, first_eval_env_rank), (n_envs, n_eval_envs)
            env_range = EnvRange.of(self.config.own_envs, rank, world_size, given, self._generation)
            self.seed = seed = fresh_seed() if seed is None else integer("seed", seed, 0, None)
            bootstrap_value = true_or_false("bootstrap_value", bootstrap_value)
            if not isinstance(affinity, Affinity):
                affinity = Affinity(cpus=affinity)
            if isinstance(agent, Mapping):  # a scripted player may be a function
                is_function = {name: not isinstance(own, Agent) and callable(own) for name, own in agent.items()}
                agent = {name: FunctionAgent(own) if is_function[name] else own for name, own in agent.items()}
            self._agents = dict(agent) if isinstance(agent, Mapping) else {SHARED: agent}
            with naming_descriptor_limit(), ExitStack() as resources:
                self._cpu_claims = CpuClaims()
                resources.callback(self._cpu_claims.close)
                self._plans = self._make_plans(affinity, env_range, resources)
                setup = InitArguments(
                    plans=self._plans,
                    seed=seed,
                    env_range=env_range,
                    bootstrap_value=bootstrap_value,
                    traj_info_kwargs=traj_info_kwargs,
                    shared=self._shared_memory,
                    central=self._central,
                    policy_of=policy_of,
                    record=record,
                    seats=self._seats,
                )
                # Ctrl-C may end this: it runs the user's code, and `resources` undoes the rest.
                with marked, sigint.allowed():
                    allocation = allocate(self.config, agent, setup, resources)
                self._store_allocation(allocation, env_range)
                if self._shared_memory:  # so that a learner on a GPU copies batches at full speed
                    samples = allocation.memory.samples.whole
                    resources.enter_context(self._agent.runtime.page_locked(samples))
                self._pool = self._make_pool(allocation, resources)
            self._guard.start(self, self._pool)
            self._guard.state = SamplerState.READY
            if self._seats is None:  # a shard may have no column of a policy
                return for_each_policy(lambda own: own[0, 0].copy(), self.samples_np)
            return None

    def _store_allocation(self, allocation: Allocation, env_range: EnvRange) -> None:
        """Keep what was allocated, and begin to count."""
        self._memory, self._plans, self._seating = allocation.memory, allocation.plans, allocation.program.seating
        self._memory.control.raise_generation(env_range.generation)
        self._guard.announce(self._memory.control)
        self._inference_difference, self._episodes = allocation.inference_difference, allocation.episodes
        each = self._agents
        #: The spaces of the agent. With a dict of agents, a dict of the spaces of each.
        self.observation_space: Any = self._by_policy({name: own.observation_space for name, own in each.items()})
        self.action_space: Any = self._by_policy({name: own.action_space for name, own in each.items()})
        self._version_word = self._memory.parameters[0].version_word if self._is_shared else None
        self._games: Counter[int] = Counter()  # how many trajectories, or games, have ended, by env_rank
        self._n_eval_envs = env_range.n_eval_envs
        self._warned_of_late_rewards = False
        agents = zip(each.items(), self._memory.parameters, strict=True)
        self._unpublished = {name: UnpublishedChanges(own, parameters) for (name, own), parameters in agents}
        #: The last batch as `Samples` of numpy arrays. The tensors of `obtain_samples` use the same memory.
        self.samples_np: Any = allocation.batches[0]
        self._batches = Batches(allocation.batches, debug=self.config.debug)
        self._first_records = [
            [plan.first_record(self.batch_T, slot) for plan in self._plans] for slot in range(len(allocation.batches))
        ]
        self._batch = 0  # the number of the batch that runs, or of the next
        self._first_batch: tuple[ServerStats, Sequence[WorkerStats]] | None = None
        self._n_trajectories = [0] * len(self._plans)  # returned so far, by worker rank
        example_info = self.config.traj_info_cls(**allocation.program.traj_info_kwargs)
        policies, width = ((), 1) if self._seating is None else (self._seating.policies, self._seating.width)
        self._metrics = SamplerMetrics(example_info, policies, width, has_evaluation=self.config.eval_n_envs > 0)

    @property
    def _agent(self) -> Agent:
        """The agent, or that of the first policy."""
        return next(iter(self._agents.values()))

    @property
    def _is_shared(self) -> bool:
        """Whether one agent was given, and not a dict of agents."""
        return self._seating is None or self._seating.is_shared

    def _by_policy(self, values: dict[str, Any]) -> Any:
        """`values` by policy; the only one, where one agent was given."""
        return next(iter(values.values())) if self._is_shared else values

    def _newest_versions(self) -> dict[str, int]:
        """The versions of the newest parameters of a dict of agents."""
        parameters = self._memory.parameters
        return {name: own.version for name, own in zip(self._agents, parameters, strict=True)}

    def seats(self) -> dict[str, list[tuple[int, Any]]]:
        """With several agents in an environment: for each policy, whose its columns are, as (env_rank, agent id). The
        policy that plays all seats is called "agent".

        Raises `ConfigError` if the environments have one agent.
        """
        self._require_pool("seats")
        if self._seating is None:
            raise ConfigError("seats is for environments of several agents: here, column b is environment b")
        return self._seating.by_policy()

    def set_policy_of(self, policy_of: PolicyOf) -> None:
        """From the next game of each environment on, this function says which policy plays which agent. Running games
        are played to their end as they are. It is for a sampler whose first `policy_of` has a parameter `episode` or
        `rng`.

        Raises `ConfigError` for a sampler with another one, or with `on_worker_failure="restart"`: a new worker would
        begin with the first function.
        """
        with self._guard.call("set_policy_of", *self._idle_states):
            pool, seating = self._require_pool("set_policy_of"), self._seating
            refuse({NEW_CHOOSER: True, RESTART: self.config.on_worker_failure == "restart"})
            if seating is None or seating.chooser is None:
                raise ConfigError("set_policy_of needs games in turns, and a first policy_of with episode or rng")
            message = ChooseMessage(Chooser.of(policy_of, seating.policies))
            self._finish_batches(pool, "set_policy_of")
            self._send(message, "set_policy_of")

    # ---- sampling --------------------------------------------------------------------------

    def obtain_samples(self, itr: int) -> tuple[Samples, list[TrajInfo]]:
        """Collect one batch.

        Returns torch tensors `[batch_T, batch_B, ...]` and the trajectories that finished in this batch, ordered by
        time step, then env_rank. The samples are views of shared memory: THE NEXT BATCH OVERWRITES THEM (with
        `n_slots=n`, the nth batch after this one). Use `samples.copy()` to keep them. A backward pass through a graph
        on overwritten samples raises an error of torch.

        Raises a `SamplerBrokenError` if a worker fails; the sampler cannot be used again.
        """
        with self._guard.call("obtain_samples", SamplerState.READY):
            self._start(itr)
            return self._finish()

    def start_samples(self, itr: int) -> None:
        """Begin a batch and return; `wait_samples` returns it. From now on the workers overwrite the samples."""
        with self._guard.call("start_samples", SamplerState.READY):
            self._start(itr)

    def wait_samples(self) -> tuple[Samples, list[TrajInfo]]:
        """Wait for the batch that `start_samples` began; returns as `obtain_samples` does."""
        with self._guard.call("wait_samples", SamplerState.SAMPLING):
            return self._finish()

    def _start(self, itr: int) -> None:
        is_plain = type(itr) is int and abs(itr) < 2**63  # the usual case: it saves a call in each batch
        self._itr = itr if is_plain else integer("itr", itr)
        self._check_published()
        word = self._version_word
        self.policy_version = self._newest_versions() if word is None else word[0]
        pool, batch, batches = self._pool, self._batch, self._batches
        assert pool is not None
        try:
            pool.submit(Command(self._itr, batch=batch))
        finally:  # after `submit`, so that workers do not wait for this
            if len(batches.held) == self.config.n_slots:
                batches.give_back(batch, keep_last_row=True)
        self._guard.state = SamplerState.SAMPLING

    def _finish(self) -> tuple[Samples, list[TrajInfo]]:
        pool = self._pool
        assert pool is not None
        pool.wait(f"itr={self._itr}")
        self._guard.state = SamplerState.READY
        batch, batches, n_slots = self._batch, self._batches, self.config.n_slots
        slot = batch % batches.n_slots
        if self.config.debug and batch >= n_slots:
            batches.poison(batch - n_slots)  # no worker reads its last row now
        self._batch, self.samples_np = batch + 1, batches.views[slot]
        samples = batches.hand_out(batch, valid_until=batch + n_slots)
        if not batch:
            self._note_first_batch()
        infos = self._take_traj_infos(pool, slot)
        self._metrics.training.extend(infos)
        if self._seating is not None:
            self._count_agents(samples)
        return samples, infos

    def _check_published(self, n_parts: int = 1) -> None:
        """Warn once if the workers have acted in 5 batches, of `n_parts` each, with parameters that the learner has
        changed since."""
        for name, changes in self._unpublished.items():
            if changes.note_batch(_MOST_UNPUBLISHED * n_parts):
                self._unpublished = {}
                agent = "agent" if self._is_shared else f"agents[{name!r}]"
                warnings.warn(
                    f"the parameters of {agent} have changed, but were not published for {_MOST_UNPUBLISHED} batches, "
                    f"so the workers act with old ones: call {agent}.sync_shared_memory() after each update",
                    RuntimeWarning,
                    stacklevel=4,
                )
                return

    def _count_agents(self, samples: Any) -> None:
        """With several agents: count their steps for `metrics`, and log once if rewards came late."""
        self._metrics.agent_steps += sum(int(np.count_nonzero(own.env.valid)) for own in parts_of(samples))
        if self._warned_of_late_rewards:
            return
        n = sum(self._memory.control.snapshot(plan.worker_rank).late_rewards for plan in self._plans)
        if n:
            self._warned_of_late_rewards = True
            _log.warning(
                "%d rewards have come for agents that had ended or had not joined yet. They are in no cell of the "
                "batch, but in the Return of the environment's TrajInfo. stats().late_rewards counts them",
                n,
            )

    def _take_traj_infos(self, pool: Pool, slot: int = 0, opening: int | None = None) -> list[Any]:
        """The trajectories that the workers have sent for the last command, or for that of this opening of the gates,
        ordered by time step, then env_rank. `slot` is that of the batch; EVALUATION for an evaluation."""
        cls, counts = self.config.traj_info_cls, self._memory.control.n_results_by_rank(len(self._plans), opening)
        for rank, n in enumerate(counts):
            self._n_trajectories[rank] += n
        if not any(counts):
            return []
        found: Trajectories
        if cls is TrajInfo:
            found = self._memory.records.take(counts, self._first_records[max(slot, 0)])
        else:
            found = pool.take_messages(opening)
        return self._as_infos(found, evaluation=slot == EVALUATION) if self._makes_infos else found

    def _as_infos(self, found: Trajectories, *, evaluation: bool = False) -> list[TrajInfo]:
        """`found`, ordered by time step, then env_rank; evaluations by episode, then env_rank. Each info knows whose it
        is."""
        cls, keys, games = self.config.traj_info_cls, keys_of_trajectories(found), self._games
        infos = TrajInfo.from_records(found) if cls is TrajInfo else infos_from_messages(cls, found)
        if evaluation:
            games = Counter()
        if self._seating is not None:
            self._seating.name_infos(infos, keys, games, evaluation=evaluation)
        else:
            for info, env_rank in zip(infos, keys, strict=True):
                info.env_rank, info.episode = env_rank, games[env_rank]
                games[env_rank] += 1
        return self._with_seeds(infos) if evaluation else infos

    def _with_seeds(self, infos: list[TrajInfo]) -> list[TrajInfo]:
        """The trajectories of an evaluation, ordered by episode, then env_rank, with the seeds of their resets."""
        assert self.seed is not None
        config = self.config
        is_seeded = not config.batched
        for info in infos:
            assert info.env_rank is not None
            assert info.episode is not None
            if is_seeded or not info.episode:  # others begin their further episodes as they like
                info.seed = eval_seed(self.seed, info.episode * self._n_eval_envs + info.env_rank)
        return sorted(infos, key=lambda info: (info.episode, info.env_rank))

    def evaluate_agent(self, itr: int, *, video: str | os.PathLike[str] | None = None) -> list[TrajInfo]:
        """Run the agent in the evaluation environments and return the trajectories that finished, ordered by episode,
        then env_rank.

        Episode `k = info.episode * eval_n_envs + info.env_rank` is reset with a seed that depends on k and on the seed
        of the sampler alone: `info.seed`. With `eval_episodes`, each call meets the same episodes, with any
        `eval_n_envs`.

        Training is not disturbed: environments, agent state and random streams are separate. The agent decides in
        `eval_mode` how it acts. `CategoricalPgAgent` and `GaussianPgAgent` draw random actions here too, unless they
        were made with `greedy_eval=True`.

        `video` is a folder. The first episode of the first evaluation environment is recorded there, as
        `itr-{itr}-episode-0.mp4`. This needs moviepy, and evaluation environments with `render_mode="rgb_array"`. The
        worker keeps the frames in memory and writes the file during the evaluation; `step_timeout` must allow for that.
        A folder that cannot be written is a `ConfigError`, a file that was not written a `RuntimeWarning`.
        """
        with self._guard.call("evaluate_agent", *self._idle_states):
            if not self.config.eval_n_envs:
                raise ConfigError("there are no evaluation environments: construct the sampler with eval_n_envs=...")
            refuse({VIDEO: video is not None, SEATS: self._seating is not None, self._no_video or RAY: self._no_video})
            itr, pool, during = integer("itr", itr), self._require_pool("evaluate_agent"), f"evaluation, itr={itr}"
            self._finish_batches(pool, during)
            message = None if video is None else video_message(pool, self.config, video)
            command, limit = (
                Command(itr, do_eval=True, has_message=message is not None),
                self.config.eval_max_trajectories,
            )
            until = None if limit is None else partial(stop_if_enough, self._memory.control, len(self._plans), limit)
            interval = POLL_SECONDS if limit is None else EVAL_POLL_SECONDS
            discard = partial(self._take_traj_infos, pool, EVALUATION)
            pool.run(command, during, discard, message=message, until=until, poll_interval=interval)
            self._metrics.evaluation = infos = self._take_traj_infos(pool, EVALUATION)
        if video is not None:
            warn_if_unwritten(os.fspath(video), itr)
        if self._makes_infos:  # otherwise the driver counts those of all shards
            games = infos if self._seating is None else [info for info in infos if info.agent_id is None]
            warn_if_unfinished(self.config, itr, len(games))
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
        sizes = self._env_sizes(evaluation=evaluation)
        n_envs = len(sizes)
        values = value if isinstance(value, list | tuple) else [value] * n_envs
        if len(values) != n_envs:
            raise ConfigError(f"set_attr({name!r}) got {len(values)} values for {n_envs} environments")
        rows = [own for own, n in zip(values, sizes, strict=True) for _ in range(n)]
        found = self._call(EnvCall("set_attr", name, evaluation, values=rows))
        if created := [(env_rank, near) for env_rank, (is_new, near) in enumerate(found) if is_new]:
            env_rank, near = created[0]
            hint = f"; did you mean {near!r}?" if near else ""
            warnings.warn(
                f"set_attr has created the attribute {name!r}: {len(created)} of {n_envs} environments did not have it "
                f"(the first is number {env_rank}){hint}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _env_sizes(self, *, evaluation: bool) -> list[int]:
        """How many columns each environment has that a call reaches."""
        if not self.config.batched:
            return [1] * (self.config.eval_n_envs if evaluation else self.batch_B)
        return [n for plan in self._plans if (n := len(plan.eval_columns if evaluation else plan.columns))]

    def _call(self, call: EnvCall) -> list[Any]:
        return results(call, self._perform(call))

    def _perform(self, call: EnvCall) -> list[ObjectMessage]:
        """What the workers send for `call`."""
        with self._guard.call(call.verb, *self._idle_states):
            pool, during = self._require_pool(call.verb), f"{call.verb} {call.name!r} on the environments"
            self._finish_batches(pool, during)
            return answers_to(pool, call, during)

    # ---- one episode --------------------------------------------------------------------

    def episode(self, env_rank: int, t: int) -> RecordedEpisode:
        """The episode of an environment until step t of the last batch. `RecordedEpisode.run` repeats it in this
        process. This needs `seed_episodes=True`.

        Raises `ConfigError` if the environment waited for a reset at t, or for an argument out of range.
        """
        with self._guard.call("episode", *self._idle_states):
            episodes, first = self._episodes, self._plans[0].env_ranks[0]
            refuse({EPISODE: True, self._no_restore or RAY: self._no_restore})
            if episodes is None:
                raise ConfigError(
                    "episode needs to know the seeds of the episodes: construct the sampler with seed_episodes=True"
                )
            if not self._batches.held:
                raise SamplerStateError("episode was called before the first batch: call obtain_samples first")
            env_rank = integer("env_rank", env_rank, first, first + self.batch_B - 1)
            t = integer("t", t, 0, self.batch_T - 1)
            statuses = self._require_pool("episode").statuses()
            (plan,) = (status.plan for status in statuses if env_rank in status.plan.env_ranks)
            return episodes.at(plan, env_rank, t, (self._batch - 1) % self._batches.n_slots)

    # ---- save and continue a run --------------------------------------------------------

    def state_dict(self, *, env_state: Literal["auto", "require", "never"] = "auto") -> dict[str, Any]:
        """Everything that a new sampler needs to continue after the last batch, as numbers, text and bytes.

        It contains counters, environments, unfinished trajectories, random streams, noise and recurrent state. It does
        not contain the agent's parameters: save `agent.state_dict()` too. It may contain code: load only your own.

        With `env_state="auto"`, each environment is saved exactly if a check shows that this works (`check_env_state`),
        or if `seed_episodes=True` makes it possible to repeat its running episode. The others are "reseeded": they
        begin new episodes with new seeds. "require" raises a `ConfigError` if there are such environments. With
        "never", all are reseeded.
        """
        one_of("env_state", env_state, ("auto", "require", "never"))
        with self._guard.call("state_dict", *self._idle_states):
            self._check_restorable()
            server_agent = self._server_agent()
            untrusted = class_without_column_state(self.config.collector_cls, *map(type, self._agents.values()))
            answers = self._send(SaveMessage(env_state != "never", untrusted), "state_dict")
            columns = {rank: column for own, _ in answers for rank, column in own.items()}
            reseeded = {rank: column["why"] for rank, column in columns.items() if column["kind"] == RESEEDED}
            if env_state == "require" and reseeded:
                raise ConfigError(f'state_dict(env_state="require"): {reasons(reseeded)}')
            if server_agent is not None:
                for cells, column in zip(self._server_cells(), columns.values(), strict=True):
                    column["server"] = pickle.dumps([server_agent.column_state(b) for b in cells])
            control = self._memory.control
            return {
                "format": FORMAT,
                **self._described(),
                "batches": self._batch,
                "episodes": dict(self._games),
                "policy_versions": [parameters.version for parameters in self._memory.parameters],
                "counts": self._metrics.counts(self.stats()),
                "generation": max(control.generation(plan.worker_rank) for plan in self._plans),
                "columns": columns,
                "checksum": checksum(columns),
                "evaluations": {rank: list(counts) for _, own in answers for rank, counts in own.items()},
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> ResumeReport:
        """Continue the run that `state_dict` has saved. Call this after `initialize`, before the first batch. Load the
        agent's parameters first: this call publishes them. The number of workers, `batch_T` and the kind of sampler may
        differ from those of the saved run. But a central sampler (`GpuSampler`, `AlternatingSampler`) cannot continue
        the run of another kind, or the other way round.

        Returns which environments continue exactly, and which began new episodes. The new seeds depend on how often the
        run was continued, so none of its episodes comes again.

        Raises `ConfigError` if `state` belongs to another run (another seed, other environments, spaces or classes), or
        if a part of it is missing or damaged; nothing has changed then. Raises `SamplerBrokenError` if an environment
        cannot be loaded: this sampler cannot be used any more, since other environments may continue the saved run.
        """
        with self._guard.call("load_state_dict", *self._idle_states):
            self._check_restorable()
            if self._batches.held:
                raise SamplerStateError("load_state_dict must be called after initialize, before the first batch")
            server_agent, control = self._server_agent(), self._memory.control
            check_state(state, self._described(), type(self).__name__)
            counts = {tuple(each) for each in state["evaluations"].values()}
            generation = state["generation"] + 1
            # A worker that is replaced from now on gets streams that were never used.
            control.raise_generation(generation)
            try:
                self._resume_server(generation)
                # Where workers were replaced, the evaluations differ from column to column: begin new streams.
                evaluations = counts.pop() if len(counts) == 1 else (0, generation)
                message = LoadMessage(state["columns"], evaluations, generation)
                refused = {rank: why for own in self._send(message, "load_state_dict") for rank, why in own.items()}
                if server_agent is not None:
                    streams = self._server_streams(generation)
                    load_server_agent(server_agent, self._server_cells(), state["columns"], refused, streams)
            except SamplerBrokenError:
                raise
            except Exception as error:  # what the state contains may raise anything
                self._require_pool("load_state_dict").close(broken=True)
                raise SamplerBrokenError(
                    f"load_state_dict failed, so that some environments would continue the saved run and others not: "
                    f"{in_one_line(error)}. The state is damaged, or belongs to another version of the environment: "
                    "make a new sampler, and load another state"
                ) from error
            self._batch, self._games = state["batches"], Counter(state["episodes"])
            self._metrics.start_at(state["counts"])
            each = zip(self._memory.parameters, state["policy_versions"], self._agents.values(), strict=True)
            for parameters, version, agent in each:
                parameters.continue_at(version, agent.read_parameters())
            return ResumeReport(tuple(rank for rank in state["columns"] if rank not in refused), refused)

    def _check_restorable(self) -> None:
        refuse({STATES: True, self._no_restore or RAY: self._no_restore, BATCHED: self.config.batched})

    def _server_cells(self) -> list[range]:
        """The columns of the inference server's agent in each environment."""
        envs = range(self.batch_B)
        return [
            range(b, b + 1) if self._seating is None else self._seating.train.cells(0, range(b, b + 1)) for b in envs
        ]

    def _server_streams(self, generation: int) -> ColumnStreams:
        """The streams of the inference server's agent."""
        assert self.seed is not None
        first = self._plans[0].env_ranks[0]
        everyone: dict[str, Any] = {"columns": range(self.batch_B), "env_ranks": range(first, first + self.batch_B)}
        plan = replace(self._plans[0], **everyone, generation=generation)
        return column_streams(self._seating, plan, self.seed)

    def _described(self) -> dict[str, Any]:
        """What a run must have in common with the run that continues it."""
        config = self.config
        return {
            "seed": self.seed,
            "env_ranks": [rank for plan in self._plans for rank in plan.env_ranks],
            "environments": descriptions(env_factories(config.env_fn, config.env_kwargs, config.batch_B)),
            "spaces": [str(self.observation_space), str(self.action_space)],
            "agents": None if self._seating is None else [list(own) for own in self._seating.train.agents],
            "policies": [list(self._agents), *([] if self._seating is None else map(list, self._seating.train.policy))],
            "classes": [
                cls.__qualname__
                for cls in (*map(type, self._agents.values()), config.collector_cls, config.traj_info_cls)
            ],
            "central": self._central,
            "seed_episodes": config.seed_episodes,
        }

    def _send(self, message: StateMessage, call: str) -> list[Any]:
        """Let all workers perform `message`. Returns their answers, by env_rank."""
        pool = self._require_pool(call)
        pool.run(
            Command(has_message=True), call, discard=pool.take_messages, message=pickled(message, "the saved state")
        )
        return single_results(call, pool.take_messages())

    # ---- inspection ------------------------------------------------------------------------

    @property
    def state(self) -> SamplerState:
        """The state of the sampler."""
        return self._guard.state

    @property
    def n_workers(self) -> int:
        """The number of workers; 0 before `initialize`."""
        return len(self._plans)

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers by rank, then that of the inference server if it is a process. Without
        those that have ended. Empty before `initialize` and for a sampler without processes."""
        return [] if self._pool is None else list(self._pool.pids)

    def _require_pool(self, call: str) -> Pool:
        if self._pool is None:
            raise SamplerStateError(f"{call} was called before initialize: call sampler.initialize(agent) first")
        return self._pool

    def stats(self) -> SamplerStats:
        """Where the workers' time went since `initialize`."""
        restarts, control = self._require_pool("stats").restarts, self._memory.control
        workers = tuple(worker_stats(plan, control, self._n_trajectories, restarts) for plan in self._plans)
        stats = SamplerStats(workers, self._memory.nbytes, self._inference_difference)
        n_cells = self.batch_T * sum(worker.batches * len(worker.env_ranks) for worker in workers)
        if self._seating is not None or not n_cells:
            return stats
        return replace(stats, valid_share=sum(worker.steps for worker in workers) / n_cells)

    def _note_first_batch(self) -> None:
        """The first batch is complete: `server_stats` leaves the time before out."""
        totals = self._memory.totals
        self._first_batch = None if totals is None else (totals.stats, self.stats().workers)

    def _server_stats(self) -> ServerStats:
        self._require_pool("server_stats")
        totals = self._memory.totals
        if totals is None:
            raise ConfigError('server_stats needs an inference server: make the sampler with server="process"')
        return totals.with_workers(self.stats().workers, self._first_batch)

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
        self._require_pool("metrics")
        server = None if self._memory.totals is None else self._memory.totals.stats
        version = self.policy_version
        if version is None:  # before the first batch there are the same keys
            version = self._by_policy(dict.fromkeys(self._agents))
        return self._metrics.figures(self.stats(), server, version)

    def timeline(self) -> npt.NDArray[np.float64]:
        """Times of the last batch `[n_workers, 2 * batch_T + 1]`, in seconds of `time.monotonic`. In row t, the worker
        began to act at `[2 * t]` and to step at `[2 * t + 1]`. The last entry is the end of the batch."""
        self._require_pool("timeline")
        refuse({TURNS: self._seating is not None and self._seating.in_turns, TIMELINE: True})
        return np.stack([self._memory.control.timeline(plan.worker_rank) for plan in self._plans])

    def __repr__(self) -> str:
        state = self._guard.state
        heading = f"{type(self).__name__} {state.name.lower()}"
        if "config" in vars(self):
            heading += f": batch_T={self.batch_T}, batch_B={self.batch_B}"
        if self._pool is None:
            return f"<{heading}>"
        has_ended = state in (SamplerState.BROKEN, SamplerState.CLOSED)
        return f"<{heading}, seed={self.seed}, {describe(self._plans, self._pool, has_ended=has_ended)}>"

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
