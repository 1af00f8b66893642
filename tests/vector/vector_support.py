"""What the tests of the vector environment share: environments that tell all of themselves, and comparison."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from penstock.envs import CountingEnv, NestedEnv
from penstock.vector import ShmVectorEnv

from ..envs.space_strategies import sample
from ..support import assert_same

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here

MODES = list(AutoresetMode)
modes = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)


# ---- comparison ----------------------------------------------------------------------------


def synced(env_fn: Any, num_envs: int, mode: AutoresetMode = AutoresetMode.SAME_STEP) -> Any:
    """One batched environment."""
    return SyncVectorEnv([env_fn] * num_envs, autoreset_mode=mode)


counting = partial(synced, CountingEnv)


def pair(env_fns: list[Any], mode: AutoresetMode, **kwargs: Any) -> tuple[ShmVectorEnv, Any]:
    return ShmVectorEnv(env_fns, autoreset_mode=mode, **kwargs), SyncVectorEnv(env_fns, autoreset_mode=mode)


def compare(
    ours: Any,
    theirs: Any,
    n_steps: int,
    *,
    seed: Any = 5,
    their_seed: Any = None,
    options: Any = None,
    part: Callable[[Any], Any] = tuple,
    step: Callable[[Any, Any, int], Any] = lambda envs, action, t: envs.step(action),
) -> int:
    """Both return the same, as far as `part` shows it. Returns how many episodes ended. `step` is our way to step."""

    def assert_same_reset(where: str, seeds: tuple[Any, Any], options: Any) -> None:
        results = (
            envs.reset(seed=own, options=None if options is None else dict(options))
            for envs, own in zip((ours, theirs), seeds, strict=True)
        )
        assert_same(*map(part, results), where)

    assert_same_reset("reset", (seed, seed if their_seed is None else their_seed), options)
    theirs.action_space.seed(1)
    n_ends = 0
    for t in range(n_steps):
        action = theirs.action_space.sample()
        got, wanted = step(ours, action, t), theirs.step(action)
        assert_same(part(got), part(wanted), f"step {t}")
        ended = wanted[2] | wanted[3]
        n_ends += int(ended.sum())
        if ours.metadata["autoreset_mode"] is AutoresetMode.DISABLED and ended.any():
            assert_same_reset(f"reset {t}", (None, None), {"reset_mask": ended.copy()})
    return n_ends


def step_or_send(envs: Any, action: Any, t: int) -> Any:
    """A step, which every third time is a `send` to all and a `recv`."""
    if t % 3:
        return envs.step(action)
    envs.send(action)
    *results, infos = envs.recv(min_ready=envs.num_envs)
    infos.pop("env_id")
    return (*results, infos)


# ---- environments --------------------------------------------------------------------------


def talkative(observation_space: Any, action_space: Any) -> partial[Talkative]:
    """Builds one."""
    return partial(Talkative, observation_space, action_space, sample(copy.deepcopy(observation_space), 17, seed=3))


class Talkative(gym.Env[Any, Any]):
    """Observations are elements of the space; episodes of uneven length, infos of every kind, drawn from the seed."""

    def __init__(self, observation_space: Any, action_space: Any, elements: Any) -> None:
        self.observation_space, self.action_space = copy.deepcopy((observation_space, action_space))
        self.elements = elements

    def _observe(self) -> Any:
        return self.elements[int(self.np_random.integers(len(self.elements)))]

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.age, self.length = 0, int(self.np_random.integers(1, 5))
        return self._observe(), {"length": self.length, "options": str(options)}

    def step(self, action: Any) -> Any:
        flat = np.nan_to_num(spaces.flatten(self.action_space, action)).astype(np.float64)
        self.age += 1
        over, kind = self.age >= self.length, int(self.np_random.integers(3))
        info: dict[str, Any] = {}
        if kind:
            info = {"age": self.age, "nested": {"x": float(kind), "list": [1, "two"]}, "array": np.arange(3) + kind}
        return (
            self._observe(),
            float(np.arange(1, 1 + flat.size) @ flat.ravel()),
            over and kind < 2,
            over and kind > 0,
            info,
        )


class Waiting(CountingEnv):
    """A step whose action is 2 waits until somebody writes to the pipe."""

    def __init__(self, pipe: Path) -> None:
        super().__init__(length=100)
        self.pipe = pipe

    def step(self, action: Any) -> Any:
        if action == 2:
            with self.pipe.open("rb") as pipe:
                pipe.read(1)
        return super().step(action)


def let_go(pipe: Path) -> None:
    with pipe.open("wb") as file:
        file.write(b"x")


class Pictured(CountingEnv):
    """Shows a picture of one colour, its level."""

    metadata: ClassVar[Any] = {"render_modes": ["rgb_array"], "colour": "grey"}

    def __init__(self, level: int = 0, shape: tuple[int, ...] = (4, 6, 3), render_mode: str = "rgb_array") -> None:
        super().__init__()
        self.level, self.shape, self.render_mode = level, shape, render_mode

    def raise_level(self, by: int, *, factor: int = 1) -> int:
        if by < 0:
            raise ValueError("never down")
        self.level += by * factor
        return self.level

    def render(self) -> Any:
        return np.full(self.shape, self.level, np.uint8)


class OnlySeed(CountingEnv):
    """Its `reset` knows no options, as in many environments that people write."""

    told: ClassVar[dict[str, Any]] = {"lives": 1, "action_mask": np.ones(3, np.int8)}

    def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
        return super().reset(seed=seed)[0], self.told

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], self.told


class NestedInPlace(NestedEnv):
    """Writes dicts and tuples of arrays in place, and counts how often."""

    n_calls = 0

    def step(self, action: Any) -> Any:
        return super().step(action)

    def step_into(self, out: Any, action: Any) -> Any:
        self.n_calls += 1
        observation, *rest = super().step(action)
        out["position"][...], out["camera"][...] = observation["position"], observation["camera"]
        out["goal"][0][...], out["goal"][1][...] = observation["goal"]
        return tuple(rest)
