"""`Agent.select`: a few columns at a time get what all at once would have got."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from penstock import (
    Agent,
    CategoricalPgAgent,
    DeterministicPgAgent,
    EpsilonGreedyAgent,
    FunctionAgent,
    GaussianPgAgent,
    RandomAgent,
    RecurrentCategoricalPgAgent,
    SquashedGaussianAgent,
)
from penstock.buffers.named import NamedArrays

from ..scale import quick_first

B, T = 5, 40
OBSERVATION = spaces.Box(-1, 1, (3,), np.float64)
DISCRETE, BOX = spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float32)


class Model(nn.Module):
    """As many outputs as asked for, of the observation alone, in float64: the same row by row."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(3, n) for n in widths).double()

    def forward(self, observation: torch.Tensor) -> Any:
        out = tuple(head(observation) for head in self.heads)
        return out if len(out) > 1 else out[0]


class Memory(nn.Module):
    state_shape = (6,)

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(3, 6).double(), nn.Linear(6, 5).double()

    def forward(self, observation: Any, prev_action: Any, prev_reward: Any, state: Any) -> Any:
        state = self.cell(observation, state)
        out = self.out(state)
        return out[:, :4], out[:, 4], state


def scripted(observation: Any, rngs: Any) -> Any:
    return np.array([rng.integers(4) for rng in rngs])


AGENTS: dict[str, tuple[Any, gym.Space[Any]]] = {
    "random": (RandomAgent, DISCRETE),
    "function": (lambda: FunctionAgent(scripted), DISCRETE),
    "categorical": (lambda: CategoricalPgAgent(Model(4, 1)), DISCRETE),
    "gaussian": (lambda: GaussianPgAgent(Model(2, 1)), BOX),
    "squashed": (lambda: SquashedGaussianAgent(Model(2, 2)), BOX),
    "epsilon": (lambda: EpsilonGreedyAgent(Model(4), epsilon=[0.1, 0.9, 0.2, 0.8, 0.5]), DISCRETE),
    "deterministic": (lambda: DeterministicPgAgent(Model(2), sigma=[0.1, 0.9, 0.2, 0.8, 0.5]), BOX),
    "ou": (lambda: DeterministicPgAgent(Model(2), noise="ou"), BOX),
    "recurrent": (lambda: RecurrentCategoricalPgAgent(Memory()), DISCRETE),
    "recurrent, state per batch": (lambda: RecurrentCategoricalPgAgent(Memory(), record_state="batch"), DISCRETE),
}


def copies(make: Any, action_space: gym.Space[Any]) -> list[Agent]:
    agent = make()
    agent.initialize(OBSERVATION, action_space, seed=0)
    made = []
    for _ in range(2):
        copy = agent.runtime.column_copy([np.random.default_rng(b) for b in range(B)])
        copy.runtime.set_columns(range(B), B)
        copy.sample_mode(0)
        made.append(copy)
    return made


def check(found: Any, wanted: Any) -> None:
    if isinstance(found, NamedArrays):
        assert found.keys() == wanted.keys()
        for part, other in zip(found, wanted, strict=True):
            check(part, other)
    else:
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("name", quick_first(AGENTS, 3))
def test_a_few_columns_at_a_time(name: str) -> None:
    make, action_space = AGENTS[name]
    torch.manual_seed(0)
    together, apart = copies(make, action_space)
    rng = np.random.default_rng(1)
    observation = rng.normal(size=(T, B, 3))
    previous = np.zeros((B, *action_space.shape), action_space.dtype), np.zeros(B, np.float32)  # type: ignore[misc]
    wanted = []
    for t in range(T):
        if t == T // 2:
            together.reset_one(1)
        wanted.append(together.step(observation[t], *previous))
    at = np.zeros(B, int)
    while at.min() < T:
        columns = np.flatnonzero((rng.random(B) < 0.6) & (at < T))
        if not len(columns):
            continue
        apart.select(columns if len(columns) < B else None)
        if 1 in columns and at[1] == T // 2:
            apart.reset_one(1)
        row = observation[at[columns], columns]
        action, info = apart.step(row, previous[0][columns], previous[1][columns])
        for i, b in enumerate(columns):
            check(np.asarray(action)[i], np.asarray(wanted[at[b]].action)[b])
            for field in info.keys():  # noqa: SIM118  # iterating gives values
                part, other = np.asarray(info[field]), np.asarray(wanted[at[b]].agent_info[field])
                check(part[i], other[b])
        at[columns] += 1
