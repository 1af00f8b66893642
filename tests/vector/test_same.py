"""ShmVectorEnv does what Gymnasium's SyncVectorEnv does, value for value."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from hypothesis import given
from hypothesis import strategies as st

from penstock.envs import CountingEnv, NestedEnv
from penstock.vector import ShmVectorEnv

from ..envs.space_strategies import any_space
from ..scale import START_METHODS, examples, pairs, scaled
from .vector_support import MODES, compare, modes, pair, talkative

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("mode", "in_series"), pairs(MODES, [1, 2, 5]))
def test_talkative_environments(mode: AutoresetMode, in_series: int) -> None:
    fns = [talkative(spaces.Box(-1, 1, (3,), np.float64), spaces.Discrete(3, start=-1))] * 5
    ours, theirs = pair(fns, mode, in_series=in_series)
    with ours:
        assert len(set(ours.apply(_pid))) == -(-5 // in_series)
        compare(ours, theirs, 40)
        compare(ours, theirs, 10, seed=[3, 9, 1, 2**70, 0])
        compare(ours, theirs, 10, seed=7, options={"level": 3})


def _pid(env: Any) -> int:
    return os.getpid()


NEWEST_TAXI = next(name for name in ("Taxi-v4", "Taxi-v3") if name in gym.registry)


@pytest.mark.parametrize(("mode", "env_id"), pairs(MODES, ["CartPole-v1", "Pendulum-v1", "Blackjack-v1", NEWEST_TAXI]))
def test_gymnasiums_own(mode: AutoresetMode, env_id: str) -> None:
    ours, theirs = pair([partial(gym.make, env_id, max_episode_steps=20)] * 3, mode, n_workers=2)
    with ours:
        compare(ours, theirs, 60)
        assert ours.spec is not None
        assert ours.spec.id == env_id
        assert ours.metadata["autoreset_mode"] is mode
        assert ours.observation_space == theirs.observation_space
        assert ours.action_space == theirs.action_space
        assert ours.single_action_space == theirs.single_action_space


@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_every_start_method(context: str) -> None:
    ours, theirs = pair([NestedEnv] * 3, AutoresetMode.SAME_STEP, in_series=2, context=context)
    with ours:
        compare(ours, theirs, 20)


@examples(5, 30)
@given(observation_space=any_space, action_space=any_space, mode=st.sampled_from(MODES))
def test_any_space(observation_space: Any, action_space: Any, mode: AutoresetMode) -> None:
    ours, theirs = pair([talkative(observation_space, action_space)] * 3, mode, in_series=2)
    with ours:
        compare(ours, theirs, 6)


@modes
def test_what_is_returned_is_the_callers_own(mode: AutoresetMode) -> None:
    with ShmVectorEnv([partial(CountingEnv, length=3)] * 2, autoreset_mode=mode) as envs:
        first, _ = envs.reset()
        kept = first.copy()
        observation, reward, terminated, truncated, _ = envs.step(np.zeros(2, int))
        envs.step(np.zeros(2, int))
        np.testing.assert_array_equal(first, kept)
        np.testing.assert_array_equal(observation[:, 1], [1, 1])
        np.testing.assert_array_equal(reward, [1, 1])
        assert not terminated.any()
        assert not truncated.any()


def test_without_copies_observations_are_views_of_the_shared_memory() -> None:
    with ShmVectorEnv([CountingEnv] * 2, copy=False) as envs:
        observation, _ = envs.reset()
        for t in range(1, 4):
            later = envs.step(np.zeros(2, int))[0]
            assert np.shares_memory(observation, later)
            np.testing.assert_array_equal(observation[:, 1], [t, t])


class Draws(gym.Env[Any, Any]):
    """Observes two numbers of numpy's global generator."""

    observation_space, action_space = spaces.Box(0, 1, (2,), np.float64), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.random.rand(2), {}

    def step(self, action: Any) -> Any:
        return np.random.rand(2), 0.0, False, False, {}


@pytest.mark.parametrize("context", scaled(START_METHODS, ("forkserver", "fork")))
def test_workers_draw_other_numbers_from_global_generators_and_with_a_seed_the_same_again(context: Any) -> None:
    def seeded(envs: ShmVectorEnv, seed: int) -> Any:
        return np.stack([envs.reset(seed=seed)[0], envs.step(np.zeros(4, int))[0]])

    with ShmVectorEnv([Draws] * 4, in_series=2, context=context, on_worker_failure="restart") as envs:
        unseeded = envs.reset()[0]
        found = seeded(envs, 5)
        np.testing.assert_array_equal(found, seeded(envs, 5))
        os.kill(envs.worker_pids[1], signal.SIGKILL)
        envs.step(np.zeros(4, int))  # is truncated in the new worker
        others = np.stack([seeded(envs, 6), [envs.step(np.zeros(4, int))[0] for _ in range(2)]])
    with ShmVectorEnv([Draws] * 4, in_series=2, context=context) as envs:
        numbers = np.concatenate([unseeded.ravel(), found.ravel(), others.ravel(), envs.reset()[0].ravel()])
        assert len(np.unique(numbers)) == len(numbers)
        np.testing.assert_array_equal(found, seeded(envs, 5))
