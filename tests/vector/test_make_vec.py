"""make_vec, by itself and as the entry point of a registered environment."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.wrappers import TimeAwareObservation, TransformReward

from penstock import ConfigError
from penstock.vector import ShmVectorEnv, make_vec

from ..support import assert_same


def test_arguments_go_where_they_belong() -> None:
    wrappers: Any = [TimeAwareObservation, partial(TransformReward, func=lambda reward: 2 * reward)]
    with make_vec("CartPole-v1", 3, wrappers, n_workers=2, sutton_barto_reward=True, max_episode_steps=7) as envs:
        assert len(envs.worker_pids) == 2
        assert envs.observation_space.shape == (3, 5)
        envs.reset(seed=0)
        assert envs.step([0, 1, 0])[1].tolist() == [0, 0, 0]
        assert envs.spec is not None
        assert envs.spec.max_episode_steps == 7


def test_as_the_entry_point_of_a_registered_environment() -> None:
    gym.register("tests/Shm-v1", vector_entry_point="penstock.vector:make_vec", kwargs={"id": "CartPole-v1"})
    try:
        envs: Any = gym.make_vec("tests/Shm-v1", 2, vectorization_mode="vector_entry_point", autoreset_mode="SAME_STEP")
        theirs = gym.make_vec("CartPole-v1", 2, vectorization_mode="sync")
        assert isinstance(envs, ShmVectorEnv)
        assert_same(envs.reset(seed=3), theirs.reset(seed=3))
        envs.close()
    finally:
        del gym.registry["tests/Shm-v1"]


def test_what_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="id='Nothing-v7' is not a registered environment id"):
        make_vec("Nothing-v7", 2)
    with pytest.raises(ConfigError, match="n_worker"):  # it is given to the environment
        make_vec("CartPole-v1", 2, n_worker=2)
