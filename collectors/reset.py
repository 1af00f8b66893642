"""ResetCollector: an environment that is done is reset at once, and recording goes on."""

from __future__ import annotations

from typing import Any

from penstock.collectors.base import Collector

__all__ = ["ResetCollector"]


class ResetCollector(Collector):
    """Mid-batch reset: every cell of the batch holds a real step, and `valid` is True throughout."""

    mid_batch_reset = True

    def collect_batch(self, itr: int) -> None:
        # Bound once: the loop below runs once per time step, `envs.step` once per environment step.
        samples, agent, envs, progress = self.samples, self.agent, self.envs, self.progress
        observation, action, reward = samples.observation, samples.action, samples.reward
        prev_action, prev_reward = self.prev_action, self.prev_reward
        on_done, on_step = self._on_done, self.tracker.on_step
        ended = self._ended

        self.begin_batch(itr)
        for t in range(self.batch_T):
            progress.begin_acting(t)
            step = agent.step(observation[t], prev_action, prev_reward)
            action[t + 1] = step.action
            samples.agent_info[t] = step.agent_info
            prev_action[...] = action[t + 1]
            if on_step is not None:
                self.tracker.set_agent_info(samples.agent_info[t])

            progress.begin_stepping(t)
            self._t = t
            envs.step(prev_action, on_done, on_step)
            envs.write(observation[t + 1], reward[t + 1])
            prev_reward[...] = reward[t + 1]
            if ended:
                prev_reward[ended] = 0
                ended.clear()
        self.end_batch()

    def start_agent(self) -> None:
        super().start_agent()
        self._t = 0
        self._ended: list[int] = []  # columns whose episode ended in the current row

    def _on_done(self, column: int, observation: Any, reward: float, terminated: bool, truncated: bool) -> Any:
        """Record the end of column's episode and start the next one."""
        t, samples = self._t, self.samples
        samples.terminated[t, column] = terminated
        samples.truncated[t, column] = truncated
        samples.done[t, column] = True
        self.finals.record(t, column, observation, reward, terminated, truncated)
        self.tracker.on_done(t, column, observation)
        self._ended.append(column)
        return self.reset_column(column)
