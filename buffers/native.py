"""The innermost loops: in C where they were compiled, in Python elsewhere, with the same results.

Only functions are compiled that a measurement showed to save time (benchmarks/native.py). `put_row` and `put_cell`
handle the usual types only. For all others they return False. Then the caller must write the whole row or cell again,
since a part of it may have been written.

Rows are given as an array `[T, ...]` and an index t, since this is faster than a list of T views.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.buffers.results import RECORD


def _step_ordinary(
    env_rank_word: Any, bound: Any, actions: Any, first: int, is_watched: bool, observations: Any, rewards: Any
) -> tuple[int, Any] | None:
    if len(actions) != len(bound):
        raise ValueError(f"expected {len(bound)} actions, got {len(actions)}")
    word = memoryview(env_rank_word)  # faster to write than an array
    for i in range(first, len(bound)):
        column, word[0], step = bound[i]
        result = step(actions[i])
        if is_watched or type(result) is not tuple or len(result) != 5:
            return i, result
        observation, reward, terminated, truncated, info = result
        if terminated is not False or truncated is not False or info.__class__ is not dict:
            return i, result
        observations[column] = observation
        rewards[column] = reward
    return None


#: `put_row(arrays, t, values)`: write row t. `arrays` is an array `[T, B, ...]`, or a nested dict or tuple of such.
#: `values` is nested in the same way and has an array `[B, ...]` of the same type for each of them; or it is a list of
#: B elements of a space, each nested in the same way. An element's leaf is an array or number of the same type, a
#: Python int for int64, or a Python int or float for float32.
put_row: Callable[[Any, int, Any], bool]
#: `put_cell(arrays, t, b, value)`: write one such element into `[t, b]`.
put_cell: Callable[[Any, int, int, Any], bool]
#: `step_ordinary(env_rank_word, bound, actions, first, is_watched, observations, rewards)`: step the environments of
#: `bound`, a list of `(column, env_rank, env.step)`, from index `first` on. Each gets its entry of `actions`. The
#: results are stored in the lists `observations` and `rewards`, by column.
#: A step is ordinary if the episode does not end, and flags and info have the usual types. At the first step that is
#: not ordinary, or at the first step if `is_watched`, store nothing and return `(index in bound, result of env.step)`.
#: Return None after the last environment. `env_rank_word` int64 `[1]` always holds the env_rank of the environment
#: that steps.
step_ordinary: Callable[[Any, Any, Any, int, bool, Any, Any], tuple[int, Any] | None]
#: `sum_episodes(reward, done, running, records, first_t, first_env_rank, discount)`: write a RECORD for each trajectory
#: that finishes in rows `[T, B]` into `records`, uint8 `[1, n]` with room for T * B of them. Return how many, or -1 if
#: it cannot handle the arguments; then nothing was written. `running` float64 `[B, 5]` holds the sums of each column's
#: unfinished trajectory and the weight of its next reward. It is read and updated.
sum_episodes: Callable[[Any, Any, Any, Any, int, int, float], int]

#: The functions that are used if nothing is compiled.
PYTHON: dict[str, Callable[..., Any]] = {
    "put_row": lambda *_: False,
    "put_cell": lambda *_: False,
    "step_ordinary": _step_ordinary,
    "sum_episodes": lambda *_: -1,
}

try:
    from penstock.buffers._native import RECORD_LAYOUT, put_cell, put_row, step_ordinary, sum_episodes

    if " ".join(f"{name}:{RECORD[name].str[1:]}" for name in RECORD.names or ()) != RECORD_LAYOUT:
        raise ImportError("the compiled part was built for another layout of trajectory records: build it again")
except ImportError as error:  # no C compiler, an older build, or a checkout that was never built
    put_row, put_cell, step_ordinary, sum_episodes = PYTHON.values()
    #: Why the compiled functions are not in use; empty if they are.
    WHY_NOT_COMPILED = str(error)
else:
    WHY_NOT_COMPILED = ""

#: Whether the compiled functions are in use.
COMPILED = not WHY_NOT_COMPILED
