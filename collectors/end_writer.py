"""What is recorded where an episode ends: flags, the final observation, and its value if it was only truncated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.agents.agent import Agent
from penstock.buffers.named import ArrayTree, map_leaves
from penstock.buffers.native import put_cell
from penstock.buffers.slots import BatchColumns
from penstock.columns.interface import BatchedEnds, PolicyColumns
from penstock.envs.rows import arrays_like


class EndWriter:
    """Writes `final_obs` and `final_value`, and for single environments the flags.

    Without recurrence, all values are computed in one call at the end of the batch. That is faster: a forward pass
    takes almost as long for one row as for many. With recurrence, each value is computed at once, before the state
    changes.
    """

    def __init__(self, samples: BatchColumns, agent: Agent, columns: PolicyColumns) -> None:
        self._samples, self._agent, self._columns = samples, agent, columns
        # An item of a memoryview is written faster than one of an array.
        self.done, self.terminated = memoryview(samples.done), memoryview(samples.terminated)
        self.truncated = memoryview(samples.truncated)
        self.is_recorded, self.has_checks = samples.final_obs is not None, bool(columns.checks)
        # Final observations that the batch does not record are written into one row `[1, B, ...]`. There they are
        # checked, and their values are computed.
        scratch = map_leaves(lambda leaf: np.zeros_like(leaf[:1]), samples.observation)
        self._final_obs = samples.final_obs if self.is_recorded else scratch
        self.arrays = arrays_like(columns.observation_space, self._final_obs)
        #: (t, column) of the truncations whose values are computed at the end of the batch
        self.pending: list[tuple[int, int]] = []
        # Their observations, if the batch does not record them: pairs of k and `[k, ...]`.
        self._unrecorded: list[tuple[int, Any]] = []

    def record(
        self, t: int, column: int, observation: object, reward: float, terminated: bool, truncated: bool
    ) -> None:
        """Column's episode ended at step t with `observation`.

        Call this before the environment or the agent is reset.

        Raises `SpaceError` if `observation` does not fit its space, recorded or not.
        """
        self.done[t, column] = True  # all flags are False before: `begin_batch` has cleared them
        if terminated:
            self.terminated[t, column] = True
        if truncated:
            self.truncated[t, column] = True
        row = t if self.is_recorded else 0
        if self.has_checks or not put_cell(self.arrays, row, column, observation):
            self._columns.write_final(self.arrays, row, column, observation)
        if self._samples.final_value is not None and truncated and not terminated:
            self.value_end(t, column, row, reward)

    def value_end(self, t: int, column: int, row: int, reward: float) -> None:
        """Column's episode was truncated at step t, with the final observation in `row` of `arrays`: compute its value
        now if the agent has a state, else at the end of the batch."""
        samples, last = self._samples, self._final_obs[row][column : column + 1]
        if self._agent.recurrent:
            samples.final_value[t, column] = self._values_now(t, [column], last, [reward])[column]
            return
        self.pending.append((t, column))
        if not self.is_recorded:
            self._unrecorded.append((1, map_leaves(np.copy, last)))

    def cut(self, t: int, column: int) -> int:
        """Column's step t has no result, since its game has failed: the step before has ended its episode. Returns the
        first step of the episode in this batch.

        Call this before the agent is reset. At t = 0 the batch before has used the value of this observation already.
        """
        samples = self._samples
        before = np.flatnonzero(samples.done[:t, column])
        first = int(before[-1]) + 1 if before.size else 0
        self.done[t, column], samples.valid[t, column] = True, False
        if t == first or not samples.valid[t - 1, column]:
            return first
        self.done[t - 1, column] = self.truncated[t - 1, column] = True
        last = map_leaves(lambda leaf: leaf[t, column : column + 1].copy(), samples.observation)
        if self.is_recorded:
            samples.final_obs[t - 1, column : column + 1] = last
        if samples.final_value is None:
            return first
        if not self._agent.recurrent:
            self.pending.append((t - 1, column))
            if not self.is_recorded:
                self._unrecorded.append((1, last))
        elif "value" in samples.agent_info:  # the state has gone on, but the agent has recorded this value
            samples.final_value[t - 1, column] = samples.agent_info.value[t, column]
        else:
            values = self._values_now(t - 1, [column], last, [samples.reward[t, column]])
            samples.final_value[t - 1, column] = values[column]
        return first

    def record_rows(self, t: int, ends: BatchedEnds) -> None:
        """`record` for all episodes that ended in one step, without the flags."""
        samples, columns, observation = self._samples, ends.columns, ends.observation
        is_valued = ~ends.terminated[columns]
        if self.is_recorded:
            samples.final_obs[t, columns] = observation
        if samples.final_value is None or not is_valued.any():
            return
        chosen = columns[is_valued]
        if self._agent.recurrent:
            values = self._values_now(t, columns, observation, ends.reward)
            samples.final_value[t, chosen] = values[chosen]
        else:
            self.pending += [(t, column) for column in chosen.tolist()]
            if not self.is_recorded:
                self._unrecorded.append((len(chosen), map_leaves(lambda leaf: leaf[is_valued], observation)))

    def write_values(self) -> None:
        """Compute the values of all `pending` truncations. Call this when all rows of the batch are written."""
        samples = self._samples
        t, column = np.array(self.pending).T
        observation = self._pending_observations(t, column)
        # Row t + 1 holds the action and the reward of step t: the agent's prev_action and prev_reward.
        at = (t + 1, column)
        samples.final_value[t, column] = self._agent.value(observation, samples.action[at], samples.reward[at])
        self.pending.clear()
        self._unrecorded.clear()

    def _pending_observations(self, t: npt.NDArray[Any], column: npt.NDArray[Any]) -> Any:
        if self.is_recorded:
            return self._final_obs[t, column]
        observation = map_leaves(lambda leaf: np.empty((len(t), *leaf.shape[2:]), leaf.dtype), self._final_obs)
        i = 0
        for n, unrecorded in self._unrecorded:
            observation[i : i + n] = unrecorded
            i += n
        return observation

    def _values_now(
        self,
        t: int,
        columns: Sequence[int] | npt.NDArray[Any],
        observation: ArrayTree,
        reward: Sequence[float] | npt.NDArray[Any],
    ) -> Any:
        """Values `[B]` after step t, with `observation` `[k, ...]` and `reward` `[k]` in `columns`."""
        samples = self._samples
        row = map_leaves(lambda leaf: leaf[t].copy(), samples.observation)
        row[columns] = observation
        prev_reward = samples.reward[t].copy()
        prev_reward[columns] = reward
        return self._agent.value(row, samples.action[t + 1], prev_reward)
