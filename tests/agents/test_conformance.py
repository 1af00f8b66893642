"""Every stock agent keeps the rules that penstock.testing holds agents to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.agents import (
    DeterministicPgAgent,
    EpsilonGreedyAgent,
    GaussianPgAgent,
    RandomAgent,
    RecurrentCategoricalPgAgent,
)
from penstock.envs import NestedEnv
from penstock.testing import check_agent

from ..models import Lstm, Net
from ..samplers.test_equalities import CARTPOLE, MODELS, PENDULUM
from ..scale import scaled

pytestmark = pytest.mark.slow

#: A setting of each of four environments.
EACH = [0.1, 0.9, 0.2, 0.8]
AGENTS: dict[str, tuple[Any, Callable[[], Any]]] = {
    **MODELS,
    "random": (NestedEnv, RandomAgent),
    "gaussian, log_std": (PENDULUM, lambda: GaussianPgAgent(lambda: Net(3, 1, 1, 0), initial_log_std=None)),
    "epsilon-greedy, epsilons": (CARTPOLE, lambda: EpsilonGreedyAgent(lambda: Net(4, 2), epsilon=EACH)),
    "deterministic, sigmas": (PENDULUM, lambda: DeterministicPgAgent(lambda: Net(3, 1), sigma=EACH)),
    "deterministic, ou": (PENDULUM, lambda: DeterministicPgAgent(lambda: Net(3, 1), noise="ou")),
    "a state per batch": (
        CARTPOLE,
        lambda: RecurrentCategoricalPgAgent(lambda: Lstm(4, 2), record_state="batch", record_distribution=True),
    ),
}

#: Daily without these: another agent of the list has the same code, with another action space or option.
LIKE_ANOTHER = (
    *("multi-discrete", "gaussian, log_std", "recurrent categorical", "epsilon-greedy"),
    *("traced", "deterministic, ou"),
)
DAILY = [name for name in AGENTS if name not in LIKE_ANOTHER]


@pytest.mark.parametrize("name", scaled(list(AGENTS), DAILY))
def test_it_keeps_every_rule(name: str) -> None:
    env_fn, make_agent = AGENTS[name]
    check_agent(make_agent, env_fn)
