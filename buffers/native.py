"""The innermost loops: in C where they were compiled, in Python elsewhere, with the same results.

Only functions are compiled that a measurement showed to save time (benchmarks/native.py). `put_row` and `put_cell`
handle the usual types only. For all others they return False. Then the caller must write the whole row or cell again,
since a part of it may have been written.

Rows are given as an array `[T, ...]` and an index t, since this is faster than a list of T views.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.buffers.object_pipe import RECORD

#: `watch` of `step_ordinary`: it returns at every step, or also at steps with an info or a reward that is no float.
WATCH_ALL, WATCH_UNUSUAL = 1, 2


def _step_ordinary(
    words: Any,
    bound: Sequence[tuple[Any, ...]],
    actions: Sequence[Any],
    outs: Any,
    first: int,
    watch: int,
    observations: list[Any],
    rewards: list[Any],
    ends: list[Any] | None,
) -> tuple[int, Any] | None:
    if len(actions) != len(bound):
        raise ValueError(f"expected {len(bound)} actions, got {len(actions)}")
    words = memoryview(words)  # faster to write than an array
    for i in range(first, len(bound)):
        column, words[-1], step, step_into = bound[i]
        is_into = outs is not None and step_into is not None
        observation = outs[column] if is_into else None
        result = step_into(observation, actions[i]) if is_into else step(actions[i])
        if watch == WATCH_ALL or type(result) is not tuple or len(result) != 5 - is_into:
            return i, result
        reward, terminated, truncated, info = result[-4:]
        if not (terminated.__class__ is truncated.__class__ is bool and info.__class__ is dict):
            return i, result
        if watch and (info or reward.__class__ is not float):
            return i, result
        if not is_into:
            observation = result[0]
        if terminated or truncated:
            if ends is None or reward.__class__ is not float:
                return i, result
            ends.append((column, observation, reward, terminated, truncated))
        observations[column] = observation
        rewards[column] = reward
    return None


def _store_game_step(
    result: object, living: list[Any], listed: Any, observations: list[Any], rewards: list[Any], first: int
) -> bool:
    if result.__class__ is not tuple or len(result) != 5 or not all(isinstance(part, dict) for part in result):
        return False
    seen, gained, *flags = result[:4]
    for agents in (listed, list(seen), list(gained)):
        if agents.__class__ is not list or len(agents) != len(living) or not all(map(_is_agent, agents, living)):
            return False
    if any(len(each) != len(living) for each in flags):
        return False
    if any(not (flag is False or flag is _NUMPY_FALSE) for each in flags for flag in each.values()):
        return False
    if first >= 0:
        last = first + len(living)
        if last > min(len(observations), len(rewards)):
            raise IndexError(f"there are no columns for {len(living)} agents from {first} on")
        observations[first:last], rewards[first:last] = seen.values(), gained.values()
    return True


def _is_agent(found: object, agent: Any) -> bool:
    return found is agent or (found.__class__ is agent.__class__ is str and found == agent)


_NUMPY_FALSE = np.False_

#: `put_row(arrays, t, values)`: write row t. `arrays` is an array `[T, B, ...]`, or a nested dict or tuple of such.
#: `values` is nested in the same way and has an array `[B, ...]` of the same type for each of them; or it is a list of
#: B elements of a space, each nested in the same way. An element's leaf is an array or number of the same type, a
#: Python int for int64, or a Python int or float for float32.
put_row: Callable[[Any, int, Any], bool]
#: `put_cell(arrays, t, b, value)`: write one such element into `[t, b]`.
put_cell: Callable[[Any, int, int, Any], bool]
#: `step_ordinary(words, bound, actions, outs, first, watch, observations, rewards, ends)`: step the environments
#: of `bound`, a list of `(column, env_rank, env.step, env.step_into or None)`, from index `first` on. Each gets its
#: entry of `actions`. If there is a `step_into`, and `outs` is not None, call `step_into(outs[column], action)`: then
#: the result has no observation, and `outs[column]` is the observation.
#: The results are stored in the lists `observations` and `rewards`, by column. Where an episode ends,
#: `(column, observation, reward, terminated, truncated)` is appended to the list `ends`.
#: A step is ordinary if the result, the flags and info have the usual types. At the end of an episode, the reward must
#: be a float too, and `ends` must not be None. `watch` (0, WATCH_ALL or WATCH_UNUSUAL) may ask for more. At the first
#: step that is not ordinary, store nothing of it and return `(index in bound, result of the step)`. Return None after
#: the last environment. `words` int64 `[n]` are words of the progress row: the last gets the env_rank of the
#: environment that steps.
step_ordinary: Callable[[Any, Any, Any, Any, int, int, Any, Any, Any], tuple[int, Any] | None]
#: `store_game_step(result, living, listed, observations, rewards, first)`: whether `result`, of the step of a game, is
#: ordinary: a tuple of five dicts; the agents of the first two, and of the list `listed`, are those of the list
#: `living`, in its order (the same objects, or equal texts); the next two have as many flags, and all are False. Then
#: the values of the first two are stored in the lists `observations` and `rewards` from column `first` on, or nowhere
#: if that is negative.
store_game_step: Callable[[Any, list[Any], Any, list[Any], list[Any], int], bool]
#: `sum_episodes(reward, done, valid, running, records, first_t, env_ranks, discount)`: write a RECORD for each
#: trajectory that finishes in the rows `[T, B]` that are `valid` (bool `[T, B]`; None: all) into `records`, uint8
#: `[1, n]` with room for T * B of them. Return how many, or -1 if it cannot handle the arguments; then nothing was
#: written. `running` float64 `[B, 5]` holds the sums of each column's unfinished trajectory and the weight of its next
#: reward. It is read and updated. `env_ranks` is int64 `[1, B]`.
sum_episodes: Callable[[Any, Any, Any, Any, Any, int, Any, float], int]

#: `shift_rows(logits)`: `logits` `[N, n]` minus the largest of each row. None if it cannot handle the array, or if the
#: largest of a row is not finite.
shift_rows: Callable[[Any], Any]
#: `draw_rows(weights, uniform, shifted)`: for each row of `weights` `[N, n]` an index, and the entry of `shifted`
#: `[N, n]` there; both `[N]`. The probability of an index is in proportion to its weight; `uniform` `[N]`, from 0 to 1,
#: decides. Afterwards `weights` holds the cumulative sums of each row. None if it cannot handle the arguments.
draw_rows: Callable[[Any, Any, Any], tuple[Any, Any] | None]

#: The functions that are used if nothing is compiled.
PYTHON: dict[str, Callable[..., Any]] = {
    "put_row": lambda *_: False,
    "put_cell": lambda *_: False,
    "step_ordinary": _step_ordinary,
    "store_game_step": _store_game_step,
    "sum_episodes": lambda *_: -1,
    "shift_rows": lambda *_: None,
    "draw_rows": lambda *_: None,
}

#: Why the compiled functions are not in use; empty if they are.
WHY_NOT_COMPILED = ""
try:
    _native = importlib.import_module("penstock.buffers._native")
    _functions = {name: getattr(_native, name) for name in PYTHON}
    if " ".join(f"{name}:{RECORD[name].str[1:]}" for name in RECORD.names or ()) != _native.RECORD_LAYOUT:
        raise ImportError("the compiled part was built for another layout of trajectory records: build it again")
except (ImportError, AttributeError) as error:  # no C compiler, an older build, or a checkout that was never built
    WHY_NOT_COMPILED, _functions = str(error), PYTHON
put_row, put_cell, step_ordinary, store_game_step, sum_episodes, shift_rows, draw_rows = _functions.values()

#: Whether the compiled functions are in use.
COMPILED = not WHY_NOT_COMPILED
