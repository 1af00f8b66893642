"""The shared memory of a sampler, and what it needs of a replay that its workers write into: `learning.Replay`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from penstock.agents.agent import Agent
from penstock.agents.shared_parameters import SharedParameters
from penstock.buffers import Samples, SamplesBuffer
from penstock.buffers.named import ArrayTree, NamedArrays, map_leaves
from penstock.buffers.object_pipe import Mailbox, TrajectoryRecords
from penstock.buffers.shared import ArraySpec, NamedMemory
from penstock.buffers.slots import layouts_of
from penstock.collectors import TrajInfo
from penstock.columns.episode_log import EpisodeLog
from penstock.samplers.config import SamplerConfig
from penstock.samplers.sampler_plan import SamplerPlan, eval_max_T
from penstock.samplers.seating import Seating
from penstock.samplers.stats import ServerTotals
from penstock.workers.control import Command, ControlBlock
from penstock.workers.plan import WorkerPlan


class ReplayAppender(Protocol):
    """Writes the batches of one worker into the replay."""

    ring: Any  #: its memory, `ring.memory`, is shared

    def of_writer(self, writer: int) -> ReplayAppender:
        """The appender of this worker."""

    def bind(self, samples: Samples) -> Any:
        """The arrays of `samples` `[T, B]`, for `append`."""

    def has_batch(self, number: int, batch_T: int) -> bool:
        """Whether this worker, or the one that it replaces, has written batch `number`."""

    def append(self, batch: Any, version: Any, *, continues: bool) -> None:
        """Write one batch."""


class Feed(Protocol):
    """Links one sampler with its replay."""

    traj_infos: deque[TrajInfo]  #: finished trajectories that `take_traj_infos` has not returned yet
    n_dropped: int  #: how many were too old to be kept

    def connect(self, samples: Samples, columns: Sequence[range], n_slots: int) -> ReplayAppender:
        """Allocate memory for batches such as `samples`, of which worker i writes `columns[i]`."""

    def begin(self, batch: int) -> bool:
        """Whether the workers may begin batch number `batch`: then they must."""

    def take(self, batch: int, infos: list[TrajInfo]) -> None:
        """Batch number `batch` is in the replay, and these trajectories have finished in it."""

    def expect(self, n: int) -> None:
        """The learner will draw `n` positions."""

    def may_draw(self) -> bool:
        """Whether the learner may draw as many positions as it said."""


class MakesFeed(Protocol):
    """A replay."""

    def make_feed(self, sampler: Any, ratio: Any, *, is_pinned: bool) -> Feed:
        """Link it with `sampler`. `is_pinned`: draws see whole batches that were taken, and no others."""


class StepBuffer:
    """Inputs and outputs of the agent for `n_columns` environments, in the structure of a samples buffer.

    A worker writes `observation`, `prev_action`, `prev_reward` and `reset` of its columns, and sends a request. Where
    agents take turns, it writes only the columns that must act, and `asked` says which these are. The inference server
    replies with `action` and `agent_info`, or with `value`, and clears `reset`. Neither writes while the other may. One
    exception: a worker that replaces a dead one may write its row while the server still acts for its predecessor; it
    ignores that reply.
    """

    def __init__(self, samples: NamedArrays, n_columns: int, *, shared: bool) -> None:
        def row(field: ArrayTree) -> Any:
            return map_leaves(lambda leaf: ArraySpec((n_columns, *leaf.shape[2:]), leaf.dtype), field)

        number = ArraySpec((n_columns,), np.dtype(np.float32))
        specs = NamedArrays(
            observation=row(samples.observation),
            prev_action=row(samples.action),
            prev_reward=number,
            reset=ArraySpec((n_columns,), np.dtype(np.bool_)),
            asked=ArraySpec((n_columns,), np.dtype(np.bool_)),
            action=row(samples.action),
            agent_info=row(samples.agent_info),
            value=number,
        )
        self.memory = NamedMemory(specs, shared=shared, purpose=f"a step buffer of {n_columns} environments")

    def columns(self, columns: range) -> NamedArrays:
        """The views that one worker writes and reads."""
        view: NamedArrays = self.memory.arrays[columns.start : columns.stop]
        return view


@dataclass(frozen=True)
class SamplerMemory:
    """What the main process and the workers share."""

    control: ControlBlock
    samples: NamedMemory
    records: TrajectoryRecords
    parameters: tuple[SharedParameters, ...]  #: of each policy
    mailbox: Mailbox
    # Only with central inference: what workers and the inference server exchange, for training and for evaluation, and
    # what the server has done.
    steps: StepBuffer | None = None
    eval_steps: StepBuffer | None = None
    totals: ServerTotals | None = None
    episode_log: EpisodeLog | None = None  #: only with `seed_episodes=True`
    # Only if the workers write into a replay.
    appender: ReplayAppender | None = None

    @classmethod
    def allocate(
        cls,
        config: SamplerConfig,
        plans: Sequence[SamplerPlan],
        buffer: SamplesBuffer,
        agents: Sequence[Agent],
        seating: Seating,
        *,
        shared: bool,
        central: bool,
    ) -> SamplerMemory:
        """Allocate all but `buffer`. `agents` has one for each policy."""
        layouts, eval_T = layouts_of(buffer.slots[0]), eval_max_T(config.eval_max_steps, config.eval_n_envs)
        sizes = config.batch_T, config.memory_slots, eval_T, config.eval_max_trajectories or config.eval_episodes
        # Objects of a TrajInfo subclass do not use the record arrays.
        is_stock = config.traj_info_cls is TrajInfo
        beside = dict[str, Any]()
        if central:
            numbers = [cells[0].stop for cells in (plans[-1].cells, plans[-1].eval_cells)]  # of the only policy
            for name, n in zip(("steps", "eval_steps"), numbers, strict=True):
                beside[name] = StepBuffer(layouts[0], n, shared=shared) if n else None
            beside["totals"] = ServerTotals(max(numbers), shared=shared)
        if config.seed_episodes:
            size = len(buffer.slots), config.batch_T
            n_before = config.max_decorrelation_steps
            beside["episode_log"] = EpisodeLog(layouts, seating.train, size, n_before, shared=shared)
        return cls(
            # The inference server has the last progress row.
            control=ControlBlock(len(plans) + central, seating.most_rounds(config.batch_T), shared=shared),
            samples=buffer.memory,
            records=TrajectoryRecords(
                [plan.most_trajectories(*sizes) if is_stock else 1 for plan in plans], shared=shared
            ),
            parameters=tuple(agent.runtime.share_memory(shared=shared) for agent in agents),
            mailbox=Mailbox(),
            **beside,
        )

    def count_lost(self, plan: WorkerPlan, command: Command | None, t: int, n_results: int) -> int:
        """How many trajectories are lost with a worker that dies in row `t` of `command` (None: between two).

        They are the running ones, and the ones that finished in a command that it has not completed.
        """
        assert isinstance(plan, SamplerPlan)
        n_running = sum(map(len, plan.cells))
        if command is not None and command.do_eval:
            return n_running + sum(map(len, plan.eval_cells)) + n_results
        if command is None or command.has_message:
            return n_running
        slot = self.slots[command.batch % len(self.slots)]
        policies = zip(layouts_of(slot, plan.policies), plan.cells, strict=True)
        return n_running + sum(
            int(rows.done[1 : t + 2, cells.start : cells.stop].sum()) for rows, cells in policies if rows is not None
        )

    @property
    def slots(self) -> tuple[NamedArrays, ...]:
        """The arrays of the samples buffer, by slot."""
        return self.samples.arrays.values()

    @property
    def parts(self) -> list[Any]:
        """All of it but the parameters, which the agent owns. To close one closes its descriptor; arrays stay valid as
        long as the user holds views of them."""
        ring = None if self.appender is None else self.appender.ring
        parts = (self.control, self.records, self.steps, self.eval_steps, self.totals, self.episode_log, ring)
        return [self.samples, *(part.memory for part in parts if part is not None)]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(memory.nbytes for memory in [*self.parts, *(parameters.memory for parameters in self.parameters)])
