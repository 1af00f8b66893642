"""check_finite=True names the first NaN or inf; without it they pass, as with Gymnasium's."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from penstock import SpaceError
from penstock.vector import ShmVectorEnv

from ..scale import quick_first


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


@pytest.mark.parametrize(("action", "problem"), quick_first(CASES))
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
