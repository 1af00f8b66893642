"""What the conformance kits run: samplers of the user's environments, in wrappers that end episodes or log calls."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from penstock.envs import EnvFn, env_factories
from penstock.envs.seats import is_parallel
from penstock.samplers import Sampler
from penstock.workers.plan import StartMethod

COLUMN = "_penstock_column"  # the argument of the wrapped env_fn with the number of the environment


def wrapped_env_fn(
    env_fn: EnvFn,
    wrap: Callable[[gym.Env[Any, Any], int], gym.Env[Any, Any]],
    env_kwargs: Mapping[str, Any] | None = None,
) -> Callable[..., gym.Env[Any, Any]]:
    """An `env_fn` that returns `wrap(env, column)`; `env` comes from the given `env_fn`, an id or a callable.

    `column` is the value of the argument `COLUMN`, 0 by default; `env_fn` gets all other arguments. Raises
    `ConfigError` if `env_fn` is neither an id nor a callable.
    """
    factory = env_factories(env_fn, env_kwargs, 1)[0]

    # Keep the signature of the inner function: samplers read from it whether it takes a `context`.
    @functools.wraps(factory.fn, assigned=(), updated=())
    def build(**kwargs: Any) -> gym.Env[Any, Any]:
        column = kwargs.pop(COLUMN, 0)
        return wrap(factory.fn(**{**factory.kwargs, **kwargs}), column)

    return build


@dataclass(frozen=True)
class Setup:
    """What all kits need for their runs: environments, sizes, a seed."""

    env_fn: EnvFn
    env_kwargs: Mapping[str, Any] | None
    batch_T: int
    batch_B: int
    seed: int
    start_method: StartMethod

    def sampler(
        self,
        cls: type[Sampler],
        log: list[Event] | None = None,
        *,
        reused: bool = False,
        first_column: int = 0,
        **arguments: Any,
    ) -> Sampler:
        """A sampler of `BoundedEnv`s, numbered from `first_column`. With `reused`, they write observations and infos
        into the same memory at every step. Environments of several agents stay as they are."""

        def wrap(env: gym.Env[Any, Any], column: int) -> gym.Env[Any, Any]:
            if is_parallel(env):
                return env
            env = BoundedEnv(env, column, log)
            return ReusingEnv(env) if reused else env

        return cls(
            wrapped_env_fn(self.env_fn, wrap, self.env_kwargs),
            env_kwargs=[{COLUMN: first_column + b} for b in range(self.batch_B)],
            batch_T=self.batch_T,
            batch_B=self.batch_B,
            start_method=self.start_method,
            **{"max_decorrelation_steps": 10, **arguments},
        )


@dataclass(frozen=True)
class Event:
    """One call of a method of an environment or of the agent."""

    kind: str  #: "env.reset", "env.step", "agent.step", "agent.reset", "agent.reset_one", "agent.sample_mode", ...
    column: int = -1
    data: Any = None


class BoundedEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Ends every episode after at most 3 to 11 steps: by truncation, by termination, or by both, in turn.

    So a few batches of any environment contain all kinds of episode ends. With `log`, each reset and step is logged
    there.
    """

    def __init__(self, env: gym.Env[Any, Any], column: int, log: list[Event] | None) -> None:
        super().__init__(env)
        self._column, self._log = column, log
        self._episode, self._count = -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._episode += 1
        self._count = 0
        result = super().reset(seed=seed, options=options)
        if self._log is not None:
            self._log.append(Event("env.reset", self._column, copy.deepcopy(result[0])))
        return result

    def step(self, action: object) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        given = copy.deepcopy(action)
        observation, reward, terminated, truncated, info = super().step(action)
        self._count += 1
        if self._count >= 3 + (7 * self._column + 5 * self._episode) % 9:
            kind = (self._column + self._episode) % 3
            terminated, truncated = terminated or kind != 0, truncated or kind != 1
        if self._log is not None:
            result = copy.deepcopy((observation, reward, terminated, truncated))
            self._log.append(Event("env.step", self._column, (given, *result)))
        return observation, reward, terminated, truncated, info


class ReusingEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Writes every observation and info into the same objects, and overwrites the actions with zeros.
    Fast environments do this. Code that stores what they return must copy it.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._observation: Any = None
        self._info: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self._reuse(*super().reset(seed=seed, options=options))

    def step(self, action: object) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, *result, info = super().step(copy.deepcopy(action))
        _zero(action)
        observation, info = self._reuse(observation, info)
        return observation, *result, info

    def _reuse(self, observation: object, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._observation = _write_into(self._observation, observation)
        _zero(self._info)
        self._info.clear()
        self._info.update(copy.deepcopy(info))
        return self._observation, self._info


def _write_into(memory: Any, value: object) -> Any:
    """Write `value` into the arrays of `memory` where they fit; returns the object that holds the value."""
    if isinstance(memory, dict) and isinstance(value, dict) and memory.keys() == value.keys():
        memory.update({key: _write_into(part, value[key]) for key, part in memory.items()})
        return memory
    if isinstance(memory, tuple) and isinstance(value, tuple) and len(memory) == len(value):
        return tuple(map(_write_into, memory, value))
    if _is_writeable(memory) and isinstance(value, np.ndarray) and memory.shape == value.shape:
        memory[...] = value
        return memory
    return copy.deepcopy(value)


def _zero(memory: Any) -> None:
    """Write zeros into the arrays of `memory`."""
    if isinstance(memory, dict | tuple):
        for part in memory.values() if isinstance(memory, dict) else memory:
            _zero(part)
    elif _is_writeable(memory):
        memory[...] = 0


def _is_writeable(memory: object) -> bool:
    return isinstance(memory, np.ndarray) and memory.flags.writeable and memory.dtype != object
