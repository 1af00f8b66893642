"""The real environments, each with a time limit that the test chooses, and models for all their spaces."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from penstock import (
    Agent,
    CategoricalPgAgent,
    GaussianPgAgent,
    NamedArrays,
    RecurrentCategoricalPgAgent,
    RecurrentGaussianPgAgent,
)

# ---- environments ------------------------------------------------------------------------------


def taxi(max_episode_steps: int) -> Any:
    newest = next(name for name in ("Taxi-v4", "Taxi-v3") if name in gym.registry)
    return gym.make(newest, max_episode_steps=max_episode_steps)


def pong(max_episode_steps: int) -> Any:
    """Four small grey frames: every fifth row and fourth column. Averages would need OpenCV."""
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner from every worker
    gym.register_envs(ale_py)
    env: Any = gym.make("ALE/Pong-v5", obs_type="grayscale", max_episode_steps=max_episode_steps)
    space = spaces.Box(0, 255, (42, 40), np.uint8)
    return gym.wrappers.FrameStackObservation(
        gym.wrappers.TransformObservation(env, lambda frame: frame[::5, ::4], space), 4
    )


def dm_cartpole(max_episode_steps: int) -> Any:
    # Nothing is drawn. By default dm_control looks for a display.
    os.environ.setdefault("MUJOCO_GL", "disable")
    import shimmy

    gym.register_envs(shimmy)
    return gym.make("dm_control/cartpole-swingup-v0", max_episode_steps=max_episode_steps)


@dataclass(frozen=True)
class Real:
    """An environment, made with `make(max_episode_steps)`, and the module that it needs."""

    make: Callable[[int], gym.Env[Any, Any]]
    needs: str = "gymnasium"


def _stock(name: str, needs: str = "gymnasium") -> Real:
    return Real(lambda max_episode_steps: gym.make(name, max_episode_steps=max_episode_steps), needs)


ENVIRONMENTS = {
    "CartPole": _stock("CartPole-v1"),
    "Pendulum": _stock("Pendulum-v1"),
    "Acrobot": _stock("Acrobot-v1"),
    "Taxi": Real(taxi),  # its observation is Discrete
    "Blackjack": _stock("Blackjack-v1"),  # its observation is a Tuple
    "Atari": Real(pong, "ale_py"),
    "MuJoCo": _stock("Hopper-v5", "mujoco"),
    "dm_control": Real(dm_cartpole, "dm_control"),  # its observation is a Dict, its actions are float64
}


def env_fns(name: str, limits: tuple[int, ...]) -> list[Callable[[], gym.Env[Any, Any]]]:
    """One factory per environment, each with its own time limit."""
    return [partial(ENVIRONMENTS[name].make, limit) for limit in limits]


# ---- agents ------------------------------------------------------------------------------------


def _flat(*values: Any) -> Any:
    """All leaves in one float64 tensor `[B, n]`, of moderate size."""
    leaves = [x for v in values for x in ([leaf for _, leaf in v.leaves()] if isinstance(v, NamedArrays) else [v])]
    return torch.tanh(torch.cat([leaf.double().reshape(len(leaf), -1) for leaf in leaves], 1) / 10)


def _rounded(x: Any) -> Any:
    """`x` without its last bits, which may depend on the batch size of a matrix product."""
    return torch.round(x * 2**24) / 2**24


class Net(nn.Module):
    """Outputs and a value that depend on all arguments of an agent."""

    def __init__(self, n_inputs: int, n_outputs: int) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(n_inputs, 8), nn.Linear(8, n_outputs + 1)
        self.double()

    def forward(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        out = _rounded(self.heads(torch.tanh(self.body(_flat(observation, prev_action, prev_reward)))))
        return out[:, :-1], out[:, -1]


class RecurrentNet(nn.Module):
    """As `Net`, with a recurrent state of two parts."""

    state_shape = ((8,), (8,))

    def __init__(self, n_inputs: int, n_outputs: int) -> None:
        super().__init__()
        self.cell, self.heads = nn.LSTMCell(n_inputs, 8), nn.Linear(8, n_outputs + 1)
        self.double()

    def forward(self, observation: Any, prev_action: Any, prev_reward: Any, state: Any) -> Any:
        h, c = map(_rounded, self.cell(_flat(observation, prev_action, prev_reward), state))
        out = _rounded(self.heads(h))
        return out[:, :-1], out[:, -1], (h, c)


def agent_maker(observation_space: Any, action_space: Any, recurrent: bool) -> Callable[[], Agent]:
    """A function that makes agents for the spaces, all with the same weights."""
    is_discrete = isinstance(action_space, spaces.Discrete)
    n_outputs = int(action_space.n) if is_discrete else int(np.prod(action_space.shape))
    n_inputs = _size(observation_space) + _size(action_space) + 1
    agents: dict[Any, Any] = {
        (True, False): CategoricalPgAgent,
        (True, True): RecurrentCategoricalPgAgent,
        (False, False): GaussianPgAgent,
        (False, True): RecurrentGaussianPgAgent,
    }

    def make() -> Agent:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = (RecurrentNet if recurrent else Net)(n_inputs, n_outputs)
        agent: Agent = agents[is_discrete, recurrent](model)
        return agent

    return make


def _size(space: Any) -> int:
    """How many numbers are recorded for an element."""
    if isinstance(space, spaces.Dict):
        return sum(map(_size, space.values()))
    if isinstance(space, spaces.Tuple):
        return sum(map(_size, space))
    return int(np.prod(space.shape))
