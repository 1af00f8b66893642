"""What a sampler's worker runs: its environments and collectors, for batches, evaluations and calls."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from penstock.agents.action_masks import mask_in
from penstock.agents.agent import Agent
from penstock.agents.remote_agent import RemoteAgent
from penstock.buffers.slots import BatchColumns, SampleSpec, layouts_of, public_view, unrecorded_arrays
from penstock.collectors.collector import Collector, CollectorParts, EvalLimits
from penstock.collectors.evaluation import EvalCollector, eval_columns
from penstock.collectors.recorder import PolicyParts
from penstock.collectors.tracking import BatchTracker, Tracker, TrajInfo, make_tracker, put_as_objects
from penstock.columns.batched_columns import BatchedColumns
from penstock.columns.builder import EnvBuilder
from penstock.columns.interface import Columns
from penstock.columns.log_writer import EpisodeLogWriter
from penstock.columns.renewal import Renewals
from penstock.columns.single_columns import SingleColumns
from penstock.envs.calls import EnvCall, perform
from penstock.envs.checks import Checks
from penstock.envs.factory import EnvContext, EnvFactory
from penstock.envs.infos import info_of, possible_masks
from penstock.envs.seeding import ColumnStreams, Purpose
from penstock.errors import GameError, PenstockError
from penstock.samplers.config import SamplerConfig
from penstock.samplers.resuming import StateMessage, WorkerParts
from penstock.samplers.sampler_memory import SamplerMemory
from penstock.samplers.sampler_plan import EnvRange, SamplerPlan, episodes_per_env
from penstock.samplers.seating import Seating, column_streams, env_streams, keys_of
from penstock.workers.control import Command, Phase, Progress, UntimedProgress
from penstock.workers.program import WorkerContext

if TYPE_CHECKING:
    from penstock.columns.seat_columns import LockStepColumns

#: The data of one worker: the factories of its training environments, and of its evaluation environments.
WorkerFactories = tuple[Sequence[EnvFactory], Sequence[EnvFactory]]


_C = TypeVar("_C", bound=Collector)


@dataclass
class SamplerProgram:
    """The `WorkerProgram` of samplers. Its fields are sent to the workers; `build` makes the rest there."""

    agents: tuple[Agent, ...]  #: one for each policy
    config: SamplerConfig  #: without env_fn and its arguments, which are in the data of each worker
    traj_info_kwargs: Mapping[str, Any]
    eval_max_T: int
    env_range: EnvRange  #: the environments of this sampler among those of all machines
    seed: int
    seating: Seating  #: who sits where
    unrecorded: Mapping[int, SampleSpec] = field(default_factory=dict)  #: of each policy that is not recorded

    data_name = "env_fn (or env_kwargs, eval_env_fn, eval_env_kwargs)"

    def pickled_parts(self) -> dict[str, Any]:
        """Its data, by the names of the user's arguments."""
        return {**vars(self.config), **vars(self)}

    # ---- building --------------------------------------------------------------------------

    def build(self, context: WorkerContext) -> None:
        """Build this worker's environments and collectors."""
        self._context, self._progress = context, context.progress
        self._plan: SamplerPlan = cast(SamplerPlan, context.plan)
        self._memory: SamplerMemory = context.memory
        if self._memory.steps is None:  # with central inference, only the server needs the parameters
            for agent, parameters in zip(self.agents, self._memory.parameters, strict=True):
                agent.runtime.attach(parameters)
                agent.runtime.pull_shared_memory()
        self._n_slots, self._proofs = len(self._memory.slots), list[tuple[EnvFactory, str]]()
        if (appender := self._memory.appender) is not None:
            columns = _slice(self._plan.cells[0])
            self._appender = writer = appender.of_writer(self._plan.worker_rank)
            self._batches = [
                writer.bind(public_view(slot, self.config.batch_T)[:, columns]) for slot in self._memory.slots
            ]
        key = self.seed, self.env_range.first_env_rank, self._plan.worker_rank, self._plan.generation
        # In the main process, the generators belong to the user.
        self._builder = EnvBuilder(
            self._progress,
            self.agents[0].observation_space,
            self.agents[0].action_space,
            seeds=() if context.gate is None else key,
        )
        env_factories, eval_env_factories = context.data
        self._eval_collector: EvalCollector | None = None
        self._collector = self._build_collector(self.config.collector_cls, env_factories, Purpose.TRAIN)
        try:
            self._collector.start_envs()
        except Exception as error:
            self._note_masks(error, self._collector)
            raise
        self._collector.start_agent()
        if eval_env_factories:
            self._eval_collector = self._build_collector(
                self.config.eval_collector_cls, eval_env_factories, Purpose.EVAL
            )

    def _build_collector(self, cls: type[_C], factories: Sequence[EnvFactory], purpose: Purpose) -> _C:
        """The collector of these environments, with a recorder for each policy that has columns in them."""
        plan, seating, is_eval = self._plan, self.seating, purpose is Purpose.EVAL
        streams = env_streams(plan, self.seed, evaluation=is_eval)
        cells = plan.eval_cells if is_eval else plan.cells
        played = [p for p, policy_cells in enumerate(cells) if policy_cells]
        by_policy = {p: column_streams(seating, plan, self.seed, p, evaluation=is_eval) for p in played}
        columns = self._build_columns(factories, streams, by_policy, purpose)
        columns.when_replaced = self._builder.replace
        policies = [
            PolicyParts(
                columns=policy,
                agent=self._build_agent(p, policy_streams, Purpose.EVAL_ACTION if is_eval else Purpose.ACTION),
                tracker=self._build_tracker(keys_of(seating, policy_streams)),
                slots=self._slots_of(p, cells[p], is_eval=is_eval),
                progress=policy.progress,
                streams=policy_streams,
                who=p + 1 if len(seating.policies) > 1 else 0,
                policy=seating.policies[p],
            )
            for policy, (p, policy_streams) in zip(columns.policies, by_policy.items(), strict=True)
        ]
        parts = CollectorParts(columns, policies, columns.progress, streams, self.config.max_decorrelation_steps)
        if is_eval:
            parts = replace(parts, limits=self._eval_limits())
        if seating.has_games:
            parts = self._with_games(parts, self._build_tracker(keys_of(seating, streams), of_games=True))
        return cls(parts)

    def _with_games(self, parts: CollectorParts, game_tracker: Tracker) -> CollectorParts:
        """What a collector needs where several agents share an environment. Imported here, since few need it."""
        from penstock.collectors.recorder_group import RecorderGroup

        parts = replace(parts, game_tracker=game_tracker, group_cls=RecorderGroup)
        if not self.seating.in_turns:
            return parts
        from penstock.collectors.turns import TurnGroup, TurnRecorder

        return replace(parts, group_cls=TurnGroup, recorder_cls=TurnRecorder)

    def _build_columns(
        self,
        factories: Sequence[EnvFactory],
        streams: ColumnStreams,
        policies: Mapping[int, ColumnStreams],
        purpose: Purpose,
    ) -> Columns:
        """The environments. `policies` has the streams of the columns of each policy that plays in them."""
        plan, config, progress = self._plan, self.config, self._progress
        checks, env_ranks = Checks(config.check_finite, config.debug), streams.env_ranks
        untimed = UntimedProgress(self._memory.control, plan.worker_rank)
        if purpose is Purpose.EVAL:
            progress = untimed
        contexts = [
            EnvContext(rank, plan.worker_rank, seed, purpose)
            for rank, seed in zip(env_ranks, streams.env_seeds(purpose), strict=True)
        ]
        if config.batched:
            env = self._builder.build_batched(factories[0], len(env_ranks), contexts[0])
            return BatchedColumns(env, env_ranks, progress, checks)
        builds = self._builds_of(factories, purpose)
        envs = [build(context) for build, context in zip(builds, contexts, strict=True)]
        columns: SingleColumns | LockStepColumns
        if self.seating.has_games:
            # The first policy writes the stamps of training.
            columns = self._seats(envs, policies, env_ranks, (progress, untimed), checks)
        else:
            columns = SingleColumns(envs, env_ranks, progress, checks, config.flatten_wrappers)
        if purpose is Purpose.TRAIN and self._memory.episode_log is not None:
            columns.log_writer = EpisodeLogWriter(self._memory.episode_log, plan.columns, plan.cells, streams, progress)
            columns.log_writer.read_plan(config.episode_plan)
            columns.keeps_seeds = True
        self._make_renewable(columns, builds, streams, purpose)
        return columns

    def _builds_of(self, factories: Sequence[EnvFactory], purpose: Purpose) -> list[Callable[..., Any]]:
        """What builds each environment, and compares its spaces with those of the example."""
        if not self.seating.has_games:
            return [partial(self._builder.build, factory) for factory in factories]
        plan, is_eval = self._plan, purpose is Purpose.EVAL
        side, columns = (self.seating.evaluation, plan.eval_columns) if is_eval else (self.seating.train, plan.columns)
        spaces = [(agent.observation_space, agent.action_space) for agent in self.agents]
        return [
            partial(
                self._builder.build_view,
                factory,
                {agent: spaces[p] for agent, p in zip(side.agents[b], side.policy[b], strict=True)},
            )
            for b, factory in zip(columns, factories, strict=True)
        ]

    def _seats(
        self,
        envs: list[Any],
        policies: Mapping[int, ColumnStreams],
        env_ranks: Sequence[int],
        progress: tuple[Progress, Progress],
        checks: Checks,
    ) -> LockStepColumns:
        """The seats of environments of several agents. `progress` is that of the first policy, and of the others."""
        from penstock.columns.seat_columns import LockStepColumns, SeatColumns
        from penstock.columns.turn_columns import TurnColumns, TurnSeats

        seats: list[Any] = []
        for p, streams in policies.items():
            spaces = self.agents[p].observation_space, self.agents[p].action_space
            cls = TurnSeats if self.seating.in_turns else SeatColumns
            seats.append(cls(cast(Any, streams.env_ranks), spaces, progress[bool(seats)], checks))
        if not self.seating.in_turns:
            return LockStepColumns(envs, seats, env_ranks)
        columns = TurnColumns(envs, seats, env_ranks)
        columns.chooser, columns.seed = self.seating.chooser, self.seed
        columns.most_rounds = self.seating.most_rounds(self.config.batch_T)
        return columns

    def _make_renewable(
        self,
        envs: SingleColumns | LockStepColumns,
        builds: Sequence[Callable[[EnvContext, Phase], Any]],
        streams: ColumnStreams,
        purpose: Purpose,
    ) -> None:
        """With on_game_failure="renew": an environment whose game has failed is built again."""
        config = self.config
        if config.on_game_failure == "renew":
            envs.renewable = (GameError, *config.renew_on)
            envs.renewals = Renewals(
                errors=envs.renewable,
                max_renewals=config.max_renewals,
                window=config.restart_window,
                builder=self._builder,
                builds=builds,
                streams=streams,
                purpose=purpose,
                worker_rank=self._plan.worker_rank,
                progress=self._progress,
            )

    def _build_agent(self, p: int, streams: ColumnStreams, purpose: Purpose) -> Agent:
        """The copy of the agent of policy p that acts for the columns of `streams`."""
        agent, is_eval = self.agents[p].runtime.column_copy(streams.rngs(purpose)), purpose is Purpose.EVAL_ACTION
        if isinstance(agent, RemoteAgent):
            plan, memory = self._plan, self._memory
            steps, cells = (memory.eval_steps, plan.eval_cells) if is_eval else (memory.steps, plan.cells)
            assert steps is not None
            assert self._context.request is not None
            agent.connect(steps.columns(cells[p]), self._context.request)
        n_envs = self.env_range.n_eval_envs if is_eval else self.env_range.n_envs
        agent.runtime.set_columns(streams.env_ranks, n_envs, in_turns=self.seating.in_turns)
        return agent

    def _build_tracker(self, env_ranks: Sequence[int], *, of_games: bool = False) -> Tracker:
        """The tracker of these columns; or that of whole games, which follows the rewards of all their agents."""
        put_records = partial(self._memory.records.put, self._plan.worker_rank)
        cls, kwargs, put_messages = self.config.traj_info_cls, self.traj_info_kwargs, self._context.put
        if of_games:  # `step` of a subclass is for the steps of one agent
            put = put_records if cls is TrajInfo else partial(put_as_objects, cls, kwargs, put_messages)
            return BatchTracker(env_ranks, put, cls(**kwargs)._discount, reports_cuts=True)
        return make_tracker(cls, kwargs, env_ranks, put_records, put_messages)

    def _slots_of(self, p: int, cells: range, *, is_eval: bool) -> list[BatchColumns]:
        """Where the recorder of policy p writes."""
        layouts, batch_T = [layouts_of(slot, self._plan.policies) for slot in self._memory.slots], self.config.batch_T
        spec = self.unrecorded.get(p)
        if is_eval:
            layout = layouts[0][p] if spec is None else unrecorded_arrays(spec, batch_T, 1)
            return [eval_columns(layout, batch_T, len(cells))]
        if spec is not None:
            return [BatchColumns(unrecorded_arrays(spec, batch_T, len(cells)), slice(None))] * len(layouts)
        is_clean = self._plan.generation == 0  # else another worker has written there, and the learner
        return [BatchColumns(slot[p], _slice(cells), is_clean=is_clean) for slot in layouts]

    def _eval_limits(self) -> EvalLimits:
        config, plan = self.config, self._plan
        shares = episodes_per_env(config.eval_episodes, config.eval_n_envs, plan.eval_columns)
        return EvalLimits(self.eval_max_T, config.eval_max_trajectories, shares, self.env_range.n_eval_envs)

    # ---- commands --------------------------------------------------------------------------

    def idle(self) -> None:
        """Reset what needs a reset, while the learner trains."""
        self._collector.reset_if_needed()

    def run(self, command: Command) -> None:
        """Run one command: collect a batch, evaluate, or make a call on the environments."""
        evaluator, records = self._eval_collector, self._memory.records
        try:
            if command.is_batch:
                slot = command.batch % self._n_slots
                records.begin(self._plan.first_record(self.config.batch_T, slot))
                if self._memory.appender is None:
                    self._collect(command, slot)
                # The worker that this one replaces may have died when the batch was in the replay.
                elif not self._appender.has_batch(command.batch, self.config.batch_T):
                    self._collect(command, slot)
                    version = self._collector.samples.policy_version
                    self._appender.append(self._batches[slot], version, continues=True)
                return
            records.begin()
            if not command.do_eval:
                self._answer(pickle.loads(self._memory.mailbox.read()))
            elif evaluator is not None:
                evaluator.pull()
                evaluator.collect_evaluation(command.itr)
        except Exception as error:
            self._note_masks(error, evaluator if command.do_eval else self._collector)
            raise

    def _note_masks(self, error: Exception, collector: Collector | None) -> None:
        """If an environment has raised `error` in a step, the action may have been illegal: note on the error which
        mask the agent does not use."""
        status = self._memory.control.snapshot(self._plan.worker_rank)
        is_step = status.phase in (Phase.STEPPING, Phase.DECORRELATING) and not isinstance(error, PenstockError)
        if collector is None or not is_step or status.env_rank not in collector.columns.env_ranks:
            return
        e, keys = collector.columns.env_ranks.index(status.env_rank), list[str]()
        with suppress(Exception):  # an info may hold anything, and what has just failed may fail again
            infos = _infos_of(collector.columns, e, in_turns=self.seating.in_turns)
            for agent in [agent for agent in self.agents if agent.mask_key is None]:
                keys += ["observation.action_mask"] if mask_in(agent.observation_space, agent.action_space) else []
                keys += [f"info.{name}" for info in infos for name in possible_masks(info, agent.action_space)]
        if keys:
            what = f"make the agent with mask_key={keys[0]!r}"
            if self.config.batched and keys[0].startswith("info"):
                what = 'put it into the observations, and make the agent with mask_key="observation.NAME"'
            note = f"{keys[0]} has a 0 or 1 for each action: if it says which are legal, {what}"
            vars(error).setdefault("__notes__", []).append(note)

    def _collect(self, command: Command, slot: int) -> None:
        collector, control, gate = self._collector, self._memory.control, self._context.gate
        if self._n_slots > 1:
            collector.use_slot(slot)
            if (log_writer := collector.columns.log_writer) is not None:
                log_writer.slot = slot
        version = collector.pull(command.version)
        self._progress.note_version(version)
        if command.version and gate is not None:
            gate.wake_main()  # `sync_shared_memory` may wait for this
        collector.collect_batch(command.itr)
        if self._memory.steps is not None:  # the inference server has noted the version before its first reply
            collector.samples.policy_version[...] = control.began_with(self._plan.worker_rank)

    def _answer(self, message: EnvCall | StateMessage) -> None:
        if isinstance(message, EnvCall):
            self._call(message)
            return
        factories, _ = self._context.data
        builder, collectors = self._builder, (self._collector, self._eval_collector)
        results = message.perform(WorkerParts(self._plan, self.seed, factories, builder, *collectors, self._proofs))
        self._context.put(results)
        self._progress.n_results = len(results)

    def _call(self, call: EnvCall) -> None:
        plan = self._plan
        if not call.evaluation:
            envs, columns, env_ranks = self._collector.envs, plan.columns, plan.env_ranks
        elif self._eval_collector is not None:
            envs, columns, env_ranks = self._eval_collector.envs, plan.eval_columns, plan.eval_env_ranks
        else:
            return
        self._progress.enter(Phase.CALLING)
        n = len(envs)  # a batched environment is one: its first env_rank stands for it
        results = perform(call, envs, columns[:n], env_ranks[:n])
        self._context.put(results)
        self._progress.n_results = len(results)

    def close(self) -> None:
        """Close every environment that was built; the first exception is raised when all have been closed."""
        if hasattr(self, "_builder"):  # `build` may have failed early
            self._builder.close()


def _infos_of(columns: Any, e: int, *, in_turns: bool) -> list[Any]:
    """The infos in which a mask may be: with several agents, the newest one of each agent of environment e; otherwise
    that of the last reset."""
    if isinstance(columns, BatchedColumns):
        return [info_of(columns.reset_infos, e)]
    if isinstance(columns, SingleColumns):
        return [columns.reset_infos[e]]
    return [columns.envs[e].last()[4]] if in_turns else list(columns.infos[e].values())


def _slice(columns: range) -> slice:
    return slice(columns.start, columns.stop)
