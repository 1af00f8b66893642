"""ResetCollector: an environment that is done is reset at once, and recording goes on."""

from __future__ import annotations

from typing import Any

from penstock.collectors.base import Collector, CollectorParts

__all__ = ["ResetCollector"]


class ResetCollector(Collector):
    """Mid-batch reset: every cell of the batch holds a real step, and `valid` is True throughout."""

    mid_batch_reset = True

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
        """Row t, second half: every environment takes its action, and what follows is recorded."""
        self.progress.begin_stepping(t)
        self._t = t
        self.envs.step(self.prev_action, self._on_episode_end, self.on_step)
        self.record_env_info(t)
        self.write_step(t)
        for column in self._ended:
            self.prev_reward[column] = 0
        self._ended.clear()

    def _on_episode_end(self, column: int, observation: Any, reward: float, terminated: bool, truncated: bool) -> Any:
        """Record the end of column's episode and start the next one."""
        self.record_episode_end(self._t, column, observation, reward, terminated, truncated)
        self._ended.append(column)
        return self.reset_column(column)
