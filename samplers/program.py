"""The worker: one share of the environments with its collectors, in whatever process it runs."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import numpy as np

from penstock.agents.base import Agent
from penstock.agents.shared_parameters import SharedParameters
from penstock.buffers.mailbox import Mailbox
from penstock.buffers.named import map_leaves
from penstock.buffers.samples import BatchColumns
from penstock.buffers.shared import NamedMemory
from penstock.buffers.step_buffer import StepBuffer
from penstock.buffers.trajectory_queue import RecordRings
from penstock.collectors.base import Collector, CollectorParts
from penstock.collectors.central import Port, RemoteAgent
from penstock.collectors.checks import Checks
from penstock.collectors.columns import EnvColumns
from penstock.collectors.env_builder import EnvBuilder
from penstock.collectors.evaluation import BaseEvalCollector, EvalCollectorParts
from penstock.collectors.tracking import Tracker, make_tracker
from penstock.collectors.traj_info import TrajInfo
from penstock.collectors.vector import VectorColumns
from penstock.envs.calls import EnvCall, perform
from penstock.envs.factory import EnvContext, EnvFactory
from penstock.envs.seeding import ColumnStreams, Purpose
from penstock.samplers.ports import WorkerPort
from penstock.samplers.server_totals import ServerTotals
from penstock.workers.control import ControlBlock, Phase
from penstock.workers.plan import WorkerPlan, episode_shares
from penstock.workers.work import FrameQueue, Station

__all__ = ["Connect", "Job", "SharedState", "Worker"]

_Factories = tuple[Sequence[EnvFactory], Sequence[EnvFactory]]  #: for training, for evaluation


@dataclass(frozen=True)
class Job:
    """What every worker is to do. Travels by cloudpickle: user classes and closures included."""

    env_factories: Sequence[EnvFactory]  #: `[batch_B]`, all columns
    eval_env_factories: Sequence[EnvFactory]  #: `[eval_n_envs]`
    agent: Agent
    collector_cls: type[Collector]
    eval_collector_cls: type[BaseEvalCollector]
    traj_info_cls: type[TrajInfo]
    traj_info_kwargs: Mapping[str, Any]
    max_decorrelation_steps: int
    eval_max_T: int
    eval_max_trajectories: int | None
    eval_episodes: int | None
    n_envs: int  #: of this sampler ...
    eval_n_envs: int
    world_size: int  #: ... and how many such samplers there are
    seed: int
    checks: Checks

    def arguments(self) -> Mapping[str, Any]:
        """What it is made of, by the names that the user knows it by."""
        names = {
            "env_factories": "env_fn (or env_kwargs)",
            "eval_env_factories": "env_fn (or eval_env_kwargs)",
        }
        return {names.get(name, name): value for name, value in vars(self).items()}

    def common(self) -> Job:
        """All but the factories."""
        return self.with_share(((), ()))

    def share_of(self, plan: WorkerPlan) -> _Factories:
        """Of both kinds of factories, those of `plan`'s columns."""
        return [self.env_factories[b] for b in plan.columns], [self.eval_env_factories[b] for b in plan.eval_columns]

    def with_share(self, share: _Factories) -> Job:
        """The same job with these factories, as a worker gets it."""
        return replace(self, env_factories=share[0], eval_env_factories=share[1])

    def start_work(self, station: Station) -> Worker:
        """In a worker process: build its environments and collectors."""
        state: SharedState = station.memory
        progress = state.control.progress(station.plan.worker_rank)
        connect = partial(WorkerPort, station.gate, progress, station.main_process)
        return Worker(station.plan, self, state, station.frames, connect)


@dataclass(frozen=True)
class SharedState:
    """The memory that a worker writes into and reads from."""

    control: ControlBlock
    samples: NamedMemory
    rings: RecordRings
    parameters: SharedParameters
    mailbox: Mailbox
    steps: StepBuffer | None = None  #: where workers hold no agent: what they exchange with it ...
    eval_steps: StepBuffer | None = None  #: ... the same for evaluation ...
    totals: ServerTotals | None = None  #: ... and what has been done for them

    def count_finished(self, plan: WorkerPlan, t: int) -> int:
        """How many trajectories have ended in rows 0 to `t` of the batch that `plan`'s worker is in."""
        return int(self.samples.arrays.done[1 : t + 2, plan.columns.start : plan.columns.stop].sum())


class Connect(Protocol):
    """Connects a worker to the inference server."""

    def __call__(self, steps: StepBuffer, columns: range, /) -> Port:
        """The port for `columns` of `steps`."""


class _RecordSink:
    """Where a worker's trackers put the records of one batch, one portion behind the other."""

    def __init__(self, rings: RecordRings, worker_rank: int) -> None:
        self._rings, self._worker_rank = rings, worker_rank
        self.n_put = 0

    def put(self, records: Any) -> None:
        self._rings.put(self._worker_rank, self.n_put, records)
        self.n_put += len(records)


class Worker:
    """Builds a plan's environments and collectors, then runs batches and evaluations on demand."""

    def __init__(
        self, plan: WorkerPlan, job: Job, state: SharedState, frames: FrameQueue, connect: Connect | None = None
    ) -> None:
        self._plan, self._job, self._state, self._connect = plan, job, state, connect
        self._frames = frames
        self._records = _RecordSink(state.rings, plan.worker_rank)
        self.progress = state.control.progress(plan.worker_rank)
        self._agent = job.agent
        self._agent.runtime.attach(state.parameters)
        self._agent.runtime.pull_shared_memory()
        self._built = EnvBuilder(self.progress, self._agent.observation_space, self._agent.action_space)
        arrays = state.samples.arrays
        self.collector = self._build_collector(
            BatchColumns(arrays, slice(plan.columns.start, plan.columns.stop)),
        )
        self._eval_collector = self._build_eval_collector(arrays) if len(plan.eval_columns) else None

    # ---- building --------------------------------------------------------------------------

    def _build_envs(self, factories: Sequence[EnvFactory], streams: ColumnStreams, purpose: Purpose) -> EnvColumns:
        env_ranks, seeds = streams.env_ranks, streams.env_seeds(purpose)
        if self._job.collector_cls.batched:
            context = EnvContext(env_ranks[0], self._plan.worker_rank, seeds[0], purpose)
            env = self._built.build_batched(factories[0], len(env_ranks), context)
            return cast(EnvColumns, VectorColumns(env, env_ranks, self.progress, self._job.checks))
        envs = []
        for factory, env_rank, seed in zip(factories, env_ranks, seeds, strict=True):
            envs.append(self._built.build(factory, EnvContext(env_rank, self._plan.worker_rank, seed, purpose)))
        return EnvColumns(envs, env_ranks, self.progress, self._job.checks)

    def _copy_of_agent(self, streams: ColumnStreams, purpose: Purpose, n_envs: int) -> Agent:
        agent = self._agent.runtime.column_copy(streams.rngs(purpose))
        if self._connect is not None and isinstance(agent, RemoteAgent):
            is_eval = purpose is Purpose.EVAL_ACTION
            steps = self._state.eval_steps if is_eval else self._state.steps
            assert steps is not None
            agent.connect(self._connect(steps, self._plan.eval_columns if is_eval else self._plan.columns))
        agent.runtime.set_columns(streams.env_ranks, n_envs * self._job.world_size)
        return agent

    def _tracker(self, env_ranks: range) -> Tracker:
        job = self._job
        return make_tracker(job.traj_info_cls, job.traj_info_kwargs, env_ranks, self._records.put, self._frames.put)

    def _build_collector(self, samples: BatchColumns) -> Collector:
        job, env_ranks = self._job, self._plan.env_ranks
        streams = ColumnStreams(job.seed, env_ranks, self._plan.generation)
        collector = job.collector_cls(
            CollectorParts(
                envs=self._build_envs(job.env_factories, streams, Purpose.TRAIN),
                agent=self._copy_of_agent(streams, Purpose.ACTION, job.n_envs),
                samples=samples,
                tracker=self._tracker(env_ranks),
                progress=self.progress,
                streams=streams,
                max_decorrelation_steps=job.max_decorrelation_steps,
            )
        )
        collector.start_envs()
        collector.start_agent()
        return collector

    def _build_eval_collector(self, arrays: Any) -> BaseEvalCollector:
        job, env_ranks = self._job, self._plan.eval_env_ranks

        def scratch(field: Any) -> Any:
            return map_leaves(lambda leaf: np.zeros((len(env_ranks), *leaf.shape[2:]), leaf.dtype), field)

        streams = ColumnStreams(job.seed, env_ranks, self._plan.generation)
        return job.eval_collector_cls(
            EvalCollectorParts(
                envs=self._build_envs(job.eval_env_factories, streams, Purpose.EVAL),
                agent=self._copy_of_agent(streams, Purpose.EVAL_ACTION, job.eval_n_envs),
                tracker=self._tracker(env_ranks),
                progress=self.progress,
                streams=streams,
                max_T=job.eval_max_T,
                max_trajectories=job.eval_max_trajectories,
                episodes=episode_shares(job.eval_episodes, job.eval_n_envs, self._plan.eval_columns),
                observation=scratch(arrays.observation),
                action=scratch(arrays.action),
                agent_info=scratch(arrays.agent_info),
            )
        )

    # ---- working ---------------------------------------------------------------------------

    def prepare(self) -> None:
        """Reset what needs it, while the learner trains."""
        self.collector.reset_if_needed()

    def run(self) -> None:
        """What the control block says: one batch or one evaluation, with the newest parameters, or a call."""
        control, collector, evaluator = self._state.control, self.collector, self._eval_collector
        self._records.n_put = 0
        self.progress.begin()
        if control.do_call:
            self._call(pickle.loads(self._state.mailbox.read()))
        elif not control.do_eval:
            collector.agent.runtime.pull_shared_memory()
            collector.collect_batch(control.itr)
        elif evaluator is not None:
            evaluator.agent.runtime.pull_shared_memory()
            evaluator.collect_evaluation(control.itr)

    def _call(self, call: EnvCall) -> None:
        plan = self._plan
        if not call.evaluation:
            envs, columns, env_ranks = self.collector.envs.envs, plan.columns, plan.env_ranks
        elif self._eval_collector is not None:
            envs, columns, env_ranks = self._eval_collector.envs.envs, plan.eval_columns, plan.eval_env_ranks
        else:
            return
        self.progress.enter(Phase.CALLING)
        frames = perform(call, envs, columns, env_ranks)
        self._frames.put(frames)
        self.progress.trajectories = len(frames)

    def close(self) -> None:
        """Close every environment that was built; the first exception is raised when all have had their turn."""
        self._built.close()
