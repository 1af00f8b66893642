"""Factories: one callable per environment, made from the user's `env_fn`."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from penstock.arguments import signature
from penstock.buffers.reports import in_one_line
from penstock.buffers.tree import snapshot
from penstock.envs.infos import element
from penstock.envs.seats import PLAYED_IN_TURNS, ParallelView, is_in_turns, is_parallel, registered
from penstock.envs.seeding import Purpose
from penstock.errors import ConfigError, brief

#: What a sampler accepts as `env_fn`: a callable, an environment id, or a list of callables.
EnvFn = Callable[..., gym.Env[Any, Any]] | str | Sequence[Callable[..., gym.Env[Any, Any]]]


@dataclass(frozen=True)
class EnvContext:
    """What an environment is built for, and in which worker.

    The main process also builds one example environment, to read its spaces.
    """

    env_rank: int  #: global index among the environments with the same purpose
    worker_rank: int  #: of the worker that steps the environment; -1 for the example environment
    seed: int  #: of the first reset; use it for other random numbers too
    purpose: Purpose | None  #: `Purpose.TRAIN` or `Purpose.EVAL`; None for the example environment


_EXAMPLE = EnvContext(env_rank=0, worker_rank=-1, seed=0, purpose=None)


@dataclass(frozen=True)
class EnvFactory:
    """Builds one environment: `fn(**kwargs)`, which must return a `gymnasium.Env`.

    If `fn` has a parameter called `context`, it also gets the `EnvContext`: unless `kwargs` or a `partial` gives this
    argument, or it has another default than None and no annotation `EnvContext`.
    """

    fn: Callable[..., gym.Env[Any, Any]]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrapper: Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]] | None = None  #: applied to the environment
    #: Applied to an environment of several agents, in place of `wrapper`; None: such an environment is refused.
    as_seats: Callable[[Any], Any] | None = None
    has_context: bool | None = None  #: whether `fn` gets a context if `kwargs` has none; None: it is looked up

    def __call__(self, context: EnvContext = _EXAMPLE) -> Any:
        env: Any = self._call(context)
        if isinstance(env, VectorEnv):
            raise ConfigError(
                f"the environment function returned a batched environment, {_describe(env)}. A sampler takes it with "
                "batched=True, a ShmVectorEnv with num_envs=n; both then call env_fn(num_envs=n) "
                "for a batch of n environments"
            )
        if self.as_seats is not None and (is_parallel(env) or is_in_turns(env)):
            return self.as_seats(env)
        if not isinstance(env, gym.Env):
            remedy = ""
            if hasattr(env, "agent_iter"):
                remedy = f". This environment {PLAYED_IN_TURNS}"
            elif is_parallel(env):
                remedy = ". Environments of several agents are for samplers and for ShmVectorEnv"
            elif hasattr(env, "step"):
                remedy = ": convert an old gym environment with shimmy"
            elif env is None:
                remedy = ": did you forget `return`?"
            raise ConfigError(
                f"the environment function must return a gymnasium.Env, got {type(env).__module__}."
                f"{type(env).__qualname__}{remedy}"
            )
        return env if self.wrapper is None else self.wrapper(env)

    def batched(self, num_envs: int, context: EnvContext = _EXAMPLE) -> VectorEnv[Any, Any, Any]:
        """Build one batched environment: `fn(num_envs=num_envs, **kwargs)`, or that of an environment id."""
        try:
            env: Any = (_with_make_vec(self) or self)._call(context, num_envs=num_envs)
        except TypeError as error:
            if "num_envs" not in str(error):
                raise
            raise ConfigError(
                f"env_fn raised TypeError: {error}. penstock calls env_fn(num_envs=n), which must return a "
                "gymnasium.vector.VectorEnv of n environments. For an env_fn that returns a single environment, leave "
                "batched out, or give ShmVectorEnv a list of such functions"
            ) from error
        if not isinstance(env, VectorEnv) or env.num_envs != num_envs:
            raise ConfigError(
                f"env_fn(num_envs={num_envs}) must return a gymnasium.vector.VectorEnv of {num_envs} environments, "
                f"got {_describe(env)}. Where its columns belong together in groups of k, give "
                "rows_per_env=k"
            )
        return env

    def as_example(self, spaces: tuple[gym.Space[Any], gym.Space[Any]] | None) -> EnvFactory:
        """What builds the example environment. If the user has given the `spaces`, it has nothing else."""
        return self if spaces is None else replace(self, fn=partial(_with_spaces, spaces), kwargs={}, has_context=False)

    def _call(self, context: EnvContext, **arguments: object) -> Any:
        try:
            return self.fn(**arguments, **self._arguments(context))
        except gym.error.UnregisteredEnv as error:
            if context.worker_rank < 0:
                raise
            raise ConfigError(
                f"env_fn raised {in_one_line(error)} The environment could be built in the main process, but not in a "
                "worker: import the module that registers it, or register it, inside env_fn"
            ) from error

    def _arguments(self, context: EnvContext) -> dict[str, Any]:
        has_context = _has_context(self.fn) if self.has_context is None else self.has_context
        return {"context": context, **self.kwargs} if has_context else {**self.kwargs}


def _has_context(fn: Callable[..., Any]) -> bool:
    if isinstance(fn, partial) and "context" in fn.keywords:  # the user's own
        return False
    parameter = signature(fn).parameters.get("context")
    if parameter is None or parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        return False
    is_open = parameter.default is parameter.empty or parameter.default is None
    return is_open or "EnvContext" in str(parameter.annotation)


def _with_make_vec(factory: EnvFactory) -> EnvFactory | None:
    """The factory of batched environments if `factory` was given an environment id, else None."""
    fn = factory.fn
    if not (isinstance(fn, partial) and fn.func is gym.make and not fn.keywords):
        return None
    spec = gym.spec(fn.args[0]) if isinstance(fn.args[0], str) else fn.args[0]
    if spec.vector_entry_point is None:
        raise ConfigError(
            f"{spec.id} has no batched environment (the vector_entry_point of its registration): for single "
            "environments, leave batched out, or give ShmVectorEnv a list of ids"
        )
    make: Any = partial(gym.make_vec, spec, vectorization_mode="vector_entry_point")
    return replace(factory, fn=make, has_context=False)


def _with_spaces(spaces: tuple[gym.Space[Any], gym.Space[Any]], num_envs: int | None = None) -> Any:
    env: Any = gym.Env() if num_envs is None else VectorEnv()
    prefix, env.num_envs = "" if num_envs is None else "single_", num_envs
    for name, space in zip(("observation_space", "action_space"), spaces, strict=True):
        setattr(env, f"{prefix}{name}", space)
    return env


def descriptions(factories: Sequence[EnvFactory]) -> list[str]:
    """What the environments are made of, to notice that a saved run had others: the name of the function and its
    arguments. Of arguments that are no plain values, only the type is compared. One text if all are equal."""
    texts = [f"{_plain(factory.fn)}, {_plain(dict(factory.kwargs))}" for factory in factories]
    return texts[:1] if len(set(texts)) == 1 else texts


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_plain(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_plain, value)) + "]"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, partial):
        return f"{_plain(value.func)}{_plain(value.args)}{_plain(value.keywords)}"
    if isinstance(value, EnvSpec):
        return f"{value.id}, max_episode_steps={value.max_episode_steps}, {_plain(value.kwargs)}"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def env_factories(
    env_fn: EnvFn, env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None, n_envs: int, prefix: str = ""
) -> tuple[EnvFactory, ...]:
    """`n_envs` factories, one per environment.

    `env_fn` is a callable, an environment id, or a list of `n_envs` callables; `env_kwargs` is one dict for all
    environments, or a list of `n_envs` dicts. Raises `ConfigError` for anything else; `prefix` is put before the
    arguments' names in its message.
    """
    fns: list[Callable[..., gym.Env[Any, Any]]]
    if isinstance(env_fn, str):
        fns = [_of_id(env_fn, prefix)] * n_envs
    elif callable(env_fn):
        fns = [env_fn] * n_envs
    elif isinstance(env_fn, Sequence) and all(callable(fn) for fn in env_fn):
        fns = [fn for fn in env_fn if callable(fn)]
    else:
        raise ConfigError(
            f"{prefix}env_fn must be a callable, an environment id or a list of callables, got {_describe(env_fn)}: "
            "pass the function that builds the environment, for example functools.partial(gym.make, 'CartPole-v1')"
        )
    if env_kwargs is None or are_arguments(env_kwargs):
        kwargs: list[Mapping[str, Any]] = [dict(env_kwargs or {})] * n_envs  # type: ignore[arg-type]
    elif isinstance(env_kwargs, Sequence) and all(map(are_arguments, env_kwargs)):
        kwargs = [dict(entry) for entry in env_kwargs]
    else:
        text = f"{prefix}env_kwargs must be a dict of arguments by name, or a list of such dicts"
        raise ConfigError(f"{text}, got {_describe(env_kwargs)}")
    for name, n_given, kind in (("env_fn", len(fns), "callables"), ("env_kwargs", len(kwargs), "dicts")):
        if n_given != n_envs:
            raise ConfigError(f"{prefix}{name} is a list of {n_given} {kind} for {n_envs} environments: give {n_envs}")
    distinct = {id(fn): fn for fn in fns}
    has_context = {key: _has_context(fn) for key, fn in distinct.items()}
    return tuple(EnvFactory(fn, kw, has_context=has_context[id(fn)]) for fn, kw in zip(fns, kwargs, strict=True))


def are_arguments(value: object) -> bool:
    """Whether these are arguments by name."""
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _of_id(env_id: str, prefix: str) -> Callable[..., Any]:
    module, _, name = env_id.rpartition(":")
    is_unknown = f"{prefix}env_fn={env_id!r} is not a registered environment id"
    try:
        if module:  # which registers the environment, as in `gym.make`
            importlib.import_module(module)
    except Exception as error:  # of the user's code, or since there is no such module
        raise ConfigError(f"{is_unknown}: the import of {module} raised {in_one_line(error)}") from error
    try:
        # With the spec, not the id: the workers do not know environments that the user's script registers.
        return partial(gym.make, gym.spec(name))
    except gym.error.Error as error:
        if (make := registered(name)) is not None:
            return make
        raise ConfigError(f"{is_unknown}: {error}{_atari_hint(error)}") from error


def _atari_hint(error: Exception) -> str:
    is_atari = isinstance(error, gym.error.UnregisteredEnv) and re.search(r"\bALE\b|NoFrameskip", str(error))
    return " Register the Atari games with `import ale_py`" if is_atari else ""


def build_example_env(factory: EnvFactory, *, batched: int = 0) -> Any:
    """Build the example environment, from which the main process reads the spaces.

    With `batched`, it is a `VectorEnv` of so many environments. Raises `ConfigError`, with the factory's exception as
    its cause.
    """
    try:
        env = factory.batched(batched) if batched else factory()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            "the main process could not build an example environment and read its spaces: "
            f"{in_one_line(error)}{_atari_hint(error)}"
        ) from error
    for name in () if isinstance(env, ParallelView) else ("observation_space", "action_space"):
        space = getattr(env, f"single_{name}" if batched else name, None)
        if not isinstance(space, gym.Space):
            env.close()
            raise ConfigError(f"the environment's {name} must be a gymnasium space, got {_describe(space)}")
    return env


def example_observations(factory: EnvFactory, n: int, *, batched: int = 0) -> list[Any]:
    """Up to `n` observations of the example environment with random actions; fewer if it raises: the workers will
    report that. Of batched ones, those of the first."""
    env, observations = build_example_env(factory, batched=batched), list[Any]()
    try:
        env.action_space.seed(0)
        observation, _ = env.reset(seed=0)
        while True:
            observations.append(snapshot(element(observation, 0) if batched else observation))
            if len(observations) == n:
                break
            observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if not batched and (terminated or truncated):
                observation, _ = env.reset()
    except Exception:
        pass
    finally:
        close_example_env(env)
    return observations


def close_example_env(env: Any) -> None:
    """Close the example environment. Raises `ConfigError`, with the environment's exception as its cause."""
    try:
        env.close()
    except Exception as error:
        raise ConfigError(f"closing the example environment in the main process raised {in_one_line(error)}") from error


def _describe(value: object) -> str:
    return f"{type(value).__name__} {brief(value)}"


# For whoever holds something for an environment, such as a game in a process of its own.
#: While a worker closes its environments: call it with the seconds that an end may take, before it begins. Else empty.
announce_end: list[Callable[[float], None]] = []
#: Entered while one environment is closed and built again, so that what both need may stay.
while_rebuilding: list[Callable[[], AbstractContextManager[None]]] = []


def rebuilding() -> ExitStack:
    """Inside, an environment is closed, and another one takes its place."""
    stack = ExitStack()
    for enter in while_rebuilding:
        stack.enter_context(enter())
    return stack
