"""Environments that write in place, and wrappers whose functions are left out: ShmVectorEnv equals SyncVectorEnv."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from penstock import WorkerError
from penstock.envs import NestedEnv
from penstock.vector import ShmVectorEnv

from ..scale import quick_first
from ..support import assert_same

modes = pytest.mark.parametrize(
    "mode",
    quick_first(sorted(AutoresetMode, key=lambda mode: mode is not AutoresetMode.SAME_STEP)),
    ids=lambda mode: mode.name,
)


class Frames(gym.Env[Any, Any]):
    """Random frames. Counts its calls of `step_into`."""

    space: spaces.Space[Any] = spaces.Box(0, 255, (8, 8, 2), np.uint8)

    def __init__(self) -> None:
        self.observation_space, self.action_space = self.space, spaces.Discrete(3)
        self.n_calls = 0

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


class Number(Frames):
    """A number in place of the frame."""

    space = spaces.Discrete(9)

    def _observe(self) -> Any:
        return int(self.np_random.integers(9))


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


@modes
@pytest.mark.parametrize("env_cls", quick_first([Nested, Frames, Number]), ids=lambda cls: cls.__name__)
def test_results_are_those_of_step(mode: AutoresetMode, env_cls: Any) -> None:
    theirs = SyncVectorEnv([env_cls] * 3, autoreset_mode=mode)
    theirs.action_space.seed(1)
    with ShmVectorEnv([env_cls] * 3, n_workers=2, autoreset_mode=mode) as ours:
        assert_same(ours.reset(seed=5), theirs.reset(seed=5))
        for t in range(30):
            action = theirs.action_space.sample()
            wanted = theirs.step(action)
            if t % 3:
                assert_same(ours.step(action), wanted, f"step {t}")
            else:
                ours.send(action)
                *results, infos = ours.recv(min_ready=3)
                infos.pop("env_id")
                assert_same((*results, infos), wanted, f"step {t}")
            ended = wanted[2] | wanted[3]
            if mode is AutoresetMode.DISABLED and ended.any():
                options = {"reset_mask": ended}
                assert_same(ours.reset(options=dict(options)), theirs.reset(options=dict(options)), f"reset {t}")
        assert min(ours.get_attr("n_calls")) > 0


class Wrong(Frames):
    """Returns five values."""

    def step_into(self, out: Any, action: Any) -> Any:
        return self.step(action)


def test_a_wrong_result_is_an_error_that_names_the_environment() -> None:
    with ShmVectorEnv([Frames, Wrong], n_workers=1) as envs:
        envs.reset(seed=0)
        with pytest.raises(WorkerError, match="step_into of env_rank 1 must return four values"):
            envs.step(np.zeros(2, np.int64))


@pytest.mark.slow
@modes
def test_wrappers_without_their_functions_give_the_same(mode: AutoresetMode) -> None:
    env_fns = [partial(gym.make, "CartPole-v1", max_episode_steps=9)] * 2
    results = []
    for flatten_wrappers in (True, False):
        with ShmVectorEnv(env_fns, n_workers=1, autoreset_mode=mode, flatten_wrappers=flatten_wrappers) as envs:
            found = [envs.reset(seed=3)]
            for t in range(40):
                found.append(envs.step(np.array([t % 2, 1 - t % 2])))
                ended = found[-1][2] | found[-1][3]
                if mode is AutoresetMode.DISABLED and ended.any():
                    found.append(envs.reset(options={"reset_mask": ended}))
            found.append((envs.get_attr("_elapsed_steps"), envs.get_attr("_has_reset")))
            results.append(found)
    for t, (one, other) in enumerate(zip(*results, strict=True)):
        assert_same(one, other, f"call {t}")
