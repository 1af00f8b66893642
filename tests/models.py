"""Small models and their agents, which tests of several folders share."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations

from penstock.agents import Agent
from penstock.envs import ColumnStreams, NestedEnv, Purpose

# ---- agents that act -----------------------------------------------------------------------


def acting(agent: Agent, observations: Any, actions: Any, columns: range = range(2), seed: int = 0) -> Any:
    """A worker's copy of the agent for these spaces, ready to step `columns`."""
    agent.initialize(observations, actions, seed=0)
    return of_columns(agent.runtime.worker_copy(), columns, seed)


def of_columns(agent: Any, columns: range = range(2), seed: int = 0) -> Any:
    """A copy that steps `columns`, which draw from the streams of `seed`."""
    return agent.runtime.column_copy(ColumnStreams(seed, columns).rngs(Purpose.ACTION))


def act(agent: Any, observation: Any, dtype: Any = np.float64) -> Any:
    """Its step from `observation`, as after a reset."""
    return agent.step(np.asarray(observation, dtype), None, np.zeros(len(observation), np.float32))


# ---- models --------------------------------------------------------------------------------


class Lstm(nn.Module):
    """A policy, a value and the next state."""

    state_shape = ((8,), (8,))

    def __init__(self, n_inputs: int, n_outputs: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(n_inputs + 2, 8)
        self.policy, self.critic = nn.Linear(8, n_outputs), nn.Linear(8, 1)
        self.double()

    def forward(self, observation: Any, prev_action: Any, prev_reward: Any, state: Any) -> Any:
        action = prev_action.reshape(len(observation), -1)[:, 0].to(observation.dtype)
        h, c = self.cell(torch.cat([observation, torch.stack([action, prev_reward], 1)], 1), state)
        return self.policy(h), self.critic(h), (h, c)


class LstmQ(Lstm):
    """Values of actions, and the next state."""

    def forward(self, *inputs: Any) -> Any:
        logits, _, state = super().forward(*inputs)
        return logits, state


class Echo(nn.Module):
    """The observation is the output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, observation: torch.Tensor) -> Any:
        return observation


class LogitsAndFirst(nn.Module):
    """The observation is the logits, its first number the value."""

    def forward(self, observation: torch.Tensor) -> Any:
        return observation, observation[:, 0]


class Net(nn.Module):
    """Linear outputs of a hidden layer; a size of 0 is a value `[B]`. In float64, so that the last bit, in which matrix
    products of other batch shapes may differ, decides nothing."""

    def __init__(self, n_inputs: int, *sizes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_inputs, 16), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(16, max(size, 1)) for size in sizes)
        self.sizes = sizes
        self.double()

    def forward(self, observation: Any) -> Any:
        hidden = self.body(observation if isinstance(observation, torch.Tensor) else observation.position)
        out = [head(hidden) if n else head(hidden)[:, 0] for n, head in zip(self.sizes, self.heads, strict=True)]
        return tuple(out) if len(out) > 1 else out[0]


class Normed(Net):
    """Layers whose weights are computed before each call, in the three ways of torch, and one that finds its size."""

    def __init__(self, n_outputs: int) -> None:
        super().__init__(1, n_outputs, 0)
        self.body[0] = nn.LazyLinear(16)
        self.body.append(parametrizations.spectral_norm(nn.Linear(16, 16)))
        parametrizations.weight_norm(self.heads[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch has a newer form
            nn.utils.weight_norm(self.heads[1])
        self.double()


class Gru(nn.Module):
    """Logits and a value of what it remembers, in float64."""

    state_shape = (8,)

    def __init__(self, n_inputs: int, n_outputs: int) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(n_inputs, 8), nn.Linear(8, n_outputs + 1)
        self.double()

    def forward(self, observation: Any, prev_action: Any, prev_reward: Any, state: Any) -> Any:
        state = self.cell(observation, state)
        out = self.out(state)
        return out[:, :-1], out[:, -1], state


class Memory(nn.Module):
    """Values and logits depend on the number of steps in the episode, and on all inputs."""

    state_shape = (1,)

    def forward(self, observation: Any, prev_action: Any, prev_reward: Any, state: Any) -> Any:
        state = state + 1
        value = state[:, 0] + observation.sum(dim=1) + 10 * prev_action + prev_reward
        return torch.stack([state[:, 0], -observation[:, 0]], dim=1) / 9, value, state


class CartPoleNet(nn.Module):
    """Two heads, in float32. By default as large as the field's CartPole examples."""

    def __init__(self, *hidden: int) -> None:
        super().__init__()
        sizes = (4, *(hidden or (64, 64)))
        layers = [(nn.Linear(n, m), nn.Tanh()) for n, m in pairwise(sizes)]
        self.body = nn.Sequential(*(part for layer in layers for part in layer))
        self.policy, self.value = nn.Linear(sizes[-1], 2), nn.Linear(sizes[-1], 1)

    def forward(self, observation: Any) -> Any:
        features = self.body(observation)
        return self.policy(features), self.value(features).squeeze(-1)


def small_model(observation_space: Any, action_space: Any) -> nn.Module:
    return CartPoleNet(4)


class Constant(nn.Module):
    """Its value shows which parameters acted."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> Any:
        return torch.zeros(len(observation), 3), self.weight.expand(len(observation))


# ---- an environment for them ---------------------------------------------------------------


class Modes(gym.ActionWrapper[Any, Any, Any]):
    """A NestedEnv of which the mode alone is chosen."""

    def __init__(self) -> None:
        super().__init__(NestedEnv())
        actions: Any = self.env.action_space
        self.action_space = actions["mode"]

    def action(self, action: Any) -> Any:
        return {"move": np.array([action[0], action[1], 1], np.float32) / 3, "mode": action}
