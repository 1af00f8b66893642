"""One time step of the environments of a worker, and that of a game: in C where it was compiled, in Python elsewhere,
with the same results. `step_ordinary` and `step_game` handle the usual types, and the caller the rest.

An environment may use the memory of an observation again, and two environments may share it. So each observation is
written into the batch, or copied, as soon as its environment has stepped. In C, an array that nobody else refers to is
not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.buffers.native import load, put_cell
from penstock.buffers.tree import is_constant

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
    arrays: Any,
    t: int,
) -> tuple[int, Any] | None:
    if len(actions) != len(bound):
        raise ValueError(f"expected {len(bound)} actions, got {len(actions)}")
    words = memoryview(words)  # faster to write than an array
    for i in range(first, len(bound)):
        column, words[-1], step, step_into = bound[i]
        out = None if outs is None or step_into is None else outs[column]
        result = step(actions[i]) if out is None else step_into(out, actions[i])
        if watch == WATCH_ALL or not _is_ordinary(result, 5 - (out is not None), watch, ends):
            return i, result
        *seen, reward, terminated, truncated, _ = result
        observation = out
        if out is None:
            (observation,) = seen
            if arrays is not None and not put_cell(arrays, t, column, observation):
                return i, result
            if (terminated or truncated or arrays is None) and (observation := _kept(observation)) is _NOT_PLAIN:
                return i, result
        if ends is not None and (terminated or truncated):
            ends.append((column, observation, reward, terminated, truncated))
        if arrays is None:
            observations[column] = observation
        rewards[column] = reward
    return None


def _is_ordinary(result: Any, size: int, watch: int, ends: list[Any] | None) -> bool:
    """Whether the result has the usual types, apart from its observation."""
    if type(result) is not tuple or len(result) != size:
        return False
    reward, terminated, truncated, info = result[-4:]
    if not (terminated.__class__ is truncated.__class__ is bool and info.__class__ is dict):
        return False
    must_be_float = watch or terminated or truncated
    if (watch and info) or not (reward.__class__ is float or (not must_be_float and is_constant(reward))):
        return False
    return ends is not None or not (terminated or truncated)


def _step_game(
    step: Callable[[Any], Any],
    given: Any,
    living: list[Any],
    game: Any,
    observations: list[Any],
    rewards: list[Any],
    first: int,
) -> tuple[bool, Any]:
    result, listed = step(given), game.agents
    if result.__class__ is not tuple or len(result) != 5 or not all(isinstance(part, dict) for part in result):
        return False, result
    seen, gained, *flags = result[:4]
    for agents in (listed, list(seen), list(gained)):
        if agents.__class__ is not list or len(agents) != len(living) or not all(map(_is_agent, agents, living)):
            return False, result
    if any(len(by_agent) != len(living) for by_agent in flags) or not all(map(is_constant, gained.values())):
        return False, result
    if any(not (flag is False or flag is _NUMPY_FALSE) for by_agent in flags for flag in by_agent.values()):
        return False, result
    last = first + len(living)
    if first < 0 or last > min(len(observations), len(rewards)):
        raise IndexError(f"there are no columns for {len(living)} agents from {first} on")
    if (copies := _kept({**seen})) is _NOT_PLAIN:
        return False, result
    observations[first:last], rewards[first:last] = copies.values(), gained.values()
    return True, result


def _kept(value: Any) -> Any:
    """A copy of `value`, which nobody else can change; _NOT_PLAIN for what is no constant, array, dict or tuple."""
    if is_constant(value):
        return value
    if value.__class__ is np.ndarray and not value.dtype.hasobject:
        return value.copy()
    if value.__class__ is dict:
        if any(key.__class__ not in (str, int) for key in value):
            return _NOT_PLAIN
        parts = {key: _kept(part) for key, part in value.items()}
        return _NOT_PLAIN if any(part is _NOT_PLAIN for part in parts.values()) else parts
    if value.__class__ is tuple:
        items = tuple(map(_kept, value))
        return _NOT_PLAIN if any(part is _NOT_PLAIN for part in items) else items
    return _NOT_PLAIN


def _is_agent(key: object, agent: Any) -> bool:
    return key is agent or (key.__class__ is agent.__class__ is str and key == agent)


_NUMPY_FALSE = np.False_
_NOT_PLAIN = object()

#: `step_ordinary(words, bound, actions, outs, first, watch, observations, rewards, ends, arrays, t)`: step the
#: environments of `bound`, a list of `(column, env_rank, env.step, env.step_into or None)`, from index `first` on. Each
#: gets its entry of `actions`. If there is a `step_into`, and `outs` is not None, call
#: `step_into(outs[column], action)`: then the result has no observation, and `outs[column]` is the observation.
#: The rewards are stored in the list `rewards`, by column. Each observation is written into its cell of row t of
#: `arrays`, as `put_cell` does it, before the next environment steps. If `arrays` is None, it is stored in the list
#: `observations` instead, and copied if somebody else could change it. Where an episode ends,
#: `(column, observation, reward, terminated, truncated)` is appended to the list `ends`.
#: A step is ordinary if the result, the flags and info have the usual types, the reward is a number, and the
#: observation is a number, a text or an array, or a dict or tuple of such. At the end of an episode, the reward must
#: be a float too, and `ends` must not be None. `watch` (0, WATCH_ALL or WATCH_UNUSUAL) may ask for more. At the first
#: step that is not ordinary, store nothing of it and return `(index in bound, result of the step)`. Return None after
#: the last environment. `words` int64 `[n]` are words of the progress row: the last gets the env_rank of the
#: environment that steps.
step_ordinary: Callable[[Any, Any, Any, Any, int, int, Any, Any, Any, Any, int], tuple[int, Any] | None]
#: `step_game(step, given, living, game, observations, rewards, first)`: call `step(given)`, and return whether its
#: result is ordinary, and the result. It is ordinary if it is a tuple of five dicts; the agents of the first two, and
#: of the list `game.agents`, are those of the list `living`, in its order (the same objects, or equal texts); the next
#: two have as many flags, and all are False; rewards and observations are as in an ordinary step. Then these are stored
#: in the lists `observations` and `rewards`, from column `first` on. Observations are copied as in `step_ordinary`.
step_game: Callable[[Any, Any, list[Any], Any, list[Any], list[Any], int], tuple[bool, Any]]

#: The functions that are used if nothing is compiled.
PYTHON: dict[str, Callable[..., Any]] = {"step_ordinary": _step_ordinary, "step_game": _step_game}
#: Why the compiled functions are not in use; empty if they are.
_functions, WHY_NOT_COMPILED = load("penstock.columns._stepping", PYTHON)
step_ordinary, step_game = _functions.values()
