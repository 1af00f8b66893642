"""ResetCollector: an environment is reset as soon as its episode ends."""

from __future__ import annotations

from typing import Any

from penstock.collectors.collector import Collector, CollectorParts


class ResetCollector(Collector):
    """Resets in the middle of a batch. So every cell of the batch holds a real step, and `valid` is True."""

    def __init__(self, parts: CollectorParts) -> None:
        super().__init__(parts)
        self._t = 0
        self._ended: list[int] = []  # columns whose episode ended in the current row

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
        if self.envs.keep_infos:
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
