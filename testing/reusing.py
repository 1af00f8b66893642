"""Environments that write into the same memory again, as fast ones do: whoever keeps what they give must copy it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

__all__ = ["ReusingEnv", "reusing"]


class ReusingEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Gives the same observation and info, written anew, every time, and spoils the actions that it was given."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._observation: Any = None
        self._info: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self._written(*super().reset(seed=seed, options=options))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, *result, info = super().step(copy.deepcopy(action))
        _rewrite(action, None)
        observation, info = self._written(observation, info)
        return observation, *result, info

    def _written(self, observation: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._observation = _rewrite(self._observation, observation)
        for value in self._info.values():
            _rewrite(value, None)
        self._info.clear()
        self._info.update(copy.deepcopy(info))
        return self._observation, self._info


def reusing(env_fn: Callable[..., gym.Env[Any, Any]]) -> Callable[..., gym.Env[Any, Any]]:
    """An env_fn for `ReusingEnv`s around the environments of `env_fn`."""

    # With the signature of the function inside, so that it is given what it asks for.
    @functools.wraps(env_fn, assigned=(), updated=())
    def build(**kwargs: Any) -> gym.Env[Any, Any]:
        return ReusingEnv(env_fn(**kwargs))

    return build


def _rewrite(memory: Any, value: Any) -> Any:
    """Write `value` (None: zeros) into `memory` as far as it can be written; returns what then holds the value."""
    if isinstance(memory, np.ndarray) and memory.flags.writeable and memory.dtype != object:
        if value is None or (isinstance(value, np.ndarray) and value.shape == memory.shape):
            memory[...] = 0 if value is None else value
            return memory
    elif isinstance(memory, dict):
        if value is None or (isinstance(value, dict) and value.keys() == memory.keys()):
            for key in memory:
                memory[key] = _rewrite(memory[key], None if value is None else value[key])
            return memory
    elif isinstance(memory, tuple) and (value is None or (isinstance(value, tuple) and len(value) == len(memory))):
        return tuple(_rewrite(part, None if value is None else value[i]) for i, part in enumerate(memory))
    return memory if value is None else copy.deepcopy(value)
