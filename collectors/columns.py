"""One worker's environments, stepped a row at a time: the innermost loop of penstock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from penstock.buffers.named import map_leaves
from penstock.buffers.native import step_ordinary
from penstock.collectors.checks import Checks, checked_writer
from penstock.collectors.tracking import StepHook, kept
from penstock.envs.checks import episode_flags, require_info, require_number, require_step, step_values
from penstock.envs.examples import example_of
from penstock.envs.rows import ColumnError, RowWriter, action_splitter
from penstock.errors import SpaceError, brief
from penstock.workers.progress import Phase, Progress

__all__ = ["EnvColumns", "EpisodeEndHook"]

#: Called when column b's episode ends: (b, final observation, reward, terminated, truncated). Returns
#: the observation that the column goes on with.
EpisodeEndHook = Callable[[int, Any, Any, bool, bool], Any]

_NO_OPTIONS = Checks()


class EnvColumns:
    """The environments of some columns, with their current observations.

    `step` advances all by one time step. What happens at an episode's end is the caller's to decide,
    through the `EpisodeEndHook`. What does not fit its space, or is not of the type that Gymnasium demands,
    is a `SpaceError` naming the field and the env_rank; `checks` adds checks to those always made.
    """

    def __init__(
        self,
        envs: Sequence[gym.Env[Any, Any]],
        env_ranks: range,
        progress: Progress,
        checks: Checks = _NO_OPTIONS,
    ) -> None:
        self.envs, self.env_ranks, self.checks, self._progress = envs, env_ranks, checks, progress
        space = envs[0].observation_space
        self._writer = checked_writer(space, checks)
        self._final_writer = checked_writer(space, checks, "the final observation")
        self._scratch = map_leaves(lambda leaf: np.zeros((1, *leaf.shape), leaf.dtype), example_of(space))
        self._words = progress.words
        self._env_rank_word = np.asarray(progress.words[Progress.ENV_RANK : Progress.ENV_RANK + 1])
        self._action_space = envs[0].action_space if checks.debug else None
        self._is_finite_wanted = checks.check_finite
        self.split_actions = action_splitter(envs[0].action_space)
        # All that the loop over environments needs, in one tuple for each: unpacked in one go.
        self._bound = self._active = [(b, env_ranks[b], env.step) for b, env in enumerate(envs)]
        #: Columns that `step` leaves alone, in order.
        self.parked: list[int] = []
        self.observations: list[Any] = [None] * len(envs)
        self.rewards: list[Any] = [0.0] * len(envs)
        #: Whether `step` is to leave the infos that it has seen in `infos`, one per column; {} of a parked one.
        self.keep_infos = False
        self.infos: list[Any] = [{}] * len(envs)

    def __len__(self) -> int:
        return len(self.envs)

    def enter(self, phase: Phase, column: int) -> int:
        """Note in the progress row what is about to be done with one environment; returns the time."""
        self._progress.at_env(self.env_ranks[column])
        return self._progress.enter(phase)

    def reset_one(self, column: int, seed: int | None = None) -> Any:
        """Reset one environment and return its first observation, which is checked when it is written."""
        words, env_rank = self._words, self.env_ranks[column]
        words[Progress.PHASE], words[Progress.ENV_RANK] = Progress.IS_RESETTING, env_rank
        words[Progress.HEARTBEAT] = began = time.monotonic_ns()
        result: Any = self.envs[column].reset(seed=seed)
        words[Progress.RESETTING] += time.monotonic_ns() - began
        if not isinstance(result, tuple) or len(result) != 2:
            got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
            raise SpaceError(f"env.reset of env_rank {env_rank} must return a tuple (observation, info), got {got}")
        self.observations[column], info = result
        if info.__class__ is not dict:
            require_info(info, env_rank, "reset")
        return self.observations[column]

    def reset_all(self, seeds: Sequence[int | None]) -> None:
        """Reset every environment, with its seed where one is given; the first observations are checked."""
        for column, seed in enumerate(seeds):
            self.reset_one(column, seed)
            self.check_observation(column)

    def park(self, column: int) -> None:
        """Leave column's environment alone, from the next `step` on. Its reward is zero as long."""
        self.parked = sorted([*self.parked, column])
        self._active = [bound for bound in self._active if bound[0] != column]

    def unpark_all(self) -> None:
        """Step every environment again."""
        self.parked, self._active = [], self._bound

    def step(self, action_row: Any, on_episode_end: EpisodeEndHook, on_step: StepHook | None = None) -> None:
        """Step every environment with its action. `observations` and `rewards` then hold the results.

        This is what penstock adds to `env.step`, so nothing is done per environment that can be done per row:
        values are gathered in lists, for `write_observations` and `write_rewards`.
        """
        word, observations, rewards = self._env_rank_word, self.observations, self.rewards
        is_watched = on_step is not None or self.keep_infos
        actions = self.split_actions(action_row)
        if on_step is not None:  # an environment may write into what it has given, and into what it is given
            before, given = [kept(observation) for observation in observations], self.split_actions(action_row)
        if self.parked or self._action_space is not None:
            actions = self._select(actions)
        active, first = self._active, 0  # the hook may park a column: the row goes on with those that it began with
        while unusual := step_ordinary(word, active, actions, first, is_watched, observations, rewards):
            i, result = unusual
            b, env_rank, _ = active[i]
            observation, reward, terminated, truncated, info = step_values(result, env_rank)
            terminated, truncated = require_step(reward, terminated, truncated, info, env_rank)
            if is_watched:
                self.infos[b] = info
                if on_step is not None:
                    on_step(b, before[b], given[b], reward, terminated, truncated, info)
            if terminated or truncated:
                observation = on_episode_end(b, observation, reward, terminated, truncated)
                self._words[Progress.PHASE] = Progress.IS_STEPPING  # the hook may have noted a reset
            observations[b], rewards[b], first = observation, reward, i + 1

    def step_one(self, column: int, action: Any) -> tuple[Any, float, bool, bool, Any]:
        """Step one environment, outside the loop over time, with an action drawn at random.

        Returns observation, reward, terminated, truncated and info, all checked.
        """
        if self._action_space is not None:
            self._check_action(column, action, "drawn at random")
        env_rank = self.env_ranks[column]
        observation, reward, terminated, truncated, info = step_values(self.envs[column].step(action), env_rank)
        require_info(info, env_rank)
        number = require_number(reward, env_rank)
        if self.checks.check_finite and not math.isfinite(number):
            raise self._not_finite(column, reward)
        flags = episode_flags(terminated, truncated, env_rank)
        self.observations[column] = observation
        if any(flags):
            self.check_final(column, observation)
        else:
            self.check_observation(column)
        return observation, number, *flags, info

    def prepare_row(self, row: Any) -> Any:
        """What `write_prepared` needs to know of an observation row `[B, ...]`, worked out once."""
        return self._writer.prepare(row)

    def write_prepared(self, prepared: Any) -> None:
        """`write_observations` to a row that has been prepared; for the loop over time."""
        try:
            self._writer.write(prepared, self.observations)
        except ColumnError as error:
            raise self._blaming(error.column, error) from None

    def write_observations(self, row: Any) -> None:
        """Write the current observations into their row of the samples buffer.

        Raises `SpaceError` naming field, environment, expected and given shape if one does not fit.
        """
        self.write_prepared(self.prepare_row(row))

    def write_rewards(self, row: Any) -> None:
        """Write the rewards of the last step into their row `[B]` of the samples buffer.

        Raises `SpaceError` naming the environment whose reward is not a single number.
        """
        try:
            array = np.asarray(self.rewards)
        except (TypeError, ValueError, RuntimeError):  # some are arrays of different lengths, or have gradients
            array = None
        if array is None or array.shape != row.shape or array.dtype.kind not in "fiub":
            array = self._numbers()
        try:
            row[...] = array
        except RuntimeWarning:  # see penstock.envs.rows
            column = int(np.abs(array).argmax())
            self._progress.at_env(self.env_ranks[column])
            raise SpaceError(
                f"the reward of env_rank {self.env_ranks[column]} must be a number that {row.dtype} can hold, got "
                f"{brief(self.rewards[column])}"
            ) from None
        if self._is_finite_wanted and not (finite := np.isfinite(row)).all():
            column = int(finite.argmin())
            raise self._not_finite(column, self.rewards[column])

    def write_final(self, row: Any, column: int, observation: Any) -> None:
        """Write the last observation of column's episode into `row` `[1, ...]`.

        Raises `SpaceError` as `write_observations` does, for "the final observation".
        """
        self._write_one(self._final_writer, row, column, observation)

    # ---- checks on what is written nowhere ---------------------------------------------------

    def check_observation(self, column: int) -> None:
        """Raise `SpaceError` unless column's current observation fits its space."""
        self._write_one(self._writer, self._scratch, column, self.observations[column])

    def check_final(self, column: int, observation: Any) -> None:
        """Raise `SpaceError` unless the last observation of column's episode fits its space."""
        self._write_one(self._final_writer, self._scratch, column, observation)

    def _write_one(self, writer: RowWriter, row: Any, column: int, observation: Any) -> None:
        try:
            writer.write(writer.prepare(row), [observation])
        except ColumnError as error:  # told of the only column of `row`
            raise self._blaming(column, error) from None

    def _blaming(self, column: int, error: ColumnError) -> SpaceError:
        """All have been stepped: the report is to name this one."""
        self._progress.at_env(self.env_ranks[column])
        return error.naming(self.env_ranks[column])

    def _numbers(self) -> Any:
        """The rewards one by one, to find the one that is not a number."""
        numbers = np.empty(len(self.rewards))
        for b, reward in enumerate(self.rewards):
            self._progress.at_env(self.env_ranks[b])
            numbers[b] = require_number(reward, self.env_ranks[b])
        return numbers

    def _not_finite(self, column: int, reward: Any) -> SpaceError:
        env_rank = self.env_ranks[column]
        self._progress.at_env(env_rank)
        return SpaceError(f"the reward of env_rank {env_rank} must be finite (check_finite=True), got {brief(reward)}")

    def _select(self, actions: Sequence[Any]) -> Sequence[Any]:
        """The actions of the environments that are to be stepped; parked ones get a reward of zero."""
        if self.parked:
            actions = [actions[b] for b, _, _ in self._active]
            for b in self.parked:
                self.rewards[b] = 0.0
                self.infos[b] = {}
        if self._action_space is not None:
            for (column, _, _), action in zip(self._active, actions, strict=True):
                self._check_action(column, action, "given by the agent")
        return actions

    def _check_action(self, column: int, action: Any, origin: str) -> None:
        space = self._action_space
        if space is not None and not space.contains(action):
            self._progress.at_env(self.env_ranks[column])
            raise SpaceError(
                f"the action of env_rank {self.env_ranks[column]}, {origin}, must be in {space} (debug=True), "
                f"got {brief(action)}"
            )
