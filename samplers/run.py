"""A run: what `initialize` has made, and what a schedule does with it."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.agents import Agent
from penstock.agents.shared_parameters import UnpublishedChanges
from penstock.arguments import integer
from penstock.buffers import Samples
from penstock.buffers.object_pipe import ObjectMessage
from penstock.buffers.samples import parts_of
from penstock.collectors import EvalCollector, TrajInfo
from penstock.envs.calls import pickled, single_results
from penstock.envs.seeding import eval_seed
from penstock.errors import ConfigError
from penstock.samplers.batches import Batches, frame_of_user
from penstock.samplers.config import SamplerState
from penstock.samplers.metrics import SamplerMetrics
from penstock.samplers.refusals import refuse
from penstock.samplers.results import EVALUATION, Trajectories, ends_of_trajectories, in_order, infos_from_messages
from penstock.samplers.stats import SamplerStats, ServerStats, WorkerStats, worker_stats
from penstock.workers.call_guard import CallGuard
from penstock.workers.control import PUBLISHED, Command
from penstock.workers.pool import Pool

if TYPE_CHECKING:
    from penstock.samplers.allocation import Allocation, InitArguments
    from penstock.samplers.resuming import StateMessage
    from penstock.samplers.schedule import Schedule
    from penstock.samplers.who_acts import Acting

_log = logging.getLogger("penstock")

_MOST_UNPUBLISHED = 5  # batches
_READY, _SAMPLING = SamplerState.READY, SamplerState.SAMPLING


class Run:
    """The workers of a sampler, their memory, and what has been counted. `initialize` makes it.

    A schedule calls `submit`, then `wait`, for each batch. Most of the rest is for the sampler's own calls.

    Attributes:
        config: the arguments of the sampler; `seed`: the seed in use.
        agents: the learner's agents by the name of their policy; one agent has the name "agent".
        plans: which worker has which environments, and which columns of the batch.
        seating: who sits where.
        memory: what the main process and the workers share. `memory.control` are their gates and progress.
        batches: the memory of the batches, by slot, and the batches in the user's hands.
        metrics: the newest trajectories, for `sampler.metrics()`.
        pool: the workers.
        batch, itr: the number of the batch that runs, or of the next one; the `itr` of the last `submit`.
        policy_version: see `Sampler.policy_version`.
        samples_np: the last batch as numpy arrays.
    """

    pool: Pool

    def __init__(
        self,
        arguments: InitArguments,
        agents: Mapping[str, Agent],
        allocation: Allocation,
        acting: Acting,
        schedule: Schedule,
        guard: CallGuard[SamplerState],
    ) -> None:
        layout, self.acting, self.schedule, self.guard = allocation.layout, acting, schedule, guard
        self.config, self.seed, self.agents = arguments.config, arguments.seed, agents
        self.env_range, config = arguments.env_range, arguments.config
        self.plans, self.memory, self.seating = layout.plans, layout.memory, allocation.seats.seating
        self.batches = Batches(layout.batches, self.memory.slots, debug=config.debug)
        self.inference_difference, self.log_reader = allocation.agents.inference_difference, allocation.log_reader
        self.makes_infos = arguments.seats is None  # those of a shard stay as the workers send them
        self.memory.control.raise_generation(self.env_range.generation)
        example_info = config.traj_info_cls(**allocation.program.traj_info_kwargs)
        policies = self.seating.policies if self.seating.has_games else ()
        self.metrics = SamplerMetrics(example_info, policies, self.seating.width, has_evaluation=config.eval_n_envs > 0)
        self.policy_version: Any = None
        self.samples_np: Any = self.batches.views_for_user[0]
        self.batch = self.itr = 0
        # How many trajectories, or games, are over, by env_rank. A Counter takes three times as long.
        self.n_over: defaultdict[int, int] = defaultdict(int)
        self.n_trajectories = [0] * len(self.plans)  # returned so far, by worker rank
        self.first_records = [
            [plan.first_record(config.batch_T, slot) for plan in self.plans] for slot in range(len(layout.batches))
        ]
        self._first_batch: tuple[ServerStats, Sequence[WorkerStats]] | None = None
        self._version_word = self.memory.parameters[0].version_word if self.seating.is_shared else None
        pairs = zip(agents.items(), self.memory.parameters, strict=True)
        # Of agents that have parameters.
        self._unpublished = {name: UnpublishedChanges(agent, shared) for (name, agent), shared in pairs if shared.names}
        self._warned_of_late_rewards = False
        note = weakref.WeakMethod(self.memory.control.note_event)  # the parameters must not keep the memory alive
        for shared in self.memory.parameters:
            shared.on_published = lambda began, version: (event := note()) and event(PUBLISHED, began, version)

    @property
    def agent(self) -> Agent:
        """The agent, or that of the first policy."""
        return next(iter(self.agents.values()))

    def by_policy(self, values: Mapping[str, Any]) -> Any:
        """`values` by policy; the only one, where one agent was given."""
        return next(iter(values.values())) if self.seating.is_shared else values

    def newest_versions(self) -> dict[str, int]:
        """The versions of the newest parameters, by policy."""
        return {name: shared.version for name, shared in zip(self.agents, self.memory.parameters, strict=True)}

    # ---- a batch -----------------------------------------------------------------------------

    def submit(self, itr: int) -> None:
        """Let all workers collect the next batch, with the newest parameters. If the user holds `n_slots` batches, the
        oldest is given back. This does not wait: with workers that are processes, it takes microseconds."""
        is_plain = type(itr) is int and abs(itr) < 2**63  # the usual case: it saves a call in each batch
        self.itr = itr if is_plain else integer("itr", itr)
        if self._unpublished:
            self.check_published()
        word, batch, batches = self._version_word, self.batch, self.batches
        self.policy_version = self.newest_versions() if word is None else word[0]
        try:
            self.pool.submit(Command(self.itr, batch=batch))
        finally:  # after `submit`, so that workers do not wait for this
            if len(batches.held) == self.config.n_slots:
                batches.give_back(batch)
        self.guard.state = _SAMPLING

    def wait(self) -> tuple[Samples, list[TrajInfo]]:
        """Wait until all workers have collected the batch. Returns it, and the trajectories that finished in it. Raises
        a `SamplerBrokenError` if a worker fails. After a Ctrl-C, it may be called again."""
        self.pool.wait(f"itr={self.itr}")
        self.guard.state, batch, batches = _READY, self.batch, self.batches
        slot = batch % batches.n_slots
        if self.acting.is_central:  # it may have begun a little later, with the parameters of that time
            self.policy_version = self.by_policy(
                dict.fromkeys(self.agents, self.memory.control.version(len(self.plans)))
            )
        self.batch = batch + 1
        samples = self.hand_out(batch, valid_until=batch + self.config.n_slots)
        if self.log_reader is not None:
            self.log_reader.keep(slot)
        infos = self.take_traj_infos(slot)
        self.metrics.training.extend(infos)
        return samples, infos

    def hand_out(self, batch: int, *, valid_until: int | None) -> Samples:
        """The samples of this batch, which is complete, for the user. `valid_until`: see `Samples`."""
        batches = self.batches
        self.samples_np = batches.views_for_user[batch % batches.n_slots]
        samples: Samples = batches.hand_out(batch, valid_until)
        if not batch:
            self.note_first_batch()
        if self.seating.has_games:
            self.count_agents(samples)
        return samples

    def check_published(self, n_parts: int = 1) -> None:
        """Warn once if the workers have acted in 5 batches, of `n_parts` each, with parameters that the learner has
        changed since."""
        for name, changes in self._unpublished.items():
            if changes.note_batch(_MOST_UNPUBLISHED * n_parts):
                self._unpublished = {}
                agent = "agent" if self.seating.is_shared else f"agents[{name!r}]"
                warnings.warn(
                    f"the parameters of {agent} have changed, but were not published for {_MOST_UNPUBLISHED} batches, "
                    f"so the workers act with old ones: call {agent}.sync_shared_memory() after each update",
                    RuntimeWarning,
                    stacklevel=frame_of_user()[1],
                )
                return

    def count_agents(self, samples: Any) -> None:
        """With several agents: count their steps for `metrics`, and log once if rewards came late."""
        self.metrics.agent_steps += sum(int(np.count_nonzero(part.env.valid)) for part in parts_of(samples))
        if self._warned_of_late_rewards:
            return
        n = sum(self.memory.control.snapshot(plan.worker_rank).late_rewards for plan in self.plans)
        if n:
            self._warned_of_late_rewards = True
            _log.warning(
                "%d rewards have come for agents that had ended or had not joined yet. They are in no cell of the "
                "batch, but in the Return of the environment's TrajInfo. stats().late_rewards counts them",
                n,
            )

    # ---- trajectories ------------------------------------------------------------------------

    def take_traj_infos(self, slot: int = 0, opening: int | None = None) -> list[Any]:
        """The trajectories that the workers have sent for the last command, or for that of this opening of the gates,
        ordered by time step, then env_rank. `slot` is that of the batch; EVALUATION for an evaluation."""
        memory = self.memory
        sent: list[Any] = []
        counts = memory.control.n_results_by_rank(len(self.plans), opening)
        for rank, n in enumerate(counts):
            self.n_trajectories[rank] += n
        if not (self.acting.has_records and self.config.traj_info_cls is TrajInfo):
            sent = self.pool.take_messages(opening)
        elif any(counts):
            sent = memory.records.take(counts, self.first_records[max(slot, 0)])
        if sent and (self.seating.has_games or isinstance(sent[0], ObjectMessage)):
            sent = in_order(sent)
        if sent and self.seating.has_games:
            for env_rank in self._uncounted(sent, slot).values():
                ranks_of = [plan.eval_env_ranks if slot == EVALUATION else plan.env_ranks for plan in self.plans]
                self.n_trajectories[[env_rank in ranks for ranks in ranks_of].index(True)] -= 1
        return self.as_infos(sent, slot) if sent and self.makes_infos else sent

    def _uncounted(self, sent: Trajectories, slot: int) -> Mapping[int, int]:
        return self.seating.uncounted(ends_of_trajectories(sent), evaluation=slot == EVALUATION)

    def as_infos(self, sent: Trajectories, slot: int = 0) -> list[TrajInfo]:
        """The infos, ordered by time step, then env_rank; evaluations by number, then env_rank. Each info knows whose
        it is."""
        cls, evaluation = self.config.traj_info_cls, slot == EVALUATION
        infos: list[Any] = TrajInfo.from_records(sent) if cls is TrajInfo else infos_from_messages(cls, sent)
        n_over = defaultdict(int) if evaluation else self.n_over
        if self.seating.has_games:
            self.seating.name_infos(infos, ends_of_trajectories(sent), n_over, evaluation=evaluation)
        else:
            for info in infos:
                info.number = number = n_over[info.env_rank]
                n_over[info.env_rank] = number + 1
        if self.log_reader is not None and not evaluation:
            seeds, first = self.log_reader.seeds(slot), self.plans[0].env_ranks[0]
            for info, (t, _) in zip(infos, ends_of_trajectories(sent), strict=True):
                info.seed = int(seeds[t, info.env_rank - first])
        if self.seating.has_games and (left_out := self._uncounted(sent, slot)):
            infos = [info for i, info in enumerate(infos) if i not in left_out]
        return self._with_seeds(infos) if evaluation else infos

    def _with_seeds(self, infos: list[TrajInfo]) -> list[TrajInfo]:
        """The trajectories of an evaluation, ordered by number, then env_rank, with the seeds of their resets."""
        config = self.config
        is_seeded = not config.batched and issubclass(config.eval_collector_cls, EvalCollector)
        for info in infos:
            assert info.env_rank is not None
            assert info.number is not None
            if is_seeded or not info.number:  # others begin their further episodes as they like
                info.seed = eval_seed(self.seed, info.number * self.env_range.n_eval_envs + info.env_rank)
        return sorted(infos, key=lambda info: (info.number, info.env_rank))

    # ---- other commands ------------------------------------------------------------------------

    def send(self, message: StateMessage, call: str) -> list[Any]:
        """Let all workers perform `message`, for the call of this name. Returns their answers, by env_rank."""
        content, take = pickled(message, "the saved state"), self.pool.take_messages
        return single_results(call, self.pool.run(Command(has_message=True), call, take, message=content))

    def require(self, feature: str) -> None:
        """Raise `ConfigError` if this feature, a name of `refusals`, is impossible with this acting or schedule."""
        for part in (self.acting, self.schedule):
            if part.refused_as:
                refuse({feature: True, part.refused_as: True})

    # ---- statistics ----------------------------------------------------------------------------

    def stats(self) -> SamplerStats:
        """See `Sampler.stats`."""
        restarts, control = self.pool.restarts, self.memory.control
        workers = tuple(worker_stats(plan, control, self.n_trajectories, restarts) for plan in self.plans)
        stats = SamplerStats(workers, self.memory.nbytes, self.inference_difference)
        n_cells = self.config.batch_T * sum(worker.batches * len(worker.env_ranks) for worker in workers)
        if self.seating.has_games or not n_cells:
            return stats
        return replace(stats, valid_share=sum(worker.steps for worker in workers) / n_cells)

    def note_first_batch(self) -> None:
        """The first batch is complete: `server_stats` leaves the time before out."""
        totals = self.memory.totals
        self._first_batch = None if totals is None else (totals.stats, self.stats().workers)

    def server_stats(self) -> ServerStats:
        """See `GpuSampler.server_stats`. Raises `ConfigError` if no inference server acts."""
        totals = self.memory.totals
        if totals is None:
            raise ConfigError('server_stats needs an inference server: make the sampler with server="process"')
        return totals.with_workers(self.stats().workers, self._first_batch)
