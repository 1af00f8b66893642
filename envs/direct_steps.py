"""How environments are stepped without the cost of a copy or of Gymnasium's wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from penstock.envs.checks import StepValues
from penstock.errors import SpaceError, brief

#: Releases of Gymnasium whose wrappers do what `flat_step_of` does. tests/envs/test_wrappers.py has their code.
_KNOWN = ("1.1.", "1.2.", "1.3.", "1.4.")
_CLASSES = (TimeLimit, OrderEnforcing, PassiveEnvChecker)
#: In earlier releases, a `PassiveEnvChecker` checks every step.
_CHECKS_ONCE = gym.__version__.startswith("1.4.")


def flat_step_of(env: gym.Env[Any, Any]) -> Callable[[Any], Any]:
    """A function `step(action)` that does exactly what `env.step` does, for the wrappers that `gym.make` adds.

    It leaves out the Python functions of `OrderEnforcing`, and of a `PassiveEnvChecker` that has checked all that it
    checks, below a `TimeLimit`. It reads and writes the same attributes of the wrappers at every call.
    Only a tuple that has not five values it returns as it is: callers refuse it, and name the environment.

    Returns `env.step` for other wrappers, if one of them has a `step` of its own, or with another release of Gymnasium.
    """
    plain: Callable[[Any], Any] = env.step
    if type(env) is not TimeLimit or type(env.env) is not OrderEnforcing or not are_known():
        return plain
    limit: Any = env
    order: Any = env.env
    checker: Any = order.env if _CHECKS_ONCE and type(order.env) is PassiveEnvChecker else None
    for wrapper in (limit, order, checker):
        # Not `"step" in vars(wrapper)`: an object whose `__dict__` has been made is slower for ever.
        if wrapper is not None and getattr(wrapper.step, "__func__", None) is not type(wrapper).step:
            return plain

    def step(action: Any) -> Any:
        if limit.env is not order or not order._has_reset:
            return plain(action)
        inner = order.env
        if inner is checker and inner.checked_step and inner.checked_data_reuse:
            inner = inner.env
        result = inner.step(action)
        if result.__class__ is not tuple:  # a new tuple of the same values would only take time
            observation, reward, terminated, truncated, info = result
            result = observation, reward, terminated, truncated, info
        n = limit._elapsed_steps
        n += 1
        limit._elapsed_steps = n
        if n < limit._max_episode_steps:
            return result
        observation, reward, terminated, _, info = result
        return observation, reward, terminated, True, info

    return step


def are_known() -> bool:
    """Whether Gymnasium's wrappers have their own methods, of a known release."""
    codes = [getattr(cls.step, "__code__", None) for cls in (*_CLASSES, gym.Wrapper)]
    are_own = all(code is not None and code.co_filename.startswith(gym.__path__[0]) for code in codes)
    return are_own and gym.__version__.startswith(_KNOWN)


def step_into_of(env: Any, env_rank: int) -> Callable[..., Any] | None:
    """`env.step_into`. None if there is none, or if a subclass overrides `step` alone: then the `step_into` that it
    inherits does something else.

    Raises `SpaceError` if `step_into` is not a method.
    """
    for cls in type(env).__mro__:
        if vars(cls).get("step_into") is not None:
            break
        if "step" in vars(cls) or "step_into" in vars(cls):  # `step_into = None` turns it off
            return None
    else:  # no class defines it
        return None
    if "step" in vars(env):
        return None
    step_into = env.step_into
    if not callable(step_into):
        raise SpaceError(f"step_into of env_rank {env_rank} must be a method, got {brief(step_into)}")
    return step_into  # type: ignore[no-any-return]


def cells_of(arrays: Any, t: int, n: int) -> list[Any]:
    """Views of the `n` cells `[t, b]` of `arrays` `[T, n, ...]`, each nested as `arrays` is."""
    if isinstance(arrays, dict):
        parts = [cells_of(part, t, n) for part in arrays.values()]
        return [dict(zip(arrays, cells, strict=True)) for cells in zip(*parts, strict=True)] if parts else [{}] * n
    if isinstance(arrays, tuple):
        return list(zip(*(cells_of(part, t, n) for part in arrays), strict=True)) if arrays else [()] * n
    row = arrays[t]
    return list(row) if row.ndim > 1 else [row[b, ...] for b in range(n)]  # a list of numbers would be copies


def with_observation(out: object, result: object, env_rank: int) -> StepValues:
    """The five values of `env.step`, from the `result` of `env.step_into(out, action)`.

    Raises `SpaceError` unless these are four values.
    """
    if not isinstance(result, tuple | list) or len(result) != 4:
        got = f"{len(result)} values" if isinstance(result, tuple | list) else brief(result)
        raise SpaceError(
            f"env.step_into of env_rank {env_rank} must return four values (reward, terminated, truncated, info): got "
            f"{got}. It writes the observation into its first argument"
        )
    reward, terminated, truncated, info = result
    return out, reward, terminated, truncated, info
