"""check_env_state: which environments can be saved, and which only look as if they could."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils import EzPickle
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import FrameStackObservation, TimeLimit

from penstock.envs import BatchedCartPole, CountingEnv, NestedEnv, check_env_state
from penstock.envs.state import load_env, save_env
from penstock.errors import ConfigError


class Walk(gym.Env[Any, Any]):
    """A random walk, whose episodes end at 3."""

    observation_space = gym.spaces.Box(-100, 100, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x = self.np_random.normal(size=1)
        return self.x.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.x = self.x + action + self.np_random.normal(size=1)
        return self.x.copy(), float(self.x[0]), bool(abs(self.x[0]) > 3), False, {}


class Saving(Walk):
    """Cannot be pickled, but has get_state and set_state."""

    def __init__(self) -> None:
        self.handle = (i for i in range(3))

    def get_state(self) -> Any:
        return self.x.copy(), self.np_random.bit_generator.state

    def set_state(self, state: Any) -> None:
        self.x, self.np_random.bit_generator.state = state[0].copy(), state[1]


class Rebuilt(Walk, EzPickle):
    def __init__(self) -> None:
        EzPickle.__init__(self)


class Holds(Walk):
    """Its simulator, not the environment itself, is an EzPickle."""

    def __init__(self) -> None:
        self.simulator = Rebuilt()


class ForgetsTheStream(Saving):
    """The copy differs from the next random number on."""

    def set_state(self, state: Any) -> None:
        self.x = state[0].copy()


class DiffersAfterReset(Walk):
    """Only the episodes after the next reset differ."""

    def __getstate__(self) -> Any:
        return {**vars(self), "shift": 1.0}

    def reset(self, **kwargs: Any) -> Any:
        observation, info = super().reset(**kwargs)
        self.x = observation + getattr(self, "shift", 0.0)
        return self.x.copy(), info

    def step(self, action: Any) -> Any:
        return (*super().step(action)[:2], False, False, {})


@pytest.mark.parametrize(
    ("env_fn", "kind"),
    [
        ("CartPole-v1", "pickle"),
        ("FrozenLake-v1", "pickle"),
        ("Blackjack-v1", "pickle"),
        (CountingEnv, "pickle"),
        (NestedEnv, "pickle"),
        (Walk, "pickle"),
        (Saving, "get_state"),
        (lambda: FrameStackObservation(TimeLimit(Saving(), 7), 3), "get_state"),
        (lambda: FrameStackObservation(TimeLimit(Walk(), 7), 3), "pickle"),
    ],
)
def test_environments_that_continue_alike(env_fn: Any, kind: str) -> None:
    assert check_env_state(env_fn, n_steps=50) == kind


@pytest.mark.parametrize(
    ("env_fn", "message"),
    [
        (Rebuilt, "Rebuilt is an EzPickle: .* Give it get_state"),
        (lambda: TimeLimit(Rebuilt(), 5), "Rebuilt is an EzPickle"),
        (Holds, "Rebuilt is an EzPickle"),
        (ForgetsTheStream, "does not continue alike .* observation of step 0 after that is"),
        (DiffersAfterReset, "the first observation of an episode of step 50 after that is"),
    ],
)
def test_environments_that_do_not(env_fn: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_env_state(env_fn, n_steps=50)


class ForgetsResets(SyncVectorEnv):
    """Its copy does not know which rows the next step resets."""

    def __getstate__(self) -> Any:
        return {**vars(self), "_autoreset_envs": np.zeros(self.num_envs, np.bool_)}


@pytest.mark.parametrize("mode", AutoresetMode)
def test_batched_environments_are_checked_as_a_whole(mode: AutoresetMode) -> None:
    def synced(cls: Any, num_envs: int, env_fn: Any = Walk) -> Any:
        return cls([env_fn] * num_envs, autoreset_mode=mode, copy=False)

    assert check_env_state(partial(synced, SyncVectorEnv), num_envs=3) == "pickle"
    with pytest.raises(ConfigError, match=r"Rebuilt is an EzPickle.*Give SyncVectorEnv\(num_envs=3\) get_state\(\)"):
        check_env_state(partial(synced, SyncVectorEnv, env_fn=Rebuilt), num_envs=3)
    if mode is AutoresetMode.NEXT_STEP:
        with pytest.raises(ConfigError, match="does not continue alike"):
            check_env_state(partial(synced, ForgetsResets), num_envs=30)


@pytest.mark.parametrize("env_fn", [BatchedCartPole, "CartPole-v1"])
def test_batched_environments_take_seeds_in_their_own_way(env_fn: Any) -> None:
    assert check_env_state(env_fn, num_envs=3) == "pickle"


def test_an_environment_that_cannot_be_pickled_is_named() -> None:
    class Unpicklable(Walk):
        def __init__(self) -> None:
            self.handle = (i for i in range(3))

    with pytest.raises(ConfigError, match=r"Unpicklable.* cannot be saved: TypeError"):
        check_env_state(Unpicklable)


def test_wrappers_around_get_state_keep_their_attributes() -> None:
    env, other = (TimeLimit(Saving(), 7) for _ in range(2))
    env.reset(seed=0)
    for _ in range(5):
        env.step(0)
    kind, data = save_env(env)
    other.reset(seed=1)
    assert load_env(other, kind, data) is other
    assert [other.step(0)[3] for _ in range(2)] == [False, True], "5 of 7 steps were done"
    assert other.env is not env.env
