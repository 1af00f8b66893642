"""What a sampler's worker runs: its environments and collectors, for batches, evaluations and calls."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np

from penstock.agents.agent import Agent
from penstock.agents.remote_agent import RemoteAgent
from penstock.buffers.named import ArrayTree, map_leaves
from penstock.buffers.samples import BatchColumns, SampleSpec, layouts_of, public_view, unrecorded_arrays
from penstock.collectors.collector import Collector, CollectorParts
from penstock.collectors.eval_collector import BaseEvalCollector, EvalCollectorParts
from penstock.collectors.lock_step import Desk, LockStepCollector
from penstock.collectors.seat_evaluation import SeatEvalCollector, eval_columns
from penstock.collectors.tracking import BatchTracker, Tracker, make_tracker, put_as_objects
from penstock.collectors.traj_info import TrajInfo
from penstock.collectors.turns import TurnCollector, TurnDesk
from penstock.columns.batched_columns import VectorColumns
from penstock.columns.builder import EnvBuilder
from penstock.columns.episodes import EpisodeRecorder
from penstock.columns.interface import EnvBatch
from penstock.columns.renewal import Renewals
from penstock.columns.seat_columns import Games, SeatColumns
from penstock.columns.single_columns import EnvColumns
from penstock.columns.turn_columns import TurnColumns, TurnGames
from penstock.envs.calls import EnvCall, perform
from penstock.envs.checks import Checks
from penstock.envs.factory import EnvContext, EnvFactory
from penstock.envs.seats import ParallelView
from penstock.envs.seeding import ColumnStreams, Purpose
from penstock.errors import GameError
from penstock.samplers.config import SamplerConfig
from penstock.samplers.resuming import StateMessage, WorkerParts
from penstock.samplers.sampler_memory import SamplerMemory
from penstock.samplers.sampler_plan import EnvRange, SamplerPlan, episodes_per_env
from penstock.samplers.seating import Seating, column_streams, env_streams, keys_of
from penstock.workers.control import Command, Phase, UntimedProgress
from penstock.workers.program import WorkerContext

#: The data of one worker: the factories of its training environments, and of its evaluation environments.
WorkerFactories = tuple[Sequence[EnvFactory], Sequence[EnvFactory]]


@dataclass
class SamplerProgram:
    """The `WorkerProgram` of samplers. Its fields are sent to the workers; `build` makes the rest there."""

    agents: tuple[Agent, ...]  #: one for each policy
    config: SamplerConfig  #: without env_fn and its arguments, which are in the data of each worker
    eval_collector_cls: type[BaseEvalCollector]
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
            self._appender = own = appender.of_writer(self._plan.worker_rank)
            self._batches = [
                own.bind(public_view(slot, self.config.batch_T)[:, columns]) for slot in self._memory.slots
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
        self._collector: Collector | LockStepCollector
        self._eval_collector: BaseEvalCollector | SeatEvalCollector | None = None
        if self.seating.has_games:
            self._build_lock_step(self.seating, env_factories, eval_env_factories)
            return
        self._collector = self._build_collector(env_factories)
        if eval_env_factories:
            self._eval_collector = self._build_eval_collector(eval_env_factories)

    def _build_collector(self, factories: Sequence[EnvFactory]) -> Collector:
        plan = self._plan
        streams = column_streams(self.seating, plan, self.seed)
        columns = _slice(plan.columns)
        slots = [BatchColumns(arrays, columns, is_poisoned=self.config.debug) for arrays in self._memory.slots]
        envs, episodes = self._build_envs(factories, streams, Purpose.TRAIN), None
        if self._memory.episodes is not None and isinstance(envs, EnvColumns):
            envs.episodes = episodes = EpisodeRecorder(self._memory.episodes, plan.columns, streams, self._progress)
        collector = self.config.collector_cls(
            CollectorParts(
                envs=envs,
                agent=self._build_agent(0, streams, Purpose.ACTION),
                samples=slots[0],
                slots=slots,
                tracker=self._build_tracker(plan.env_ranks),
                progress=self._progress,
                streams=streams,
                max_decorrelation_steps=self.config.max_decorrelation_steps,
                episodes=episodes,
            )
        )
        collector.start_envs()
        collector.start_agent()
        return collector

    def _build_eval_collector(self, factories: Sequence[EnvFactory]) -> BaseEvalCollector:
        env_ranks, arrays, config = self._plan.eval_env_ranks, self._memory.slots[0], self.config

        def zeros(field: ArrayTree) -> Any:
            return map_leaves(lambda leaf: np.zeros((len(env_ranks), *leaf.shape[2:]), leaf.dtype), field)

        streams = column_streams(self.seating, self._plan, self.seed, evaluation=True)
        return self.eval_collector_cls(
            EvalCollectorParts(
                envs=self._build_envs(factories, streams, Purpose.EVAL),
                agent=self._build_agent(0, streams, Purpose.EVAL_ACTION),
                tracker=self._build_tracker(env_ranks),
                progress=self._progress,
                streams=streams,
                max_T=self.eval_max_T,
                max_trajectories=config.eval_max_trajectories,
                episodes=episodes_per_env(config.eval_episodes, config.eval_n_envs, self._plan.eval_columns),
                observation=zeros(arrays.observation),
                action=zeros(arrays.action),
                agent_info=zeros(arrays.agent_info),
            )
        )

    def _build_envs(self, factories: Sequence[EnvFactory], streams: ColumnStreams, purpose: Purpose) -> EnvBatch:
        env_ranks, seeds, worker_rank = streams.env_ranks, streams.env_seeds(purpose), self._plan.worker_rank
        checks = Checks(self.config.check_finite, self.config.debug)
        if self.config.collector_cls.batched:
            context = EnvContext(env_ranks[0], worker_rank, seeds[0], purpose)
            env = self._builder.build_batched(factories[0], len(env_ranks), context)
            return VectorColumns(env, env_ranks, self._progress, checks)
        envs = [
            self._builder.build(factory, EnvContext(env_rank, worker_rank, seed, purpose))
            for factory, env_rank, seed in zip(factories, env_ranks, seeds, strict=True)
        ]
        columns = EnvColumns(envs, env_ranks, self._progress, checks, self.config.flatten_wrappers)
        self._make_renewable(columns, [partial(self._builder.build, each) for each in factories], streams, purpose)
        return columns

    def _make_renewable(
        self,
        envs: EnvColumns | Games,
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
        agent.runtime.set_columns(streams.env_ranks, self.env_range.n_eval_envs if is_eval else self.env_range.n_envs)
        return agent

    def _build_tracker(self, env_ranks: Sequence[int], *, of_games: bool = False) -> Tracker:
        """The tracker of these columns; or that of whole games, which follows the rewards of all their agents."""
        put_records = partial(self._memory.records.put, self._plan.worker_rank)
        cls, kwargs, put_messages = self.config.traj_info_cls, self.traj_info_kwargs, self._context.put
        if of_games and cls is not TrajInfo:  # its `step` is for the steps of one agent
            return BatchTracker(env_ranks, partial(put_as_objects, cls, kwargs, put_messages), cls(**kwargs)._discount)
        return make_tracker(cls, kwargs, env_ranks, put_records, put_messages)

    # ---- building, where several agents share an environment ---------------------------------

    def _build_lock_step(
        self, seating: Seating, factories: Sequence[EnvFactory], eval_factories: Sequence[EnvFactory]
    ) -> None:
        config = self.config
        self._collector = self._lock_step(seating, factories, Purpose.TRAIN)
        self._collector.start()
        if eval_factories:
            shares = episodes_per_env(config.eval_episodes, config.eval_n_envs, self._plan.eval_columns)
            collector = self._lock_step(seating, eval_factories, Purpose.EVAL)
            self._eval_collector = SeatEvalCollector(collector, self.eval_max_T, config.eval_max_trajectories, shares)

    def _lock_step(self, seating: Seating, factories: Sequence[EnvFactory], purpose: Purpose) -> LockStepCollector:
        """The collector of these environments, with a desk for each policy that has seats in them."""
        plan, config, is_eval = self._plan, self.config, purpose is Purpose.EVAL
        side, own_envs = (seating.evaluation, plan.eval_columns) if is_eval else (seating.train, plan.columns)
        streams = env_streams(plan, self.seed, evaluation=is_eval)
        example_spaces = [(agent.observation_space, agent.action_space) for agent in self.agents]
        builds: list[Callable[..., ParallelView]] = []
        for b, factory in zip(own_envs, factories, strict=True):
            expected = {a: example_spaces[p] for a, p in zip(side.agents[b], side.policy[b], strict=True)}
            builds.append(partial(self._builder.build_view, factory, expected))
        envs = [
            build(EnvContext(rank, plan.worker_rank, seed, purpose))
            for build, rank, seed in zip(builds, streams.env_ranks, streams.env_seeds(purpose), strict=True)
        ]
        desks, untimed = list[Desk](), UntimedProgress(self._memory.control, plan.worker_rank)
        layouts = [layouts_of(slot, plan.policies) for slot in self._memory.slots]
        checks = Checks(config.check_finite, config.debug)
        for p, cells in enumerate(plan.eval_cells if is_eval else plan.cells):
            if not cells:
                continue
            spec = self.unrecorded.get(p)
            if is_eval:
                layout = layouts[0][p] if spec is None else unrecorded_arrays(spec, config.batch_T, 1)
                slots = [eval_columns(layout, config.batch_T, len(cells))]
            elif spec is not None:
                arrays = unrecorded_arrays(spec, config.batch_T, len(cells))
                slots = [BatchColumns(arrays, slice(None))] * len(layouts)
            else:
                slots = [BatchColumns(slot[p], _slice(cells), is_poisoned=config.debug) for slot in layouts]
            agent, seats = self.agents[p], column_streams(seating, plan, self.seed, p, evaluation=is_eval)
            # The first desk writes the timeline of training.
            progress = untimed if is_eval or desks else self._progress
            spaces = agent.observation_space, agent.action_space
            columns_cls, desk_cls = (TurnColumns, TurnDesk) if seating.in_turns else (SeatColumns, Desk)
            own = columns_cls(cast(Any, seats.env_ranks), spaces, progress, checks)
            parts = CollectorParts(
                envs=own,
                agent=self._build_agent(p, seats, Purpose.EVAL_ACTION if is_eval else Purpose.ACTION),
                samples=slots[0],
                slots=slots,
                tracker=self._build_tracker(keys_of(seating, seats)),
                progress=progress,
                streams=seats,
                max_decorrelation_steps=config.max_decorrelation_steps,
            )
            desks.append(desk_cls(parts, who=p + 1 if len(seating.policies) > 1 else 0, evaluates=is_eval))
        games_cls, collector_cls = (TurnGames, TurnCollector) if seating.in_turns else (Games, LockStepCollector)
        games = games_cls(envs, [desk.envs for desk in desks], streams.env_ranks)
        self._make_renewable(games, builds, streams, purpose)
        if isinstance(games, TurnGames):
            games.chooser = seating.chooser
        tracker = self._build_tracker(keys_of(seating, streams), of_games=True)
        return collector_cls(games, desks, tracker, streams)

    # ---- commands --------------------------------------------------------------------------

    def idle(self) -> None:
        """Reset what needs a reset, while the learner trains."""
        self._collector.reset_if_needed()

    def run(self, command: Command) -> None:
        """Run one command: collect a batch, evaluate, or make a call on the environments."""
        evaluator, records = self._eval_collector, self._memory.records
        if command.is_batch:
            slot = command.batch % self._n_slots
            records.begin(self._plan.first_record(self.config.batch_T, slot))
            if self._memory.appender is None:
                self._collect(command, slot)
            # The worker that this one replaces may have died when the batch was in the replay.
            elif not self._appender.has_batch(command.batch, self.config.batch_T):
                self._collect(command, slot)
                self._append(slot)
            return
        records.begin()
        if not command.do_eval:
            self._answer(pickle.loads(self._memory.mailbox.read()))
        elif evaluator is not None:
            evaluator.pull()
            with self._recording(evaluator.envs, command):
                evaluator.collect_evaluation(command.itr)

    def _recording(self, envs: object, command: Command) -> AbstractContextManager[None]:
        """Record the first evaluation environment, if it is this worker's, in the folder that the message names."""
        if not command.has_message or self._plan.eval_columns.start or not isinstance(envs, EnvColumns):
            return nullcontext()
        return envs.recorded(0, pickle.loads(self._memory.mailbox.read()), command.itr)

    def _append(self, slot: int) -> None:
        """Copy the batch into the replay."""
        own = self._collector.desks[0] if isinstance(self._collector, LockStepCollector) else self._collector
        self._appender.append(self._batches[slot], own.samples.policy_version, continues=True)

    def _collect(self, command: Command, slot: int) -> None:
        collector, control, gate = self._collector, self._memory.control, self._context.gate
        if self._n_slots > 1:
            collector.use_slot(slot)
        version = collector.pull(command.version)
        self._progress.note_version(version)
        if command.version and gate is not None:
            gate.wake_main()  # `sync_shared_memory` may wait for this
        collector.collect_batch(command.itr)
        # With central inference, the server has noted the version before its first reply.
        collector.note_version(version if self._memory.steps is None else control.began_with(self._plan.worker_rank))

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
            envs, columns, env_ranks = self._collector.envs.envs, plan.columns, plan.env_ranks
        elif self._eval_collector is not None:
            envs, columns, env_ranks = self._eval_collector.envs.envs, plan.eval_columns, plan.eval_env_ranks
        else:
            return
        self._progress.enter(Phase.CALLING)
        results = perform(call, envs, columns, env_ranks)
        self._context.put(results)
        self._progress.n_results = len(results)

    def close(self) -> None:
        """Close every environment that was built; the first exception is raised when all have been closed."""
        if hasattr(self, "_builder"):  # `build` may have failed early
            self._builder.close()


def _slice(columns: range) -> slice:
    return slice(columns.start, columns.stop)
