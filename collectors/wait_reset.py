"""WaitResetCollector: an environment whose episode ends is parked, and reset while the learner trains."""

from __future__ import annotations

from typing import Any

from penstock.collectors.reset import ResetCollector
from penstock.collectors.tracking import snapshot


class WaitResetCollector(ResetCollector):
    """Resets between batches, for environments with a slow reset. At most one episode ends per column and batch.

    After its episode's end, the column is parked until the batch ends: its environment is not stepped, every field is
    zero and `samples.env.valid` is False. `reset_if_needed` resets it while the learner trains. The next batch starts
    with the new episode's first observation.
    """

    def reset_if_needed(self) -> None:
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
            self._zero_parked(t)
            self.step_envs(t)
        self.end_batch()
        self._zero_parked_values()

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

    def _zero_parked(self, t: int) -> None:
        for column in self.envs.parked:
            self.samples.action_rows[t + 1][column] = 0
            self.prev_action[column] = 0
            if self._has_agent_info:
                self.samples.agent_info[t, column] = 0

    def _zero_parked_values(self) -> None:
        if self.samples.bootstrap_value is not None:
            for column in self.envs.parked:
                self.samples.bootstrap_value[column] = 0
