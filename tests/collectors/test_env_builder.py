"""Every environment must have the spaces of the example environment."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from penstock.columns.builder import EnvBuilder
from penstock.envs.factory import EnvContext, EnvFactory
from penstock.envs.seeding import Purpose
from penstock.errors import SpaceError
from penstock.workers.control import ControlBlock

BOX = Box(-1.0, np.array([1.0, np.inf], np.float32))
CONTEXT = EnvContext(env_rank=3, worker_rank=0, seed=0, purpose=Purpose.TRAIN)


class Spaced(gym.Env[Any, Any]):
    action_space = Discrete(2)

    def __init__(self, observation_space: gym.Space[Any]) -> None:
        self.observation_space = observation_space


@pytest.mark.parametrize(
    "other",
    [
        Box(-1.0, np.array([1.0, np.inf], np.float32)),
        Box(-1.0, np.array([1.0 + 1e-7, np.inf], np.float32)),  # Gymnasium compares bounds with a tolerance
        Box(-1.0, np.array([1.0, 9.0], np.float32)),
        Box(-2.0, np.array([1.0, np.inf], np.float32)),
        Box(-1.0, np.array([1.0, np.inf], np.float64), dtype=np.float64),
        Box(-1.0, np.array([1.0, np.inf, np.inf], np.float32)),
        Discrete(2),
    ],
)
def test_a_space_is_refused_where_gymnasium_says_that_it_differs(other: gym.Space[Any]) -> None:
    builder = EnvBuilder(ControlBlock(1, 1, shared=False).progress(0), BOX, Discrete(2))
    factory = EnvFactory(Spaced, {"observation_space": other})
    if other == BOX:
        assert builder.build(factory, CONTEXT).observation_space is other
    else:
        with pytest.raises(SpaceError, match=r"the observation_space of env_rank 3 is .*must have the same spaces"):
            builder.build(factory, CONTEXT)
    builder.close()
