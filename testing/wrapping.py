"""Environment functions around environment functions: the same arguments, another environment."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym

from penstock.envs import EnvFn, env_factories

__all__ = ["COLUMN", "wrapping"]

COLUMN = "_penstock_column"


def wrapping(
    env_fn: EnvFn,
    wrap: Callable[[gym.Env[Any, Any], int], gym.Env[Any, Any]],
    env_kwargs: Mapping[str, Any] | None = None,
) -> Callable[..., gym.Env[Any, Any]]:
    """An `env_fn` whose environments are those of `env_fn`, an id or a callable, in a wrapper.

    `wrap` is given the environment and a number, which comes as the argument called `COLUMN` (0 without
    one); all others go to `env_fn`. Raises `ConfigError` if `env_fn` is neither an id nor a callable.
    """
    factory = env_factories(env_fn, env_kwargs, 1)[0]

    # With the signature of the function inside, so that it is given what it asks for.
    @functools.wraps(factory.fn, assigned=(), updated=())
    def build(**kwargs: Any) -> gym.Env[Any, Any]:
        column = kwargs.pop(COLUMN, 0)
        return wrap(factory.fn(**{**factory.kwargs, **kwargs}), column)

    return build
