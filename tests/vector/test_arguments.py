"""The arguments of ShmVectorEnv: AsyncVectorEnv's, ids of environments, and misspelt names."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv

from penstock import ConfigError, SpaceError, WorkerError
from penstock.envs import CountingEnv
from penstock.vector import ShmVectorEnv


@pytest.mark.parametrize("cls", [AsyncVectorEnv, ShmVectorEnv])
def test_a_line_that_gives_all_defaults_of_async_runs(cls: Any) -> None:
    with_defaults = {"shared_memory": True, "copy": True, "context": None, "daemon": True, "observation_mode": "same"}
    envs = cls([CountingEnv] * 2, **with_defaults)
    assert envs.reset()[0].tolist() == [[0, 0], [0, 0]]
    envs.close()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("shared_memory", False, "results are always in shared memory"),
        ("daemon", False, "workers always exit with the main process"),
        ("observation_mode", "different", "all environments must have the same spaces"),
        ("observation_mode", (CountingEnv().observation_space,) * 2, "all environments must have the same spaces"),
    ],
)
def test_other_values_are_refused_with_the_reason(name: str, value: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be .*{reason}"):
        ShmVectorEnv([CountingEnv] * 2, **{name: value})


def test_shared_memory_by_position_is_named() -> None:
    with pytest.raises(ConfigError, match=r"in_series must be an integer, got True: .*AsyncVectorEnv is shared_memory"):
        ShmVectorEnv([CountingEnv] * 2, True)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("in_serie", "did you mean 'in_series'"),
        ("num_workers", "did you mean 'n_workers'"),
        ("step_timeouts", "did you mean 'step_timeout'"),
        ("worker", "change what an environment does with a wrapper"),
        ("max_concurrency", "n_workers is the number of environments that step at once"),
    ],
)
def test_an_unknown_argument_is_named_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"^ShmVectorEnv has no argument '{name}': {hint}"):
        ShmVectorEnv([CountingEnv], **{name: 2})  # type: ignore[arg-type]


def test_an_unknown_argument_without_a_near_one_is_named_with_some_that_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"has no argument 'zzz'; it has \w+, .* 18 others: see help\(ShmVectorEnv\)$"
    ):
        ShmVectorEnv([CountingEnv], zzz=2)  # type: ignore[arg-type]


def test_ids_as_env_fns() -> None:
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
    with pytest.raises(ConfigError, match=r"env_fns\[0\]='Nothing-v9' is not a registered environment id"):
        ShmVectorEnv(["Nothing-v9"])


def test_env_fns_that_return_the_same_environment() -> None:
    env = CountingEnv()
    with pytest.raises(WorkerError, match="two of the env_fns of env_rank 0 to 1 return the same environment"):
        ShmVectorEnv([lambda: env] * 2, n_workers=1)


def test_actions_of_another_kind_are_refused() -> None:
    with ShmVectorEnv([CountingEnv] * 2) as envs:
        envs.reset()
        for actions in (np.array([True, False]), np.array([0.0, 1.0])):
            with pytest.raises(SpaceError, match=rf"dtype int64, got shape \(2,\) and dtype {actions.dtype}"):
                envs.step(actions)
