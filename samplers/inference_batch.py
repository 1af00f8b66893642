"""One batch of inference: the agent acts on rows of the step buffer, for all workers or for some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.agents.agent import Agent, as_agent_step
from penstock.agents.outputs import AgentInfoWriter, write_action
from penstock.buffers.named import NamedArrays, map_leaves
from penstock.envs.rows import ColumnError
from penstock.samplers.sampler_memory import StepBuffer


class InferenceBatch:
    """An agent with its step buffer: that of the training environments, or that of evaluation."""

    def __init__(self, agent: Agent, steps: StepBuffer, columns: Sequence[range], *, in_turns: bool = False) -> None:
        """`agent` has state for all columns; `columns[i]` are the columns of worker i. `in_turns`: only those that are
        `asked` act."""
        self.agent, self._columns = agent, [np.arange(cells.start, cells.stop) for cells in columns]
        self._row = row = steps.memory.arrays
        # Looked up once, because a look-up by name takes as long as writing the field.
        self._asked = row.asked if in_turns else None
        self._inputs, self._reset = (row.observation, row.prev_action, row.prev_reward), row.reset
        self._action, self._agent_info = row.action, row.agent_info
        self._whole_row = AgentInfoWriter(self._row.agent_info.map(lambda leaf: leaf[None]))
        self._parts: dict[int, tuple[NamedArrays, AgentInfoWriter]] = {}

    def step(self, ranks: Sequence[int]) -> int:
        """Act for these workers; returns for how many environments."""
        columns, inputs = self._select(ranks, self._asked)
        n = len(inputs[-1])
        step = as_agent_step(self.agent.step(*inputs), self.agent)
        try:
            if columns is None:
                write_action(self._action, step.action)
                self._whole_row.write(0, step.agent_info)
            else:
                action = map_leaves(lambda leaf: leaf[columns], self._action)
                write_action(action, step.action)
                self._action[columns] = action
                agent_info, writer = self._part_of_row(n)
                writer.write(0, step.agent_info)
                self._agent_info[columns] = agent_info[0]
        except ColumnError as error:
            column = error.column if columns is None else int(columns[error.column])
            assert self.agent.env_ranks is not None
            raise error.with_env_rank(self.agent.env_ranks[column]) from None
        return n

    def _part_of_row(self, n: int) -> tuple[NamedArrays, AgentInfoWriter]:
        """Arrays `[1, n, ...]` for the agent_info of n columns, with their writer; made once."""
        if n not in self._parts:
            arrays = self._row.agent_info.map(lambda leaf: np.zeros((1, n, *leaf.shape[1:]), leaf.dtype))
            self._parts[n] = arrays, AgentInfoWriter(arrays)
        return self._parts[n]

    def value(self, ranks: Sequence[int]) -> None:
        """Estimate the values that these workers request."""
        columns, inputs = self._select(ranks)
        self._row.value[... if columns is None else columns] = self.agent.value(*inputs)

    def restart(self, rank: int, rngs: Sequence[np.random.Generator]) -> None:
        """This worker's columns have new environments and new random streams."""
        columns = self._columns[rank]
        self.agent.reseed_columns(columns, rngs)
        for column in columns:
            self.agent.reset_one(int(column))

    def _select(
        self, ranks: Sequence[int], asked: npt.NDArray[np.bool_] | None = None
    ) -> tuple[npt.NDArray[np.intp] | None, tuple[Any, Any, Any]]:
        """Select these workers' columns in the agent, or those that are `asked`; returns them (None: all) and their
        inputs."""
        reset, inputs, is_all = self._reset, self._inputs, len(ranks) == len(self._columns)
        columns = None if is_all and asked is None else np.concatenate([self._columns[rank] for rank in ranks])
        if columns is not None and asked is not None:
            columns = columns[asked[columns]]
        to_reset = reset.nonzero()[0] if columns is None else columns[reset[columns]]
        if len(to_reset):
            for column in to_reset.tolist():
                self.agent.reset_one(column)
            reset[to_reset] = False
        self.agent.select(columns)
        if columns is None:
            return columns, inputs
        rows: Any = columns
        # Columns ascend. Those without a gap, such as a half, need no copy: a GPU reads them from page-locked memory.
        if len(columns) and columns[-1] - columns[0] + 1 == len(columns):
            rows = slice(columns[0], columns[-1] + 1)
        return columns, tuple(part[rows] for part in inputs)
