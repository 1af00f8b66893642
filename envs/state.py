"""The state of an environment: saved and loaded, with a proof that a loaded copy continues as the original does."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from penstock.buffers import pickling
from penstock.buffers.reports import in_one_line
from penstock.envs.checks import reset_with
from penstock.envs.factory import EnvContext, EnvFn, env_factories
from penstock.envs.seats import ParallelView, TurnView, ended_agents, is_parallel, random_move, view_of
from penstock.errors import ConfigError, brief

#: How an environment is saved: by its own `get_state` and `set_state`, or as a whole, by pickle.
StateKind = Literal["get_state", "pickle"]

_N_CHECKED = 3  # how often a check saves the environment
_STEPS_AFTER_RESET = 10
_RESULTS = ("observation", "reward", "terminated", "truncated", "the list of agents")


def check_env_state(
    env_fn: EnvFn,
    env_kwargs: Mapping[str, Any] | None = None,
    *,
    n_steps: int = 100,
    seed: int = 0,
    num_envs: int | None = None,
) -> StateKind:
    """Prove that an environment continues exactly after it was saved and loaded, as `sampler.state_dict` needs it.

    The environment is saved at three points of its episodes. The copy and the original then get the same random
    actions, `n_steps` of them, and are reset without a seed. Observations, rewards, `terminated` and `truncated` must
    be equal all the time. A PettingZoo `ParallelEnv` is checked in the same way, with the dicts that it returns. With
    `num_envs`, `env_fn` makes a batched environment of so many rows, which is checked as a whole.

    Returns how it is saved: "get_state" if the environment, or one inside its wrappers, has the methods `get_state()`
    and `set_state(state)`; otherwise "pickle". The attributes of the wrappers around `get_state` are saved too.

    Raises `ConfigError` with the reason if the environment cannot be saved, or if the copy differs. An environment with
    an `EzPickle` base class is refused: its copy is a new environment, not one in the same state.
    """
    factory = replace(env_factories(env_fn, env_kwargs, 1)[0], as_seats=view_of)
    build = factory if num_envs is None else partial(factory.batched, num_envs)
    return check_resumable(build, EnvContext(0, -1, seed, None), n_steps, seed)


def check_resumable(
    build: Callable[[EnvContext], Any],
    context: EnvContext,
    n_steps: int = 100,
    seed: int = 0,
    on_step: Callable[[], object] = lambda: None,
) -> StateKind:
    """As `check_env_state`, for what `build` makes. Calls `on_step` after each step."""
    env = build(context)
    try:
        if isinstance(env, TurnView):
            raise ConfigError("a game in turns has decisions that are open between two batches: it cannot be saved")
        cls = _GamePlay if isinstance(env, ParallelView) else _BatchedPlay if isinstance(env, VectorEnv) else _Play
        play = cls(env, seed)
        play.reset(env, seed=seed)
        for _ in range(_N_CHECKED):
            for _ in range(1 + n_steps // _N_CHECKED):
                if play.is_over:
                    play.reset(env)
                play.step(env, play.drawn(env))
                on_step()
            if play.is_over:
                play.reset(env)
            kind, data = save_env(env)
            other = _new_copy(build, context, (env, kind, data), seed)
            try:
                _compare(env, other, play, n_steps, on_step)
            finally:
                other.close()
    finally:
        env.close()
    return kind


class _Play:
    """Steps an environment at random."""

    def __init__(self, env: Any, seed: int) -> None:
        self._actions = copy.deepcopy(env.action_space)
        self._actions.seed(seed)
        self.is_over = False  #: whether the last step has ended the episode

    def reset(self, env: Any, seed: int | None = None) -> Any:
        """A copy of the first observation."""
        self.is_over = False
        return copy.deepcopy(env.reset(seed=seed)[0])

    def drawn(self, env: Any) -> Any:
        """A random action."""
        return self._actions.sample()

    def step(self, env: Any, action: Any) -> Any:
        """Copies of what a step returns, without the infos."""
        result = copy.deepcopy(env.step(copy.deepcopy(action))[:4])
        self.is_over = bool(result[2] or result[3])
        return result


class _GamePlay(_Play):
    """The same for a `ParallelView`. Its agents act legally if there is an `action_mask`, and not after their end."""

    def __init__(self, env: ParallelView, seed: int) -> None:
        self._spaces, self.is_over = {agent: copy.deepcopy(pair[1]) for agent, pair in env.spaces.items()}, False
        for i, space in enumerate(self._spaces.values()):
            space.seed(seed + i)

    def reset(self, env: Any, seed: int | None = None) -> Any:
        observations, infos = env.reset(seed=seed)
        self.is_over, self._seen = False, (copy.deepcopy(observations), copy.deepcopy(infos))
        self._ended = set[Any]()  # who has ended, but is in `env.agents` still
        return self._seen[0]

    def _living(self, env: Any) -> list[Any]:
        return [agent for agent in env.agents if agent not in self._ended]

    def drawn(self, env: Any) -> Any:
        observations, infos = self._seen
        return {a: random_move(self._spaces[a], observations.get(a), infos.get(a)) for a in self._living(env)}

    def step(self, env: Any, action: Any) -> Any:
        *results, infos = copy.deepcopy(env.step(copy.deepcopy(action)))
        self._ended = ended_agents(self._ended, env.agents, *results[2:])
        self.is_over, self._seen = not self._living(env), (results[0], infos)
        return [*results, list(env.agents)]


class _BatchedPlay(_Play):
    """The same for a batched environment. It is over where rows wait for their reset."""

    def __init__(self, env: Any, seed: int) -> None:
        super().__init__(env, seed)
        self._over: Any = np.zeros(env.num_envs, np.bool_)
        self._waits = env.metadata.get("autoreset_mode") in (AutoresetMode.DISABLED, AutoresetMode.DISABLED.value)

    def reset(self, env: Any, seed: int | None = None) -> Any:
        self.is_over = False
        options = {"reset_mask": self._over.copy()} if self._over.any() else None
        result = reset_with(env, None, options) if seed is None else _seeded(env, seed)
        return copy.deepcopy(result[0])

    def step(self, env: Any, action: Any) -> Any:
        result = copy.deepcopy(env.step(copy.deepcopy(action))[:4])
        self._over = np.logical_or(result[2], result[3]) & self._waits
        self.is_over = bool(self._over.any())
        return result


def _seeded(env: Any, seed: int) -> Any:
    """`env.reset`. A batched environment may take one seed for each row, as a list or an array, or one number."""
    if isinstance(env, VectorEnv):
        seeds = [seed + b for b in range(env.num_envs)]
        for form in cast(Any, (seeds, np.array(seeds))):
            with suppress(Exception):  # each environment refuses it in its own way
                return env.reset(seed=form)
    return env.reset(seed=seed)


def _new_copy(build: Callable[[EnvContext], Any], context: EnvContext, saved: tuple[Any, Any, Any], seed: int) -> Any:
    original, kind, data = saved
    if kind == "pickle":
        return load_env(original, kind, data)
    env = build(context)
    try:
        _seeded(env, seed + 1)
        return load_env(env, kind, data)
    except BaseException:
        env.close()
        raise


def _compare(env: Any, other: Any, play: _Play, n_steps: int, on_step: Callable[[], object]) -> None:
    """Raise `ConfigError` unless both do the same."""
    for i in range(n_steps + _STEPS_AFTER_RESET):
        if play.is_over or i == n_steps:
            _check_same("the first observation of an episode", i, play.reset(env), play.reset(other))
        action = play.drawn(env)
        result, other_result = play.step(env, action), play.step(other, action)
        on_step()
        for name, ours, theirs in zip(_RESULTS, result, other_result, strict=False):
            _check_same(name, i, ours, theirs)


def _check_same(name: str, i: int, ours: object, theirs: object) -> None:
    if not is_same(ours, theirs):
        raise ConfigError(
            f"the environment does not continue alike after it was saved and loaded: {name} of step {i} after that is "
            f"{brief(theirs)}, without it {brief(ours)}"
        )


def is_same(one: Any, other: Any) -> bool:
    """Whether two observations or other values are equal, NaN included."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(is_same, one, other))
    arrays = np.asarray(one), np.asarray(other)
    is_float = arrays[0].dtype.kind in "fc"
    return arrays[0].dtype == arrays[1].dtype and np.array_equal(*arrays, equal_nan=is_float)


# ---- saving and loading ----------------------------------------------------------------------


def save_env(env: Any) -> tuple[StateKind, bytes]:
    """How `env` is saved, and its state: of a `ParallelView`, that of its environment. Raises `ConfigError` with the
    reason if that is impossible."""
    if isinstance(env, ParallelView):
        return save_env(env.env)
    layers = _layers(env)
    has_both = [
        all(callable(getattr(cls, f"{verb}_state", None)) for verb in ("get", "set")) for cls in map(type, layers)
    ]
    n_outside = has_both.index(True) if any(has_both) else None  # how many wrappers are around the outermost such layer
    try:
        if n_outside is None:
            return "pickle", _dumps(env, [])
        outside = [
            {name: value for name, value in vars(layer).items() if name != "env"} for layer in layers[:n_outside]
        ]
        return "get_state", _dumps((outside, layers[n_outside].get_state()), layers)
    except Exception as error:  # saving runs the user's code
        why = str(error) if isinstance(error, ConfigError) else f"{env} cannot be saved: {in_one_line(error)}"
        whom = env if isinstance(env, VectorEnv) else "it"
        raise ConfigError(f"{why}. Give {whom} get_state() and set_state(state)") from error


def load_env(env: Any, kind: str, data: bytes) -> Any:
    """The environment with the state `data`: a new one for "pickle"; for "get_state" `env`, which has been reset."""
    if isinstance(env, ParallelView):
        new = load_env(env.env, kind, data)
        return env if new is env.env else env.around(new)
    if kind == "pickle":
        return pickle.loads(data)
    layers = _layers(env)
    outside, state = _Unpickler(io.BytesIO(data), layers).load()
    for layer, attributes in zip(layers, outside, strict=False):
        vars(layer).update(attributes)
    layers[len(outside)].set_state(state)
    return env


def _layers(env: Any) -> list[Any]:
    """`env` and what it wraps, the outermost first."""
    layers = [env]
    while isinstance(layers[-1], gym.Wrapper | VectorWrapper) or (
        is_parallel(layers[-1]) and is_parallel(vars(layers[-1]).get("env"))
    ):
        layers.append(layers[-1].env)
    return layers


class _Pickler(pickling.Pickler):
    """Refuses objects with an `EzPickle` base class anywhere, and writes the index of a layer in its place."""

    def __init__(self, file: io.BytesIO, layers: list[Any]) -> None:
        super().__init__(file)
        self._index = {id(layer): i for i, layer in enumerate(layers)}

    def persistent_id(self, value: object) -> int | None:
        """The index of a layer."""
        return self._index.get(id(value))

    def reducer_override(self, value: object) -> Any:
        """How `value` is pickled."""
        if any(cls.__name__ == "EzPickle" for cls in type(value).__mro__):
            raise ConfigError(
                f"{type(value).__name__} is an EzPickle: pickle makes a new environment of it, and loses its state"
            )
        return super().reducer_override(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, layers: list[Any]) -> None:
        super().__init__(file)
        self._layers = layers

    def persistent_load(self, pid: int) -> Any:
        """The layer of this index."""
        return self._layers[pid]


def _dumps(value: object, layers: list[Any]) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, layers).dump(value)
    return stream.getvalue()
