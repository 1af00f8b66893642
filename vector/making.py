"""`make_vec`: a ShmVectorEnv from an environment id."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from penstock.arguments import MOST_ENVS, integer
from penstock.errors import ConfigError
from penstock.vector.env import ShmVectorEnv

Wrapper = Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]


def make_vec(
    id: str | EnvSpec, num_envs: int = 1, wrappers: Sequence[Wrapper] | None = None, **kwargs: Any
) -> ShmVectorEnv:
    """A `ShmVectorEnv` of `num_envs` environments `id`.

    Each environment is wrapped in all `wrappers`; the first is the innermost.
    Arguments of `ShmVectorEnv` go there, all others to `gymnasium.make`. It can be the `vector_entry_point` of a
    registered environment. Raises `ConfigError` for an id that is not registered, and as `ShmVectorEnv` does.
    """
    try:
        spec = gym.spec(id) if isinstance(id, str) else id
    except gym.error.Error as error:
        raise ConfigError(f"id={id!r} is not a registered environment id: {error}") from error
    names = set(inspect.signature(ShmVectorEnv).parameters) - {"env_fns", "unknown"}
    options = {name: kwargs.pop(name) for name in names & set(kwargs)}
    num_envs = integer("num_envs", num_envs, 1, MOST_ENVS)
    return ShmVectorEnv([partial(_make_one, spec, tuple(wrappers or ()), kwargs)] * num_envs, **options)


def _make_one(spec: EnvSpec, wrappers: Sequence[Wrapper], kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    env: gym.Env[Any, Any] = gym.make(spec, **kwargs)
    for wrapper in wrappers:
        env = wrapper(env)
    return env
