"""Every stock agent keeps the rules that penstock.testing holds agents to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from penstock.agents import (
    Agent,
    CategoricalPgAgent,
    DeterministicPgAgent,
    EpsilonGreedyAgent,
    FunctionAgent,
    GaussianPgAgent,
    LinearSchedule,
    RecurrentCategoricalPgAgent,
    RecurrentGaussianPgAgent,
    SquashedGaussianAgent,
)
from penstock.envs import NestedEnv
from penstock.testing import check_agent

from ..models import Net
from ..scale import scaled

pytestmark = pytest.mark.slow

CARTPOLE, PENDULUM = partial(gym.make, "CartPole-v1"), partial(gym.make, "Pendulum-v1")


class Gru(nn.Module):
    """Remembers what it saw and did."""

    state_shape = (6,)

    def __init__(self, n_inputs: int, n_outputs: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(n_inputs + 2, 6)
        self.policy, self.critic = nn.Linear(6, n_outputs), nn.Linear(6, 1)
        self.double()

    def forward(self, observation: Any, prev_action: Any, prev_reward: Any, state: Any) -> Any:
        previous = torch.stack([prev_action.reshape(len(observation)).to(observation.dtype), prev_reward], 1)
        state = self.cell(torch.cat([observation, previous], 1), state)
        return self.policy(state), self.critic(state), state


def move(observation: Any, rngs: Any) -> Any:
    mode = np.stack([rng.integers(0, [2, 3]) for rng in rngs])
    return {"move": np.clip(-observation.position, -1, 1).astype(np.float32), "mode": mode}, {"mode": mode[:, 0]}


AGENTS: dict[str, tuple[Callable[[], Agent], Any]] = {
    "categorical": (lambda: CategoricalPgAgent(lambda: Net(4, 2, 0)), CARTPOLE),
    "gaussian": (lambda: GaussianPgAgent(lambda: Net(3, 1, 0)), PENDULUM),
    "gaussian, log_std": (lambda: GaussianPgAgent(lambda: Net(3, 1, 1, 0), initial_log_std=None), PENDULUM),
    "epsilon-greedy": (
        lambda: EpsilonGreedyAgent(lambda: Net(4, 2), epsilon=LinearSchedule(0.5, 0.1, 9), spread=3),
        CARTPOLE,
    ),
    "deterministic": (lambda: DeterministicPgAgent(lambda: Net(3, 1), squash=True), PENDULUM),
    "deterministic, ou": (lambda: DeterministicPgAgent(lambda: Net(3, 1), noise="ou"), PENDULUM),
    "squashed": (lambda: SquashedGaussianAgent(lambda: Net(3, 1, 1)), PENDULUM),
    "recurrent categorical": (lambda: RecurrentCategoricalPgAgent(lambda: Gru(4, 2)), CARTPOLE),
    "recurrent gaussian": (lambda: RecurrentGaussianPgAgent(lambda: Gru(3, 1)), PENDULUM),
    "function": (lambda: FunctionAgent(move), NestedEnv),
}


#: Daily without those that differ from another in an option.
DAILY = [name for name in AGENTS if name not in ("gaussian", "deterministic", "recurrent gaussian")]


@pytest.mark.parametrize("name", scaled(list(AGENTS), DAILY))
def test_it_keeps_every_rule(name: str) -> None:
    make_agent, env_fn = AGENTS[name]
    check_agent(make_agent, env_fn)
