"""The innermost loops: in C where they were compiled, in Python elsewhere, with the same results.

A function is compiled if a measurement showed what it saves (benchmarks/native.py). `put_row` and `put_cell` handle the
usual types only. For all others they return False, and the caller writes the whole row or cell with numpy: a part of it
may have been written already.

Rows are given as an array `[T, ...]` and an index t. A list of T views made in advance is slower: with many rows, no
view is in the processor's cache when its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.buffers.trajectory_queue import RECORD

#: An environment as `step_ordinary` takes it: its column, its env_rank, its `step`.
Bound = tuple[int, int, Callable[[Any], Any]]


def _put_nothing(*_: Any) -> bool:
    return False


def _step_ordinary(
    env_rank_word: Any,
    bound: Sequence[Bound],
    actions: Sequence[Any],
    first: int,
    is_watched: bool,
    observations: list[Any],
    rewards: list[Any],
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


def _sum_nothing(*_: Any) -> int:
    return -1


#: `put_row(arrays, t, values)`: write row t. `arrays` is an array `[T, B, ...]`, or a nested dict or tuple of such.
#: `values` is nested in the same way and has an array `[B, ...]` of the same type for each of them; or it is a list of
#: B elements of a space, each nested in the same way. An element's leaf is an array or number of the same type, a
#: Python int for int64, or a Python int or float for float32.
put_row: Callable[[Any, int, Any], bool]
#: `put_cell(arrays, t, b, value)`: write one such element into `[t, b]`.
put_cell: Callable[[Any, int, int, Any], bool]
#: `step_ordinary(env_rank_word, bound, actions, first, is_watched, observations, rewards)`: step the environments
#: `bound` from number `first` on, each with its entry of `actions`, and store the results in the lists, by column.
#: A step is ordinary if the episode does not end, and flags and info have the usual types. Stop at a step that is not,
#: or after every step if `is_watched`: store nothing, and return its number and what `env.step` returned. Return None
#: at the end of the row. `env_rank_word` int64 `[1]` always holds the env_rank of the environment that steps.
step_ordinary: Callable[[Any, Any, Any, int, bool, Any, Any], tuple[int, Any] | None]
#: `sum_episodes(reward, done, running, records, first_t, first_env_rank, discount)`: write a RECORD for each trajectory
#: that finishes in rows `[T, B]` into `records`, uint8 `[1, n]` with room for T * B of them. Return how many, or -1 if
#: the arguments do not fit and nothing was done. `running` float64 `[B, 5]` holds the sums of each column's unfinished
#: trajectory and the weight of its next reward, before and after.
sum_episodes: Callable[[Any, Any, Any, Any, int, int, float], int]

#: What stands for each function where nothing is compiled.
PYTHON: dict[str, Callable[..., Any]] = {
    "put_row": _put_nothing,
    "put_cell": _put_nothing,
    "step_ordinary": _step_ordinary,
    "sum_episodes": _sum_nothing,
}

try:
    from penstock.buffers._native import RECORD_LAYOUT, put_cell, put_row, step_ordinary, sum_episodes

    if " ".join(f"{name}:{RECORD[name].str[1:]}" for name in RECORD.names or ()) != RECORD_LAYOUT:
        raise ImportError("the compiled part was built for another layout of trajectory records: build it again")
except ImportError as error:  # no C compiler, an older build, or a checkout that was never built
    put_row = put_cell = _put_nothing
    step_ordinary, sum_episodes = _step_ordinary, _sum_nothing
    #: Why the compiled functions are not in use; empty if they are.
    MISSING = str(error)
else:
    MISSING = ""

#: Whether the compiled functions are in use.
COMPILED = not MISSING
