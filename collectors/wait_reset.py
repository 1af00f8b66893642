"""WaitResetCollector: an environment that is done is parked, and reset while the learner trains."""

from __future__ import annotations

from typing import Any

from penstock.collectors.base import Collector, CollectorParts

__all__ = ["WaitResetCollector"]


class WaitResetCollector(Collector):
    """No mid-batch reset: at most one episode ends per column and batch. For environments whose reset is slow.

    From the step after an episode's end to the end of the batch the column is parked: its environment is
    left alone, every field is zero and `samples.env.valid` is False. It is reset in `reset_if_needed`,
    which overlaps training, and the next batch starts with the new episode's first observation.
    """

    mid_batch_reset = False

    def __init__(self, parts: CollectorParts) -> None:
        super().__init__(parts)
        self._t = 0

    def reset_if_needed(self) -> None:
        for column in self.envs.parked:
            self.reset_column(column)
            self.prev_reward[column] = 0
            self.tracker.drop(column)  # the parked rows are no trajectory
        self.envs.unpark_all()

    def collect_batch(self, itr: int) -> None:
        self.begin_batch(itr)
        # The carried-over row has zeros where a column was parked.
        self.envs.write_prepared(self._observation_rows[0])
        self.samples.valid[...] = True
        for t in range(self.batch_T):
            # Parked columns are acted on as well, and it is forgotten: what an agent draws for a column
            # must not depend on which others share the worker with it.
            self.act(t)
            self._blank_parked(t)
            self.step_envs(t)
        self.end_batch()
        self._blank_values()

    def step_envs(self, t: int) -> None:
        """Row t, second half: every environment that is not parked takes its action."""
        self.progress.begin_stepping(t)
        self._t = t
        self.envs.step(self.prev_action, self._on_episode_end, self.on_step)
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
