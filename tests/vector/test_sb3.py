"""ShmVectorEnv as a Stable-Baselines3 VecEnv: value for value what its own DummyVecEnv gives."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from penstock import ConfigError
from penstock.envs import CountingEnv
from penstock.vector import ShmVectorEnv

sb3 = pytest.importorskip("stable_baselines3")

from stable_baselines3.common.monitor import Monitor  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor  # noqa: E402

from .vector_support import assert_same  # noqa: E402


def ours(fns: Any, **kwargs: Any) -> Any:
    return ShmVectorEnv(fns, in_series=2, autoreset_mode="SAME_STEP", **kwargs).to_sb3()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_the_same_as_a_dummy_vec_env(env_id: str) -> None:
    def make() -> Any:
        return Monitor(gym.make(env_id, max_episode_steps=15))

    mine, theirs = ours([make] * 3), DummyVecEnv([make] * 3)
    for envs in (mine, theirs):
        envs.seed(4)
        envs.action_space.seed(0)
    np.testing.assert_array_equal(mine.reset(), theirs.reset())
    for t in range(50):
        actions = np.stack([theirs.action_space.sample() for _ in range(3)])
        (*got, infos), (*wanted, expected) = mine.step(actions), theirs.step(actions)
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=str(t))
        assert got[1].dtype == np.float32
        for info, other in zip(infos, expected, strict=True):
            assert_same(info.get("terminal_observation"), other.get("terminal_observation"))
            # What DummyVecEnv says of every step, this one says where an episode ended.
            assert info.get("TimeLimit.truncated", False) == other["TimeLimit.truncated"]
            assert ("episode" in info) == ("episode" in other)
            if "episode" in info:
                assert (info["episode"]["r"], info["episode"]["l"]) == (other["episode"]["r"], other["episode"]["l"])
    mine.close()
    theirs.close()


def test_the_rest_of_the_interface() -> None:
    envs = ours([partial(CountingEnv, length=3)] * 4)
    assert envs.get_attr("length") == [3] * 4
    envs.set_attr("length", 4, [2, 0])
    assert envs.get_attr("length", [0, 1, 2]) == [4, 3, 4]
    assert [seed[1] for seed in envs.env_method("reset", indices=[3, 1])] == [{}, {}]
    assert envs.env_is_wrapped(Monitor) == [False] * 4
    assert envs.env_is_wrapped(gym.Wrapper, 1) == [False]
    envs.set_options({"x": 1})
    envs.reset()
    monitored = VecMonitor(envs)
    monitored.set_options()
    monitored.reset()
    for _ in range(3):
        *_, infos = monitored.step(np.zeros(4, int))
    assert ["episode" in info for info in infos] == [False, True, False, True]
    monitored.close()


def test_ppo_learns_on_it() -> None:
    envs = ours([partial(gym.make, "CartPole-v1")] * 4)
    model = sb3.PPO("MlpPolicy", envs, n_steps=32, batch_size=64, n_epochs=2, seed=0, device="cpu")
    model.learn(256)
    assert model.num_timesteps == 256
    envs.close()


def test_another_mode_is_refused() -> None:
    with ShmVectorEnv([CountingEnv]) as envs, pytest.raises(ConfigError, match='autoreset_mode="SAME_STEP"'):
        envs.to_sb3()
