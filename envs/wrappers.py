"""Steps and resets without the Python functions of Gymnasium's TimeLimit and OrderEnforcing.

The classes `_Known...` have copies of Gymnasium's code. They are never used, only compared with the installed code. If
that differs, nothing is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium.error import ResetNeeded
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from penstock.buffers.native import flat_methods


class _Known(gym.Wrapper[Any, Any, Any, Any]):
    """Copies of the methods of `gymnasium.Wrapper`."""

    def step(self, action: Any) -> Any:
        """A copy."""
        return self.env.step(action)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """A copy."""
        return self.env.reset(seed=seed, options=options)


class _KnownTimeLimit(_Known):
    """Copies of the methods of `TimeLimit`."""

    _elapsed_steps: Any
    _max_episode_steps: Any

    def step(self, action: Any) -> Any:
        """A copy."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._elapsed_steps += 1

        if self._elapsed_steps >= self._max_episode_steps:
            truncated = True

        return observation, reward, terminated, truncated, info

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """A copy."""
        self._elapsed_steps = 0
        return super().reset(seed=seed, options=options)


class _KnownOrderEnforcing(_Known):
    """Copies of the methods of `OrderEnforcing`."""

    _has_reset: Any

    def step(self, action: Any) -> Any:
        """A copy."""
        if not self._has_reset:
            raise ResetNeeded("Cannot call env.step() before calling env.reset()")
        return super().step(action)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """A copy."""
        self._has_reset = True
        return super().reset(seed=seed, options=options)


def flattened(env: Any) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Functions `step(action)` and `reset(seed=..., options=...)` that do exactly what these methods of `env` do.

    They leave out the Python functions of the outermost wrappers, as far as these are exactly `TimeLimit` or
    `OrderEnforcing`. They read and write the same attributes of the wrappers at every call. If these attributes have
    unusual values, or if a wrapper now wraps another environment, they call the methods of `env`.

    Returns None if there is no such wrapper, if nothing is compiled, or if Gymnasium's wrappers are not the known ones.
    """
    layers, inside = [], env
    while type(inside) in (TimeLimit, OrderEnforcing) and not {"step", "reset"} & vars(inside).keys():
        layers.append((inside, vars(inside), inside.env, type(inside) is TimeLimit))
        inside = inside.env
    if not layers or not _are_known():
        return None
    return flat_methods(env.step, inside, tuple(layers), _finish_step)


def _finish_step(wrapper: Any, result: Any) -> Any:
    """What `TimeLimit.step` does after the step of its environment. The C code calls this for unusual values."""
    observation, reward, terminated, truncated, info = result
    wrapper._elapsed_steps += 1
    if wrapper._elapsed_steps >= wrapper._max_episode_steps:
        truncated = True
    return observation, reward, terminated, truncated, info


def _are_known() -> bool:
    """Whether Gymnasium's wrappers have the code that is copied here. Another version may have other code."""
    known: tuple[tuple[Any, Any], ...] = (
        (gym.Wrapper, _Known),
        (TimeLimit, _KnownTimeLimit),
        (OrderEnforcing, _KnownOrderEnforcing),
    )
    for cls, own in known:
        if not all(_is_same_code(vars(cls).get(name), vars(own)[name]) for name in ("step", "reset")):
            return False
        if any(getattr(cls, name, None) is not getattr(object, name, None) for name in _ATTRIBUTE_ACCESS):
            return False
    return TimeLimit.__mro__[1] is OrderEnforcing.__mro__[1] is gym.Wrapper


_ATTRIBUTE_ACCESS = ("__getattribute__", "__getattr__", "__setattr__")


@functools.lru_cache  # a worker asks this for each of its environments
def _is_same_code(one: Any, other: Any) -> bool:
    return hasattr(one, "__code__") and hasattr(other, "__code__") and _behaviour(one) == _behaviour(other)


def _behaviour(function: Any) -> tuple[Any, ...]:
    """All that decides what a function does, without its docstring and line numbers."""
    code = function.__code__
    constants = tuple(constant for constant in code.co_consts if constant is not None and constant != function.__doc__)
    return code.co_code, code.co_names, constants, code.co_varnames, code.co_kwonlyargcount, function.__kwdefaults__
