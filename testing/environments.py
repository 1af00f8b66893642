"""What the conformance kits run: samplers of the user's environments, in wrappers that end episodes or log calls."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorWrapper

from penstock.envs import EnvFn, env_factories
from penstock.envs.checks import reset_with
from penstock.envs.seats import is_in_turns, is_parallel
from penstock.samplers import Sampler
from penstock.workers.plan import StartMethod

COLUMN = "_penstock_column"  # the argument of the wrapped env_fn with the number of the environment


def wrapped_env_fn(
    env_fn: EnvFn,
    wrap: Callable[[Any, int], Any],
    env_kwargs: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """An `env_fn` that returns `wrap(env, column)`; `env` comes from the given `env_fn`, an id or a callable.

    `column` is the value of the argument `COLUMN`, 0 by default; `env_fn` gets all other arguments. With `num_envs`,
    it is batched. Raises `ConfigError` if `env_fn` is neither an id nor a callable.
    """
    factory = env_factories(env_fn, env_kwargs, 1)[0]

    # Keep the signature of the inner function: samplers read from it whether it takes a `context`.
    @functools.wraps(factory.fn, assigned=(), updated=())
    def build(**kwargs: Any) -> Any:
        column, num_envs = kwargs.pop(COLUMN, 0), kwargs.pop("num_envs", None)
        varied = replace(factory, kwargs={**factory.kwargs, **kwargs})
        return wrap(varied.fn(**varied.kwargs) if num_envs is None else varied.batched(num_envs), column)

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

    batched = False
    #: Most random steps of an environment before the first batch.
    max_decorrelation_steps = 10

    def env_fns(self, log: Log | None, *, reused: bool = False) -> Callable[..., Any]:
        """Makes the environments, which log their calls. The episodes of those that are not batched are bounded. With
        `reused`, single ones write observations and infos into the same memory at every step."""

        def wrap(env: Any, column: int) -> Any:
            if self.batched:
                return LoggedBatch(env, log)
            if is_parallel(env):
                return BoundedGame(env, column, log)
            if is_in_turns(env):
                return env
            return ReusingEnv(BoundedEnv(env, column, log)) if reused else BoundedEnv(env, column, log)

        return wrapped_env_fn(self.env_fn, wrap, self.env_kwargs)

    def sampler(
        self,
        cls: type[Sampler],
        log: Log | None = None,
        *,
        reused: bool = False,
        first_column: int = 0,
        **arguments: Any,
    ) -> Sampler:
        """A sampler of these environments, numbered from `first_column`."""
        columns = None if self.batched else [{COLUMN: first_column + b} for b in range(self.batch_B)]
        sizes = {"batch_T": self.batch_T, "batch_B": self.batch_B, "batched": self.batched}
        return cls(
            self.env_fns(log, reused=reused),
            env_kwargs=columns,
            start_method=self.start_method,
            **{"max_decorrelation_steps": self.max_decorrelation_steps, **sizes, **arguments},
        )


@dataclass(frozen=True)
class Event:
    """One call of a method of an environment or of an agent."""

    kind: str  #: "env.reset", "env.step", "agent.step", "agent.reset", "agent.reset_one", "agent.sample_mode", ...
    who: Any = None  #: the number of the environment, None for a batched one; the name of the policy
    #: Of a reset its arguments; of a step the action, the reward, and whether the episode has ended.
    data: Any = None


class Log(list[Event]):
    """Calls, in their order. Copies of an agent write into the same log."""

    def __deepcopy__(self, memo: object) -> Log:
        return self


def bound(column: int, episode: int) -> int:
    """The most steps of an episode: 3 to 11."""
    return 3 + (7 * column + 5 * episode) % 9


class BoundedEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Ends every episode after at most 3 to 11 steps: by truncation, by termination, or by both, in turn.

    So a few batches of any environment contain all kinds of episode ends.
    """

    def __init__(self, env: gym.Env[Any, Any], column: int, log: Log | None) -> None:
        super().__init__(env)
        self._column, self._log = column, log
        self._episode, self._count = -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._episode += 1
        self._count = 0
        result = super().reset(seed=seed, options=options)
        _note(self._log, "env.reset", self._column, {"seed": seed, "options": options})
        return result

    def step(self, action: object) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        given = copy.deepcopy(action)
        observation, reward, terminated, truncated, info = super().step(action)
        self._count += 1
        if self._count >= bound(self._column, self._episode):
            kind = (self._column + self._episode) % 3
            terminated, truncated = terminated or kind != 0, truncated or kind != 1
        _note(self._log, "env.step", self._column, (given, reward, terminated or truncated))
        return observation, reward, terminated, truncated, info


class BoundedGame:
    """The same for a `ParallelEnv`: in the last step, every agent ends in one of these ways."""

    def __init__(self, env: Any, column: int, log: Log | None) -> None:
        self._env, self._column, self._log, self._episode, self._count = env, column, log, -1, 0
        self.possible_agents = list(env.possible_agents)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while it is copied, it has no `_env` yet
            raise AttributeError(name)
        return getattr(self._env, name)

    @property
    def agents(self) -> list[Any]:
        """Who acts next."""
        return [] if self._count >= bound(self._column, self._episode) else list(self._env.agents)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """As the environment."""
        self._episode, self._count = self._episode + 1, 0
        result = reset_with(self._env, seed, options)
        _note(self._log, "env.reset", self._column, {"seed": seed, "options": options})
        return result

    def step(self, actions: Mapping[Any, Any]) -> tuple[Any, ...]:
        """As the environment; in the last step, all who have acted are flagged."""
        given = copy.deepcopy(dict(actions))
        observations, rewards, terminated, truncated, infos = self._env.step(actions)
        self._count += 1
        for i, agent in enumerate(given if not self.agents else ()):
            kind = (self._column + self._episode + i) % 3
            if kind != 0 or agent not in observations:
                terminated = {**terminated, agent: True}
            if kind != 1 and agent in observations:
                truncated = {**truncated, agent: True}
        _note(self._log, "env.step", self._column, (given, rewards, not self.agents))
        return observations, rewards, terminated, truncated, infos


class LoggedBatch(VectorWrapper):
    """A batched environment. Only it can end its episodes."""

    def __init__(self, env: Any, log: Log | None) -> None:
        super().__init__(env)
        self._log = log

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        given = copy.deepcopy({"seed": seed, "options": options})  # first: some environments take the mask out
        result: tuple[Any, dict[str, Any]] = reset_with(self.env, seed, options)
        _note(self._log, "env.reset", None, given)
        return result

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        given = copy.deepcopy(actions)
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        _note(self._log, "env.step", None, (given, rewards, np.logical_or(terminated, truncated)))
        return observations, rewards, terminated, truncated, infos


def _note(log: Log | None, kind: str, who: Any, data: object) -> None:
    if log is not None:
        log.append(Event(kind, who, copy.deepcopy(data)))


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
