"""From what the user gives as `env_fn` to one picklable factory per environment."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
from gymnasium.vector import VectorEnv

from penstock.envs.seeding import Purpose
from penstock.errors import ConfigError

__all__ = ["EnvContext", "EnvFactory", "EnvFn", "build_example_env", "close_example_env", "env_factories"]

EnvFn = Callable[..., gym.Env[Any, Any]] | str | Sequence[Callable[..., gym.Env[Any, Any]]]


@dataclass(frozen=True)
class EnvContext:
    """Where and for what an environment is built."""

    env_rank: int  #: global index, among environments of the same purpose
    worker_rank: int  #: of the worker that steps it; -1 for the example environment in the main process
    seed: int  #: of its first reset; for whatever else is random about it
    purpose: Purpose | None  #: TRAIN or EVAL; None for the example environment, of which the spaces are read


_EXAMPLE = EnvContext(env_rank=0, worker_rank=-1, seed=0, purpose=None)


@dataclass(frozen=True)
class EnvFactory:
    """Builds one environment: `fn(**kwargs)`, checked to be a `gymnasium.Env`.

    A function with a parameter called `context` also gets the `EnvContext`.
    """

    fn: Callable[..., gym.Env[Any, Any]]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, context: EnvContext = _EXAMPLE) -> gym.Env[Any, Any]:
        kwargs = {**self.kwargs, "context": context} if _asks_for_context(self.fn) else self.kwargs
        env: Any = self.fn(**kwargs)
        if isinstance(env, VectorEnv):
            raise ConfigError(
                f"env_fn returned a batched environment, {_describe(env)}: pass collector_cls=VectorEnvCollector, for "
                "which env_fn(num_envs=n) builds one of n environments"
            )
        if not isinstance(env, gym.Env):
            raise ConfigError(
                f"env_fn must return a gymnasium.Env, got {type(env).__module__}.{type(env).__qualname__}"
                + (": convert an old gym environment with shimmy" if hasattr(env, "step") else "")
            )
        return env

    def batched(self, num_envs: int, context: EnvContext = _EXAMPLE) -> VectorEnv[Any, Any, Any]:
        """Build one batched environment: `fn(num_envs=num_envs, **kwargs)`."""
        kwargs = {**self.kwargs, "context": context} if _asks_for_context(self.fn) else self.kwargs
        env: Any = self.fn(num_envs=num_envs, **kwargs)
        if not isinstance(env, VectorEnv) or env.num_envs != num_envs:
            raise ConfigError(
                f"env_fn(num_envs={num_envs}) must return a gymnasium.vector.VectorEnv of {num_envs} environments, "
                f"got {_describe(env)}"
            )
        return env


def env_factories(
    env_fn: EnvFn, env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None, n_envs: int, prefix: str = ""
) -> tuple[EnvFactory, ...]:
    """One factory per environment, `n_envs` of them.

    `env_fn` is a callable, an environment id, or a list of `n_envs` callables; `env_kwargs` is one dict
    for all or a list of `n_envs` dicts. Raises `ConfigError` if it is neither or the counts differ.
    """
    fns: list[Callable[..., gym.Env[Any, Any]]]
    if isinstance(env_fn, str):
        fns = [_maker(env_fn)] * n_envs
    elif callable(env_fn):
        fns = [env_fn] * n_envs
    elif isinstance(env_fn, Sequence) and all(callable(fn) for fn in env_fn):
        fns = [fn for fn in env_fn if callable(fn)]
    else:
        raise ConfigError(
            f"{prefix}env_fn must be a callable, an environment id or a list of callables, got {_describe(env_fn)}: "
            "pass the function that builds the environment, for example functools.partial(gym.make, 'CartPole-v1')"
        )
    if len(fns) != n_envs:
        raise ConfigError(
            f"{prefix}env_fn is a list of {len(fns)} callables for {n_envs} environments: give one for each"
        )
    if env_kwargs is None or isinstance(env_kwargs, Mapping):
        kwargs: list[Mapping[str, Any]] = [dict(env_kwargs or {})] * n_envs
    elif isinstance(env_kwargs, Sequence) and all(isinstance(each, Mapping) for each in env_kwargs):
        kwargs = [dict(each) for each in env_kwargs]
    else:
        raise ConfigError(f"{prefix}env_kwargs must be a dict or a list of dicts, got {_describe(env_kwargs)}")
    if len(kwargs) != n_envs:
        raise ConfigError(
            f"{prefix}env_kwargs is a list of {len(kwargs)} dicts for {n_envs} environments: give one for each"
        )
    return tuple(EnvFactory(fn, kw) for fn, kw in zip(fns, kwargs, strict=True))


def _maker(env_id: str) -> Callable[..., gym.Env[Any, Any]]:
    try:
        spec = gym.spec(env_id)
    except gym.error.Error as error:
        raise ConfigError(f"env_fn={env_id!r} is not a registered environment id: {error}") from error
    # The spec travels, not the id: an environment registered in the user's script is unknown to the workers.
    return _MakeFromSpec(spec)


@dataclass(frozen=True)
class _MakeFromSpec:
    spec: Any

    def __call__(self, **kwargs: Any) -> gym.Env[Any, Any]:
        return gym.make(self.spec, **kwargs)


def build_example_env(factory: EnvFactory, *, batched: bool = False) -> Any:
    """Build the environment that the main process reads the spaces from, and no more.

    `batched`: a `VectorEnv` of one environment.

    Raises `ConfigError` with the factory's own exception as its cause.
    """
    try:
        env = factory.batched(1) if batched else factory()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"env_fn raised {type(error).__name__} while the main process built an example environment: {error}"
        ) from error
    for name in ("observation_space", "action_space"):
        space = getattr(env, f"single_{name}" if batched else name, None)
        if not isinstance(space, gym.Space):
            env.close()
            raise ConfigError(f"the environment's {name} must be a gymnasium space, got {_describe(space)}")
    return env


def close_example_env(env: Any) -> None:
    """Close it. Raises `ConfigError` with the environment's own exception as its cause."""
    try:
        env.close()
    except Exception as error:
        raise ConfigError(
            f"closing the example environment, which the spaces are read from, raised {type(error).__name__}: {error}"
        ) from error


def _asks_for_context(fn: Callable[..., Any]) -> bool:
    try:
        parameter = inspect.signature(fn).parameters.get("context")
    except (TypeError, ValueError):  # built in, or written in C
        return False
    return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
