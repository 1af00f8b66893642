"""The arguments of ShmVectorEnv and of make_vec: AsyncVectorEnv's, ids, misspelt names; and what check_finite names."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv
from gymnasium.wrappers import TimeAwareObservation, TransformReward

from penstock import ConfigError, SpaceError, WorkerError
from penstock.envs import CountingEnv
from penstock.vector import ShmVectorEnv, make_vec

from ..support import assert_same
from .vector_support import counting


@pytest.mark.parametrize("cls", [AsyncVectorEnv, ShmVectorEnv])
def test_a_line_that_gives_all_defaults_of_async_runs(cls: Any) -> None:
    with_defaults = {"shared_memory": True, "copy": True, "context": None, "daemon": True, "observation_mode": "same"}
    envs = cls([CountingEnv] * 2, **with_defaults)
    assert envs.reset()[0].tolist() == [[0, 0], [0, 0]]
    envs.close()


UNKNOWN = "^ShmVectorEnv has no argument "
SPACES = CountingEnv().observation_space, CountingEnv().action_space
BATCHED = {"env_fns": counting, "num_envs": 2}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        # Arguments of AsyncVectorEnv, with the reason.
        ({"shared_memory": False}, "shared_memory must be .*results are always in shared memory"),
        ({"daemon": False}, "daemon must be .*workers always exit with the main process"),
        ({"observation_mode": "different"}, "observation_mode must be .*all environments must have the same spaces"),
        ({"observation_mode": SPACES[:1] * 2}, "observation_mode must be .*all environments must have the same spaces"),
        ({"in_series": True}, r"in_series must be an integer, got True: .*AsyncVectorEnv is shared_memory"),
        # Unknown arguments, with the nearest.
        ({"in_serie": 2}, f"{UNKNOWN}'in_serie': did you mean 'in_series'"),
        ({"num_workers": 2}, f"{UNKNOWN}'num_workers': did you mean 'n_workers'"),
        ({"step_timeouts": 2}, f"{UNKNOWN}'step_timeouts': did you mean 'step_timeout'"),
        ({"worker": 2}, f"{UNKNOWN}'worker': change what an environment does with a wrapper"),
        ({"max_concurrency": 2}, f"{UNKNOWN}'max_concurrency': n_workers is the number of environments that step at o"),
        ({"zzz": 2}, rf"{UNKNOWN}'zzz'; it has \w+, .* 19 others: see help\(ShmVectorEnv\)$"),
        # Values.
        ({"env_fns": []}, "env_fns must be a list of callables"),
        ({"env_fns": "CartPole-v1"}, "env_fns must be a list of callables"),
        ({"env_fns": [1]}, "callable"),
        ({"env_fns": CountingEnv}, "env_fns must be a list of callables"),
        ({"env_fns": [lambda: 3]}, "the environment function must return a gymnasium.Env, got builtins.int"),
        ({"env_fns": ["Nothing-v9"]}, r"env_fns\[0\]='Nothing-v9' is not a registered environment id"),
        ({"in_series": 0}, "in_series must be an integer of at least 1"),
        ({"n_workers": 0}, "n_workers must be an integer of at least 1"),
        ({"in_series": 2, "n_workers": 2}, "leave one out"),
        ({"context": "thread"}, "context must be one of fork, forkserver, spawn"),
        ({"autoreset_mode": "sometimes"}, "autoreset_mode must be one of NEXT_STEP, SAME_STEP, DISABLED"),
        ({"on_worker_failure": "shrug"}, "on_worker_failure must be one of raise, restart"),
        ({"step_timeout": 0}, "step_timeout must be a positive number of seconds"),
        ({"start_timeout": "x"}, "start_timeout must be a positive number of seconds"),
        ({"affinity": [0]}, "affinity lists CPUs for 1 workers, there are 2"),
        ({"max_restarts": -1}, "max_restarts must be an integer of at least 0"),
        ({"check_finite": "yes"}, "check_finite must be True or False"),
        ({"rows_per_env": 2}, "rows_per_env is for batched environments"),
        # Of batched environments.
        ({"env_fns": counting}, "needs num_envs"),
        ({"env_fns": [counting], "num_envs": 2}, "leave num_envs out"),
        ({"env_fns": counting, "num_envs": 0}, "num_envs must be an integer of at least 1"),
        ({"env_fns": CountingEnv, "num_envs": 2}, r"calls env_fn\(num_envs=n\)"),
        ({"env_fns": "FrozenLake-v1", "num_envs": 2}, "FrozenLake-v1 has no batched environment"),
        ({"env_fns": "Nothing-v9", "num_envs": 2}, "env_fns='Nothing-v9' is not a registered environment id"),
        ({**BATCHED, "autoreset_mode": "DISABLED"}, "is DISABLED, but .* has the mode SAME_STEP"),
        ({**BATCHED, "spaces": SPACES}, "pass autoreset_mode"),
        ({**BATCHED, "num_envs": 8, "rows_per_env": 3}, "num_envs must be a multiple of rows_per_env=3, got 8"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ShmVectorEnv(**{"env_fns": [CountingEnv] * 2, **arguments})


def test_ids_as_env_fns_and_an_environment_that_is_returned_twice() -> None:
    class OfTheScript(CountingEnv):
        pass

    gym.register("tests/OfTheScript-v0", entry_point=OfTheScript)
    try:
        with ShmVectorEnv(["tests/OfTheScript-v0", CountingEnv]) as envs:
            envs.reset()
            assert envs.step(np.zeros(2, int))[1].tolist() == [1, 1]
            assert envs.apply(lambda env: type(env.unwrapped).__name__) == ("OfTheScript", "CountingEnv")
    finally:
        del gym.registry["tests/OfTheScript-v0"]
    env = CountingEnv()
    with pytest.raises(WorkerError, match="two of the env_fns of env_rank 0 to 1 return the same environment"):
        ShmVectorEnv([lambda: env] * 2, n_workers=1)


# ---- check_finite ------------------------------------------------------------------------------


class Told(gym.Env[Any, Any]):
    """Does what its action says."""

    observation_space = spaces.Dict(speed=spaces.Box(-np.inf, np.inf, (3,)), n=spaces.Discrete(3))
    action_space = spaces.Discrete(5)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._observe(np.nan if options else 0), {}

    def _observe(self, third: float) -> Any:
        return {"speed": np.array([0, 0, third], np.float32), "n": 1}

    def step(self, action: Any) -> Any:
        third, reward = [(0.0, 0.0), (np.inf, 0.0), (0.0, np.nan), (0.0, 0.0), (np.nan, 0.0)][action]
        return self._observe(third), reward, action > 2, False, {}


CASES = [
    (1, r"observation\['speed'\] of env_rank 1 must be finite \(check_finite=True\), got inf at index \(2,\)"),
    (2, r"reward of env_rank 1 must be finite \(check_finite=True\), got nan$"),
    (4, r"final_obs\['speed'\] of env_rank 1 must be finite \(check_finite=True\), got nan at index \(2,\)"),
]


@pytest.mark.parametrize(("action", "problem"), CASES)
def test_what_is_not_finite_is_named_and_costs_one_step(action: int, problem: str) -> None:
    with ShmVectorEnv([Told] * 2, autoreset_mode="SAME_STEP", check_finite=True) as envs:
        envs.reset()
        for _ in range(2):
            assert envs.step([3, 0])[1].tolist() == [0, 0]
            with pytest.raises(SpaceError, match=problem):
                envs.step([0, action])
            envs.send([action], [1])
            with pytest.raises(SpaceError, match=problem):
                envs.recv()
        with pytest.raises(SpaceError, match=r"observation\['speed'\] of env_rank 0"):
            envs.reset(options={"wrong": True})
        envs.reset()
        envs.step([0, 0])


@pytest.mark.slow
def test_without_the_check_it_passes() -> None:
    with ShmVectorEnv([Told] * 2) as envs:
        envs.reset()
        assert np.isnan(envs.step([0, 2])[1][1])


# ---- make_vec ----------------------------------------------------------------------------------


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
    of_gymnasium: Any = (((), {"vectorization_mode": "sync"}), ((), {"vector_kwargs": {}}), (("sync",), {}))
    for args, kwargs in of_gymnasium:
        with pytest.raises(ConfigError, match=r"leave them out.* such as autoreset_mode=\"SAME_STEP\""):
            make_vec("CartPole-v1", 2, *args, **kwargs)
