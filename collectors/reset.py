"""ResetCollector: an environment is reset as soon as its episode ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from penstock.collectors.collector import Collector, CollectorParts
from penstock.columns.interface import snapshot
from penstock.columns.single_columns import EnvColumns


class ResetCollector(Collector):
    """Resets in the middle of a batch. So every cell of the batch holds a real step, and `valid` is True."""

    def __init__(self, parts: CollectorParts) -> None:
        super().__init__(parts)
        self._t = 0
        self._ended: list[int] = []  # columns whose episode ended in the current row
        if isinstance(self.envs, EnvColumns):
            self.envs.on_cut = self._on_cut

    def collect_batch(self, itr: int) -> None:
        self.begin_batch(itr)
        for t in range(self.batch_T):
            self.act(t)
            self.step_envs(t)
        self.end_batch()

    def step_envs(self, t: int) -> None:
        """Second part of step t: step every environment with its action, and record the results."""
        self.progress.begin_stepping(t)
        self._t = t
        self.envs.step(self.prev_action, self._on_episode_end, self.on_step, (self._observations, t + 1))
        if self._info_writer is not None:
            self.record_env_info(t)
        self.write_step(t)
        for column in self._ended:
            self.prev_reward[column] = 0
        self._ended.clear()

    def _on_episode_end(self, column: int, observation: Any, reward: float, terminated: bool, truncated: bool) -> Any:
        """Record the end of column's episode, and start the next one."""
        self.record_episode_end(self._t, column, observation, reward, terminated, truncated)
        self._ended.append(column)
        return self.reset_column(column)

    def _on_cut(self, column: int, error: Exception) -> Any:
        """Column's game has failed in this step: end its episode with the step before, and start the next one."""
        self.record_cut(self._t, column)
        cast(EnvColumns, self.envs).renew(column, error)
        self._ended.append(column)
        return self.reset_column(column)


class WaitResetCollector(ResetCollector):
    """Resets between batches, for environments with a slow reset. At most one episode ends per column and batch.

    After its episode's end, the column is parked until the batch ends: its environment is not stepped, every field is
    zero and `samples.env.valid` is False. `reset_if_needed` resets it while the learner trains. The next batch starts
    with the new episode's first observation.
    """

    def reset_if_needed(self) -> None:
        if self.envs.parked:
            self.progress.leave_batch()
        for column in self.envs.parked:
            self.reset_column(column)
            self.prev_reward[column] = 0
            self.tracker.drop(column)  # the parked rows are not a trajectory
        self.envs.unpark_all()

    def collect_batch(self, itr: int) -> None:
        self.begin_batch(itr)
        # Row 0 comes from the batch before and is zero where a column was parked. Write the new first observations.
        self.envs.write_observations(self.samples.observation_rows[0])
        self.samples.valid[...] = True
        for t in range(self.batch_T):
            # The agent acts for parked columns too, and the action is then set to zero. So each column draws the same
            # random numbers, whatever the other columns do.
            self.act(t)
            self._zero_actions(t, self.envs.parked)
            self.step_envs(t)
        self.end_batch()
        if self.samples.bootstrap_value is not None:
            self.samples.bootstrap_value[self.envs.parked] = 0

    def step_envs(self, t: int) -> None:
        """Second part of step t: step every environment that is not parked, and record the results."""
        super().step_envs(t)
        for column in self.envs.parked:
            self.samples.observation_rows[t + 1][column] = 0
            self.prev_reward[column] = 0

    def _on_episode_end(self, column: int, observation: Any, reward: float, terminated: bool, truncated: bool) -> Any:
        """Record the end of column's episode and park it."""
        self.record_episode_end(self._t, column, observation, reward, terminated, truncated)
        self.samples.valid[self._t + 1 :, column] = False
        self.envs.park(column)
        return snapshot(observation)  # it may be a view of the row, which becomes zero

    def _on_cut(self, column: int, error: Exception) -> Any:
        """As for the end of an episode, but this step is parked already. The new game starts meanwhile."""
        t = self._t
        self.record_cut(t, column)
        self.samples.done[t, column] = self.samples.valid[t:, column] = False
        cast(EnvColumns, self.envs).renew(column, error)
        self.envs.park(column)
        self._zero_actions(t, [column])  # only this one: if an episode ends in this step, its action stays
        last = snapshot(self.envs.observations[column])
        if t:  # row 0 has the observation after the batch before
            self.samples.observation_rows[t][column] = 0
        return last

    def _zero_actions(self, t: int, columns: Sequence[int]) -> None:
        for column in columns:
            self.samples.action_rows[t + 1][column] = 0
            self.prev_action[column] = 0
            if self._has_agent_info:
                self.samples.agent_info[t, column] = 0
