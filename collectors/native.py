"""The innermost loops: over a row's environments and over a batch's rewards, in C where that was compiled.

`step_ordinary` and `reset_timed` stand here in Python too, which says what they do; `_native.c` does the same, faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from penstock.workers.progress import Progress

__all__ = ["COMPILED", "MISSING", "PYTHON", "reset_timed", "step_ordinary", "sum_episodes"]

#: An environment as `step_ordinary` takes it: its column, its env_rank, its `step`.
Bound = tuple[int, int, Callable[[Any], Any]]


def _step_ordinary(
    words: Any,
    bound: Sequence[Bound],
    actions: Sequence[Any],
    first: int,
    is_watched: bool,
    observations: list[Any],
    rewards: list[Any],
) -> tuple[int, Any] | None:
    """Step the environments `bound`, from the first-th on, each with its own of `actions`.

    `observations` and `rewards`, one of each per column, then hold what they returned. Stops behind a step that is
    not ordinary, because the episode has ended or something is to be looked at, and behind every one if `is_watched`:
    returns which of `bound` that was, and what `env.step` returned, which is stored nowhere. None at the row's end.
    `words`, of a progress row, say at each time which environment it is.
    """
    if len(actions) != len(bound):
        raise ValueError(f"{len(bound)} actions are wanted, got {len(actions)}")
    env_rank_word = Progress.ENV_RANK
    for i in range(first, len(bound)):
        column, words[env_rank_word], step = bound[i]
        result = step(actions[i])
        if is_watched or type(result) is not tuple or len(result) != 5:
            return i, result
        observation, reward, terminated, truncated, info = result
        # One test lets the ordinary step pass; whatever is not ordinary is for the caller to look at more closely.
        if terminated is not False or truncated is not False or info.__class__ is not dict:
            return i, result
        observations[column] = observation
        rewards[column] = reward
    return None


def _reset_timed(words: Any, phase: int, env_rank: int, env: Any, seed: int | None) -> Any:
    """`env.reset(seed=seed)`. The progress row's `words` say `phase` and `env_rank` meanwhile, and then how much more
    time resets have taken."""
    words[Progress.PHASE], words[Progress.ENV_RANK] = phase, env_rank
    words[Progress.HEARTBEAT] = began = time.monotonic_ns()
    result = env.reset(seed=seed)
    words[Progress.RESETTING] += time.monotonic_ns() - began
    return result


def _sum_nothing(*_: Any) -> int:
    return -1


step_ordinary: Callable[[Any, Any, Any, int, bool, Any, Any], tuple[int, Any] | None]
reset_timed: Callable[[Any, int, int, Any, int | None], Any]
#: `sum_episodes(reward, done, running, records, first_t, first_env_rank, discount)`: the trajectories that finish in
#: rows `[T, B]`, as RECORDs of the trajectory queue, in `records`, which are bytes for T * B of them. Returns how many,
#: or -1 if it has done nothing. `running` float64 `[5, B]` are the figures of those that had begun before, with the
#: weight of their next reward, and then of those that go on. They are added up step by step, as `TrajInfo.step` does.
sum_episodes: Callable[[Any, Any, Any, Any, int, int, float], int]

#: What is used where nothing is compiled, by name.
PYTHON: dict[str, Callable[..., Any]] = {
    "step_ordinary": _step_ordinary,
    "reset_timed": _reset_timed,
    "sum_episodes": _sum_nothing,
}

try:
    from penstock.collectors._native import reset_timed, step_ordinary, sum_episodes
except ImportError as error:  # there was no C compiler, or the checkout is used as it is
    step_ordinary, reset_timed, sum_episodes = _step_ordinary, _reset_timed, _sum_nothing
    #: Why nothing is compiled.
    MISSING = str(error)
else:
    MISSING = ""

#: Whether the compiled functions are used.
COMPILED = not MISSING
