"""RecurrentEpsilonGreedyAgent: the best action for the state of each column, and the same exploration as without it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from penstock.agents import EpsilonGreedyAgent, RecurrentEpsilonGreedyAgent
from penstock.errors import ConfigError, SpaceError

from ..models import acting

OBSERVATIONS, DISCRETE = spaces.Box(-9, 9, (2,), np.float64), spaces.Discrete(3)


def inputs(B: int = 3) -> Any:
    return np.zeros((B, 2)), np.zeros(B, np.int64), np.zeros(B, np.float32)


class CountingQ(nn.Module):
    """The state counts the steps of each column. The best action is the count, modulo 3."""

    state_shape = (1,)

    def forward(self, observation: Any, prev_action: Any, prev_reward: Any, state: Any) -> Any:
        q = nn.functional.one_hot(state[:, 0].long() % 3, 3) * (1 + state)
        return q, state + 1


class FirstQ(nn.Module):
    """The same q for every state."""

    def forward(self, observation: Any) -> Any:
        return torch.tensor([[1.0, 0.0, 0.0]]).expand(len(observation), -1)


class FirstQAndState(FirstQ):
    state_shape = (1,)

    def forward(self, observation: Any, prev_action: Any = None, prev_reward: Any = None, state: Any = None) -> Any:
        return super().forward(observation), state


class Three(FirstQAndState):
    """Has one output too many."""

    def forward(self, *inputs: Any) -> Any:
        return *super().forward(*inputs), None


def epsilon_greedy(model: Any, columns: range = range(3), **options: Any) -> Any:
    cls = EpsilonGreedyAgent if model is FirstQ else RecurrentEpsilonGreedyAgent
    twin = acting(cls(model, **options), OBSERVATIONS, DISCRETE, columns)
    twin.sample_mode(0)
    return twin


def test_an_epsilon_greedy_agent_acts_with_the_state_of_each_column() -> None:
    agent = epsilon_greedy(CountingQ, epsilon=0.0)
    for t in range(5):
        if t == 3:
            agent.reset_one(1)
        now = [t, t - 3 if t >= 3 else t, t]
        assert agent.value(*inputs()).tolist() == [count + 1 for count in now]
        action, info = agent.step(*inputs())
        assert action.tolist() == [count % 3 for count in now]
        assert info.prev_rnn_state[:, 0].tolist() == now
        assert info.q.tolist() == [count + 1 for count in now]


def test_an_epsilon_greedy_agent_selects_columns_and_records_what_it_is_told() -> None:
    agent = epsilon_greedy(CountingQ, epsilon=0.0, record_state="batch")
    agent.select(np.array([2]))
    assert agent.step(*inputs(1)).agent_info.prev_rnn_state.tolist() == [[0]]
    agent.select(None)
    assert agent.step(*inputs()).agent_info.prev_rnn_state.tolist() == [[0], [0], [0]]
    assert agent.step(*inputs()).action.tolist() == [1, 1, 2]
    assert "prev_rnn_state" not in epsilon_greedy(CountingQ, record_state=None).step(*inputs()).agent_info


def test_it_explores_as_the_agent_without_recurrence() -> None:
    agents = [epsilon_greedy(model, range(6), epsilon=0.5) for model in (FirstQ, FirstQAndState)]
    steps = [[agent.step(*inputs(6)) for _ in range(20)] for agent in agents]
    for one, other in zip(*steps, strict=True):
        assert one.action.tolist() == other.action.tolist()
        assert one.agent_info.explored.tolist() == other.agent_info.explored.tolist()


def test_a_model_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes \(observation, prev_action, prev_reward, state\)"):
        RecurrentEpsilonGreedyAgent(FirstQ).initialize(OBSERVATIONS, DISCRETE)
    with pytest.raises(SpaceError, match=r"must return a tuple \(q, new_state\)"):
        epsilon_greedy(Three).step(*inputs())
