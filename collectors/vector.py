"""VectorEnvCollector: a worker that holds one batched environment, which steps all its columns in one call."""

from __future__ import annotations

from penstock.buffers.named import NamedArrays
from penstock.collectors.reset import ResetCollector
from penstock.columns.batched_columns import VectorColumns
from penstock.columns.interface import EpisodeEnds
from penstock.envs.infos import InfoWriter


class VectorEnvCollector(ResetCollector):
    """A `ResetCollector` for batched environments: `env_fn(num_envs=n)` returns a `gymnasium.vector.VectorEnv`.

    The environment may reset a column in the step that ends its episode (`AutoresetMode.SAME_STEP`), or leave the reset
    to the caller (`DISABLED`). In the mode `NEXT_STEP`, Gymnasium's default, it resets the column in the next step and
    ignores its action. This step is not `valid`: its fields are zero, and it belongs to no trajectory. Raises
    `ConfigError` for an environment whose `metadata` has no `autoreset_mode`.

    Rows are recorded as a whole. Single columns are handled one by one only for an agent with state and for a subclass
    of `TrajInfo`.
    """

    batched = True
    envs: VectorColumns

    def begin_batch(self, itr: int) -> None:
        super().begin_batch(itr)
        if self.envs.resets_late:
            self.samples.valid[...] = True

    def step_envs(self, t: int) -> None:
        self.progress.begin_stepping(t)
        envs, resetting = self.envs, self.envs.resetting
        ends = envs.step_rows(self.prev_action, self.on_step, (self._observations, t + 1))
        if envs.info_writer is not None:
            self.record_env_info(t)
        if ends is not None:
            self._record_ends(t, ends)
            envs.reset_columns(ends.columns)
        self.write_step(t)
        if ends is not None:
            self.prev_reward[ends.columns] = 0
            self.prev_action[ends.columns] = 0
            if envs.resets_late:  # row t + 1 is a reset, in which the agent sees zeros
                self.samples.observation_rows[t + 1][ends.columns] = 0
        if resetting:
            self._end_resets(t, resetting)

    def _end_resets(self, t: int, columns: list[int]) -> None:
        """Step t was only a reset in these columns: clear what was recorded, and begin their episodes."""
        samples = self.samples
        samples.valid[t, columns] = False
        samples.action_rows[t + 1][columns], self.prev_action[columns] = 0, 0
        for field in (samples.agent_info, samples.env_info):
            if field is not None:
                field[t, columns] = 0
        if self._agent_has_state:
            for column in columns:
                self.agent.reset_one(column)

    def end_batch(self) -> None:
        super().end_batch()
        if self.envs.resetting and self.samples.bootstrap_value is not None:
            self.samples.bootstrap_value[self.envs.resetting] = 0

    def _record_ends(self, t: int, ends: EpisodeEnds) -> None:
        """`record_episode_end` for all columns whose episodes ended, and the agent's part of `reset_column`."""
        samples, columns = self.samples, ends.columns
        samples.terminated[t], samples.truncated[t], samples.done[t] = ends.terminated, ends.truncated, ends.done
        self._episode_ends.record_rows(t, ends)
        if self.on_step is not None:
            for column, observation in zip(columns.tolist(), ends.each(), strict=True):
                self.tracker.on_episode_end(t, column, observation)
        if self._agent_has_state and not self.envs.resets_late:
            for column in columns.tolist():
                self.agent.reset_one(column)

    def _write_infos(self, writer: InfoWriter, row: NamedArrays) -> None:
        writer.write_batched(row, self.envs.infos, len(self.envs))
