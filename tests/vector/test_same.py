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
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st

from penstock.envs import CountingEnv, NestedEnv, independent_seeds
from penstock.vector import ShmVectorEnv

from ..envs.space_strategies import any_space
from ..scale import START_METHODS, examples, pairs, scaled
from .vector_support import MODES, NestedInPlace, compare, modes, pair, step_or_send, talkative

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


# ---- `final_obs` under SAME_STEP: the same value, type and dtype --------------------------------

BOX, DISCRETE = spaces.Box(-9, 9, (2,), np.float32), spaces.Discrete(5)


class Returning(gym.Env[Any, Any]):
    """Episodes of one step, which ends with `last`."""

    action_space = spaces.Discrete(2)

    def __init__(self, observation_space: Any, last: Any) -> None:
        self.observation_space, self.last = observation_space, last

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.last, {}

    def step(self, action: Any) -> Any:
        return self.last, 1.0, True, False, {}


@pytest.mark.parametrize(
    ("space", "last"),
    [
        (BOX, np.ones(2, np.float32)),
        (BOX, np.full(2, 0.1)),
        (BOX, [0.5, 1]),
        (DISCRETE, 2),
        (DISCRETE, np.int64(2)),
        (spaces.Box(-1, 1, ()), np.array(0.5, np.float32)),
        (spaces.Dict(a=BOX, b=DISCRETE), {"a": np.ones(2, np.float32), "b": np.int64(1)}),
        (spaces.Dict(a=BOX, b=DISCRETE), {"a": np.ones(2, np.float32), "b": 1}),
        (spaces.Tuple([BOX, DISCRETE]), (np.ones(2, np.float32), np.int64(1))),
        (spaces.Tuple([BOX, DISCRETE]), [np.ones(2, np.float32), np.int64(1)]),
    ],
)
def test_it_is_what_the_environment_returned(space: Any, last: Any) -> None:
    fns = [partial(Returning, space, last)] * 2
    theirs = SyncVectorEnv(fns, autoreset_mode="SameStep")
    theirs.reset()
    for in_series in (1, 2):
        with ShmVectorEnv(fns, in_series, autoreset_mode="SAME_STEP") as envs:
            envs.reset()
            got, wanted = envs.step([0, 0])[4]["final_obs"], theirs.step([0, 0])[4]["final_obs"]
        for one, other in zip(got, wanted, strict=True):
            assert type(one) is type(other)
            assert data_equivalence(one, other)


# ---- environments that write in place, and wrappers whose functions are left out ----------------

same_step_first = pytest.mark.parametrize(
    "mode", sorted(AutoresetMode, key=lambda mode: mode is not AutoresetMode.SAME_STEP), ids=lambda mode: mode.name
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


@same_step_first
@pytest.mark.parametrize("env_cls", [NestedInPlace, Frames], ids=lambda cls: cls.__name__)
def test_results_are_those_of_step(mode: AutoresetMode, env_cls: Any) -> None:
    ours, theirs = pair([env_cls] * 3, mode, n_workers=2)
    with ours:
        compare(ours, theirs, 30, step=step_or_send)
        assert min(ours.get_attr("n_calls")) > 0


@pytest.mark.slow
@same_step_first
@pytest.mark.parametrize("flatten_wrappers", [True, False])
def test_wrappers_without_their_functions_give_the_same(mode: AutoresetMode, flatten_wrappers: bool) -> None:
    env_fns = [partial(gym.make, "CartPole-v1", max_episode_steps=9)] * 2
    ours, theirs = pair(env_fns, mode, n_workers=1, flatten_wrappers=flatten_wrappers)
    with ours:
        compare(ours, theirs, 40)
        for name in ("_elapsed_steps", "_has_reset"):
            assert ours.get_attr(name) == theirs.get_attr(name)


@pytest.mark.parametrize("cls", [SyncVectorEnv, ShmVectorEnv])
def test_independent_seeds_give_each_run_its_own_environments(cls: Any) -> None:
    """A number gives runs with neighbouring seeds 3 of 4 equal environments."""
    for seeds, n_shared in ((lambda run: run, 3), (partial(independent_seeds, n=4), 0)):
        envs = cls([partial(gym.make, "CartPole-v1")] * 4)
        first, second = ({tuple(row) for row in envs.reset(seed=seeds(run))[0].tolist()} for run in (0, 1))
        assert len(first & second) == n_shared
        envs.close()
