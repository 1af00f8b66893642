"""The arguments of ShmVectorEnv: AsyncVectorEnv's, ids of environments, and misspelt names."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv

from penstock import ConfigError, WorkerError
from penstock.envs import CountingEnv
from penstock.vector import ShmVectorEnv

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
        ({"zzz": 2}, rf"{UNKNOWN}'zzz'; it has \w+, .* 18 others: see help\(ShmVectorEnv\)$"),
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
