"""The episode log: the actions and rewards of each environment's last steps, so that its episode can be repeated."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.buffers.named import ArrayTree, NamedArrays, map_leaves
from penstock.buffers.shared import ArraySpec, NamedMemory

#: The words of a column. A position counts the rows of a column since its worker was started.
POSITION, EPISODE, START, FIRST_EPISODE, FIRST_START, AT, GENERATION = range(7)

_WORDS = 8
_MOST_STEPS = 2**15  # of one environment
_MOST_BYTES = 2**22  # of one environment


class EpisodeLog:
    """For each column: which episode runs, where it began, and the actions and rewards of the rows before this batch.

    Workers write their own columns. Row p of the arrays holds position p, p + n_rows, and so on: the oldest are
    overwritten. The rows of the running batch are in the samples buffer only.

    - POSITION: of the first row of the running batch, or of the next one.
    - EPISODE, START: the number of the running episode, and the position of its first row.
    - FIRST_EPISODE, FIRST_START: the same two as they were when the last batch began.
    - AT: before the first batch, the position of the step that runs.
    - GENERATION: of the random stream that the episodes' seeds come from.
    """

    def __init__(self, action: ArrayTree, batch_T: int, n_before: int, *, shared: bool) -> None:
        """`action` is an array `[rows, batch_B, ...]` of the samples buffer. `n_before` is the most steps before the
        first batch."""
        leaves = [leaf for _, leaf in action.leaves()] if isinstance(action, NamedArrays) else [action]
        batch_B, float32 = leaves[0].shape[1], np.dtype(np.float32)
        n_bytes = sum(leaf[0, 0].nbytes for leaf in leaves) + float32.itemsize
        self.n_before = n_before
        self.n_rows = n_rows = batch_T + max(n_before, min(_MOST_STEPS, _MOST_BYTES // n_bytes))
        specs = NamedArrays(
            words=ArraySpec((batch_B, _WORDS), np.dtype(np.int64)),
            reward=ArraySpec((n_rows, batch_B), float32),
            action=map_leaves(lambda leaf: ArraySpec((n_rows, *leaf.shape[1:]), leaf.dtype), action),
        )
        self.memory = NamedMemory(specs, shared=shared, purpose="the episode log (seed_episodes=True)")

    def words(self, column: int) -> list[int]:
        """Main process: the words of one column."""
        words: list[int] = self.memory.arrays.words[column].tolist()
        return words

    def read(self, column: int, start: int, stop: int) -> tuple[Any, npt.NDArray[np.float32]]:
        """Main process: a copy of the actions and rewards of one column, from position `start` to `stop`."""
        rows = np.arange(start, stop) % self.n_rows
        return map_leaves(lambda leaf: leaf[rows, column], self.memory.arrays.action), self.memory.arrays.reward[
            rows, column
        ]

    def write(self, columns: slice | int, start: int, action: ArrayTree, reward: npt.NDArray[Any] | None) -> None:
        """Worker: write rows `[n, ...]` of actions, and of rewards unless they are None, from position `start` on."""
        arrays = self.memory.arrays
        n = len(next(iter(action.leaves()))[1]) if isinstance(action, NamedArrays) else len(action)
        first = start % self.n_rows
        n_first = min(n, self.n_rows - first)  # the rest begins at row 0 again
        for part, rows in (
            (slice(0, n_first), slice(first, first + n_first)),
            (slice(n_first, n), slice(0, n - n_first)),
        ):
            arrays.action[rows, columns] = action[part]
            if reward is not None:
                arrays.reward[rows, columns] = reward[part]
