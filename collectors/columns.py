"""One worker's environments, stepped a row at a time: the innermost loop of penstock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym

from penstock.buffers.control import Phase, Progress
from penstock.collectors.tracking import StepHook
from penstock.envs.rows import ColumnError, action_splitter, row_writer
from penstock.errors import SpaceError

__all__ = ["DoneHook", "EnvColumns"]

#: Called when column b's episode ends: (b, final observation, reward, terminated, truncated). Returns
#: the observation that the column goes on with.
DoneHook = Callable[[int, Any, Any, bool, bool], Any]


class EnvColumns:
    """The environments of some columns, with their current observations.

    `step` advances all by one time step. What happens at an episode's end is the caller's to decide,
    through the `DoneHook`.
    """

    def __init__(self, envs: Sequence[gym.Env[Any, Any]], env_ranks: range, progress: Progress) -> None:
        self.envs, self.env_ranks, self._progress = envs, env_ranks, progress
        self._writer = row_writer(envs[0].observation_space)
        self.split_actions = action_splitter(envs[0].action_space)
        # All that the loop in `step` needs, in one tuple per environment: unpacked in one go.
        self._bound = [(b, env_ranks[b], env.step) for b, env in enumerate(envs)]
        self.observations: list[Any] = [None] * len(envs)
        self.rewards: list[Any] = [0.0] * len(envs)

    def __len__(self) -> int:
        return len(self.envs)

    def enter(self, phase: Phase, column: int) -> int:
        """Note in the progress row what is about to be done with one environment; returns the time."""
        self._progress.at_env(self.env_ranks[column])
        return self._progress.enter(phase)

    def reset_one(self, column: int, seed: int | None = None) -> Any:
        """Reset one environment and return its first observation."""
        began = self.enter(Phase.RESETTING, column)
        result = self.envs[column].reset(seed=seed)
        if not isinstance(result, tuple) or len(result) != 2:
            raise SpaceError(f"env.reset must return (observation, info), got {type(result).__name__}")
        self.observations[column] = result[0]
        self._progress.add_resetting_since(began)
        return result[0]

    def reset_all(self, seeds: Sequence[int | None]) -> None:
        """Reset every environment, with its seed where one is given."""
        for column, seed in enumerate(seeds):
            self.reset_one(column, seed)

    def step(self, action_row: Any, on_done: DoneHook, on_step: StepHook | None = None) -> None:
        """Step every environment with its action. `observations` and `rewards` then hold the results.

        This loop is what penstock adds to `env.step`, so it does nothing per environment that can be
        done per row: values are gathered in lists, for `write_observations` and `write_rewards`.
        """
        observations, rewards = self.observations, self.rewards
        words, env_rank_word = self._progress.words, Progress.ENV_RANK
        actions = self.split_actions(action_row)
        for (b, env_rank, step), action in zip(self._bound, actions, strict=True):
            words[env_rank_word] = env_rank
            observation, reward, terminated, truncated, info = step(action)
            if on_step is not None:
                on_step(b, observations[b], action, reward, terminated, truncated, info)
            if terminated or truncated:
                observation = on_done(b, observation, reward, terminated, truncated)
                words[Progress.PHASE] = Progress.IS_STEPPING  # the hook may have noted a reset
            observations[b] = observation
            rewards[b] = reward

    def prepare_row(self, row: Any) -> Any:
        """What `write_prepared` needs to know of an observation row `[B, ...]`, worked out once."""
        return self._writer.prepare(row)

    def write_prepared(self, prepared: Any) -> None:
        """`write_observations` to a row that has been prepared; for the loop over time."""
        try:
            self._writer.write(prepared, self.observations)
        except ColumnError as error:
            # All have been stepped; the report is to name this one.
            self._progress.at_env(self.env_ranks[error.column])
            raise error.naming(self.env_ranks[error.column]) from None

    def write_observations(self, row: Any) -> None:
        """Write the current observations into their row of the samples buffer.

        Raises `SpaceError` naming field, environment, expected and given shape if one does not fit.
        """
        self.write_prepared(self.prepare_row(row))

    def write_rewards(self, row: Any) -> None:
        """Write the rewards of the last step into their row of the samples buffer.

        Raises `SpaceError` naming the environment whose reward is not a single number.
        """
        try:
            row[...] = self.rewards
        except (ValueError, TypeError) as error:
            for b, reward in enumerate(self.rewards):
                if not _is_number(reward):
                    self._progress.at_env(self.env_ranks[b])
                    raise SpaceError(
                        f"the reward of env_rank {self.env_ranks[b]} must be a single number, got {reward!r}"
                    ) from error
            raise


def _is_number(value: Any) -> bool:
    try:
        return getattr(value, "shape", ()) == () and isinstance(float(value), float)
    except (TypeError, ValueError):
        return False
