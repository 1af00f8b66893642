"""The episodes of one worker's columns: each has a number and a seed, and its actions are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from penstock.buffers.named import ArrayTree, map_leaves
from penstock.columns.episode_log import (
    AT,
    EPISODE,
    FIRST_EPISODE,
    FIRST_START,
    GENERATION,
    POSITION,
    START,
    EpisodeLog,
)
from penstock.envs.seeding import ColumnStreams, episode_seed
from penstock.workers.control import Progress, T


class EpisodeRecorder:
    """The worker's side of the episode log. `SingleColumns` and the collector call it if `seed_episodes=True`."""

    def __init__(self, log: EpisodeLog, columns: range, streams: ColumnStreams, progress: Progress) -> None:
        self._log, self._columns, self._streams = log, slice(columns.start, columns.stop), streams
        self._t = progress.words[T : T + 1]
        self._words = words = log.memory.arrays.words[self._columns]
        self._position = log.n_before
        words[:, EPISODE], words[:, GENERATION] = -1, streams.generation
        self._go_to(log.n_before)

    def _go_to(self, position: int) -> None:
        self._position, self._is_in_batch = position, False
        self._words[:, POSITION], self._words[:, AT] = position, position - 1

    def begin(self, column: int) -> int:
        """The next episode of this column begins. Returns the seed for `env.reset`."""
        words = self._words[column]
        words[EPISODE] += 1
        words[START] = 1 + (self._position + self._t[0] if self._is_in_batch else words[AT])
        return episode_seed(
            self._streams.seed, self._streams.env_ranks[column], int(words[EPISODE]), int(words[GENERATION])
        )

    # ---- before the first batch ------------------------------------------------------------

    def plan_steps(self, column: int, n: int) -> None:
        """The environment is about to make `n` random steps."""
        first = self._position - n
        self._words[column, START], self._words[column, AT] = first, first - 1

    def begin_step(self, column: int, actions: Any) -> None:
        """The next of these steps begins, with column's part of `actions` `[B, ...]`."""
        words = self._words[column]
        self._log.write(self._columns.start + column, int(words[AT]) + 1, actions[column : column + 1], None)
        words[AT] += 1

    def end_step(self, column: int, reward: float) -> None:
        """This step has returned `reward`."""
        arrays = self._log.memory.arrays
        arrays.reward[self._words[column, AT] % self._log.n_rows, self._columns.start + column] = reward

    # ---- resuming --------------------------------------------------------------------------

    def column_state(self, column: int) -> dict[str, Any]:
        """The column's running episode, between two batches."""
        words = self._words[column].tolist()
        position, n_missing = words[POSITION], max(0, words[POSITION] - words[START] - self._log.n_rows)
        actions, rewards = self._log.read(self._columns.start + column, words[START] + n_missing, position)
        numbers = {"episode": words[EPISODE], "generation": words[GENERATION]}
        return {**numbers, "actions": actions, "rewards": rewards, "n_missing": n_missing}

    def load_column_state(self, column: int, state: Mapping[str, Any]) -> None:
        """Continue the episode with this `column_state`."""
        rewards, words = state["rewards"][-self._log.n_rows :], self._words[column]
        first = self._position - len(rewards)
        actions = map_leaves(lambda leaf: leaf[len(state["rewards"]) - len(rewards) :], state["actions"])
        self._log.write(self._columns.start + column, first, actions, rewards)
        words[EPISODE], words[GENERATION] = state["episode"], state["generation"]
        words[START] = self._position - len(state["rewards"]) - state["n_missing"]

    def restart(self, column: int, generation: int) -> None:
        """The next reset of the column begins episode 0, with a seed of this generation."""
        self._words[column, EPISODE], self._words[column, GENERATION] = -1, generation

    # ---- batches ---------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """A batch begins."""
        self._words[:, FIRST_EPISODE], self._words[:, FIRST_START] = self._words[:, EPISODE], self._words[:, START]
        self._is_in_batch = True

    def end_batch(self, action: ArrayTree, reward: npt.NDArray[Any]) -> None:
        """The batch is complete: keep its actions and rewards `[T, B, ...]`."""
        self._log.write(self._columns, self._position, action, reward)
        self._go_to(self._position + len(reward))
