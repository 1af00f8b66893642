"""WaitResetCollector: an environment whose episode ends is parked, and reset while the learner trains."""

from __future__ import annotations

from typing import Any

from penstock.collectors.base import Collector, CollectorParts


class WaitResetCollector(Collector):
    """Resets between batches, for environments with a slow reset. At most one episode ends per column and batch.

    After its episode's end, the column is parked until the batch ends: its environment is not stepped, every field is
    zero and `samples.env.valid` is False. `reset_if_needed` resets it while the learner trains. The next batch starts
    with the new episode's first observation.
    """

    mid_batch_reset = False

    def __init__(self, parts: CollectorParts) -> None:
        super().__init__(parts)
        self._t = 0

    def reset_if_needed(self) -> None:
        for column in self.envs.parked:
            self.reset_column(column)
            self.prev_reward[column] = 0
            self.tracker.drop(column)  # the parked rows are not a trajectory
        self.envs.unpark_all()

    def collect_batch(self, itr: int) -> None:
        self.begin_batch(itr)
        # The row from the batch before has zeros where a column was parked.
        self.envs.write_observations(self.samples.observation_rows[0])
        self.samples.valid[...] = True
        for t in range(self.batch_T):
            # The agent acts for parked columns too, and the action is erased: the random numbers that it draws for one
            # column must not depend on the other columns of the worker.
            self.act(t)
            self._blank_parked(t)
            self.step_envs(t)
        self.end_batch()
        self._blank_values()

    def step_envs(self, t: int) -> None:
        """Row t, second half: step every environment that is not parked, and record the results."""
        self.progress.begin_stepping(t)
        self._t = t
        self.envs.step(self.prev_action, self._on_episode_end, self.on_step)
        if self.envs.keep_infos:
            self.record_env_info(t)
        self.write_step(t)
        for column in self.envs.parked:
            self.samples.observation_rows[t + 1][column] = 0
            self.prev_reward[column] = 0

    def _on_episode_end(self, column: int, observation: Any, reward: float, terminated: bool, truncated: bool) -> Any:
        """Record the end of column's episode and park it."""
        self.record_episode_end(self._t, column, observation, reward, terminated, truncated)
        self.samples.valid[self._t + 1 :, column] = False
        self.envs.park(column)
        return observation

    def _blank_parked(self, t: int) -> None:
        for column in self.envs.parked:
            self.samples.action_rows[t + 1][column] = 0
            self.prev_action[column] = 0
            if self._has_agent_info:
                self.samples.agent_info[t, column] = 0

    def _blank_values(self) -> None:
        if self.samples.bootstrap_value is not None:
            for column in self.envs.parked:
                self.samples.bootstrap_value[column] = 0
