"""`Agent.select`: a few columns at a time get what all at once would have got."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

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
from penstock.testing.reference_envs import stack

from ..models import Gru, Net
from ..scale import quick_first
from ..support import assert_same

B, T = 5, 40
OBSERVATION = spaces.Box(-1, 1, (3,), np.float64)
DISCRETE, BOX = spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float32)


def scripted(observation: Any, rngs: Any) -> Any:
    return np.array([rng.integers(4) for rng in rngs])


AGENTS: dict[str, tuple[Any, gym.Space[Any]]] = {
    "random": (RandomAgent, DISCRETE),
    "function": (lambda: FunctionAgent(scripted), DISCRETE),
    "categorical": (lambda: CategoricalPgAgent(Net(3, 4, 0)), DISCRETE),
    "gaussian": (lambda: GaussianPgAgent(Net(3, 2, 0)), BOX),
    "squashed": (lambda: SquashedGaussianAgent(Net(3, 2, 2)), BOX),
    "epsilon": (lambda: EpsilonGreedyAgent(Net(3, 4), epsilon=[0.1, 0.9, 0.2, 0.8, 0.5]), DISCRETE),
    "deterministic": (lambda: DeterministicPgAgent(Net(3, 2), sigma=[0.1, 0.9, 0.2, 0.8, 0.5]), BOX),
    "ou": (lambda: DeterministicPgAgent(Net(3, 2), noise="ou"), BOX),
    "recurrent": (lambda: RecurrentCategoricalPgAgent(Gru(3, 4)), DISCRETE),
    "recurrent, state per batch": (lambda: RecurrentCategoricalPgAgent(Gru(3, 4), record_state="batch"), DISCRETE),
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
        action, info = together.step(observation[t], *previous)
        wanted.append(NamedArrays(action=action.copy(), info=info.copy()))
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
        rows = stack([wanted[at[b]][b] for b in columns])
        assert_same(NamedArrays(action=action, info=info), rows, rtol=1e-6, rough="")
        at[columns] += 1
