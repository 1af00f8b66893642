"""Environments that write in place, and wrappers whose functions are left out: ShmVectorEnv equals SyncVectorEnv."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from penstock.envs import NestedEnv

from ..scale import quick_first
from .vector_support import compare, pair

modes = pytest.mark.parametrize(
    "mode",
    quick_first(sorted(AutoresetMode, key=lambda mode: mode is not AutoresetMode.SAME_STEP)),
    ids=lambda mode: mode.name,
)


class Frames(gym.Env[Any, Any]):
    """Random frames. Counts its calls of `step_into`."""

    observation_space, action_space = spaces.Box(0, 255, (8, 8, 2), np.uint8), spaces.Discrete(3)
    n_calls = 0

    def _observe(self) -> Any:
        return self.np_random.integers(0, 255, (8, 8, 2)).astype(np.uint8)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 6))
        return self._observe(), {"left": self.left}

    def _advance(self) -> Any:
        self.left -= 1
        return float(self.left), self.left == 0, self.left == 2, {"left": self.left} if self.left % 2 else {}

    def step(self, action: Any) -> Any:
        return self._observe(), *self._advance()

    def step_into(self, out: Any, action: Any) -> Any:
        self.n_calls += 1
        out[...] = self._observe()
        return self._advance()


class Nested(NestedEnv):
    """Dicts and tuples of arrays."""

    n_calls = 0

    def step(self, action: Any) -> Any:
        return super().step(action)

    def step_into(self, out: Any, action: Any) -> Any:
        self.n_calls += 1
        observation, *rest = super().step(action)
        out["position"][...], out["camera"][...] = observation["position"], observation["camera"]
        out["goal"][0][...], out["goal"][1][...] = observation["goal"]
        return tuple(rest)


def step_or_send(envs: Any, action: Any, t: int) -> Any:
    if t % 3:
        return envs.step(action)
    envs.send(action)
    *results, infos = envs.recv(min_ready=3)
    infos.pop("env_id")
    return (*results, infos)


@modes
@pytest.mark.parametrize("env_cls", quick_first([Nested, Frames]), ids=lambda cls: cls.__name__)
def test_results_are_those_of_step(mode: AutoresetMode, env_cls: Any) -> None:
    ours, theirs = pair([env_cls] * 3, mode, n_workers=2)
    with ours:
        compare(ours, theirs, 30, step=step_or_send)
        assert min(ours.get_attr("n_calls")) > 0


@pytest.mark.slow
@modes
@pytest.mark.parametrize("flatten_wrappers", [True, False])
def test_wrappers_without_their_functions_give_the_same(mode: AutoresetMode, flatten_wrappers: bool) -> None:
    env_fns = [partial(gym.make, "CartPole-v1", max_episode_steps=9)] * 2
    ours, theirs = pair(env_fns, mode, n_workers=1, flatten_wrappers=flatten_wrappers)
    with ours:
        compare(ours, theirs, 40)
        for name in ("_elapsed_steps", "_has_reset"):
            assert ours.get_attr(name) == theirs.get_attr(name)
