"""DeterministicPgAgent: the model's action and noise of several kinds, within the bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from penstock.agents import DeterministicPgAgent, RandomAgent
from penstock.errors import ConfigError

from .. import models
from ..models import Echo, acting, of_columns

WIDE = spaces.Box(-1000, 1000, (2,), np.float64)
UNBOUNDED = spaces.Box(-np.inf, np.inf, (2,), np.float64)


def acting_deterministic(space: Any, columns: range = range(2), itr: int = 0, **options: Any) -> Any:
    twin = acting(DeterministicPgAgent(Echo, **options), spaces.Box(-np.inf, np.inf, space.shape), space, columns)
    twin.sample_mode(itr)
    return twin


def act(agent: Any, observation: Any) -> Any:
    step = models.act(agent, observation)
    assert len(step.agent_info) == 0
    return step.action


def rows(agent: Any, n: int, columns: int = 64, reset: bool = False) -> Any:
    """The actions of n steps `[n, B, 2]` where the model says zero."""
    found = []
    for _ in range(n):
        found.append(act(agent, np.zeros((columns, 2))))
        if reset:
            agent.reset_one(1)
    return np.stack(found)


@pytest.mark.parametrize(("space", "unit"), [(WIDE, 1000), (UNBOUNDED, 1), (spaces.Box(-1000, 3000, (2,)), 2000)])
def test_noise_is_in_units_of_half_the_range(space: Any, unit: float) -> None:
    noise = rows(acting_deterministic(space, range(64), sigma=0.1), 300)
    np.testing.assert_allclose(noise.std(axis=(0, 1)), 0.1 * unit, rtol=0.03)
    assert (np.abs(noise.mean(axis=(0, 1))) < 0.003 * unit).all()


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (2,)),
        spaces.Box(-1, 1, (3, 2), np.float64),
        spaces.Box(np.float32([-1, -np.inf]), np.float32([np.inf, 2])),
        spaces.Box(0, 1, (1,), np.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("noise", ["gaussian", "ou"])
def test_actions_lie_in_the_space_with_its_dtype(space: Any, noise: Any) -> None:
    agent = acting_deterministic(space, range(3), sigma=1.0, noise=noise)
    for _ in range(30):
        action = act(agent, np.random.default_rng(0).normal(0, 3, (3, *space.shape)))
        assert action.dtype == space.dtype
        assert all(space.contains(row) for row in action)


def test_evaluations_have_no_noise() -> None:
    agent, wanted = acting_deterministic(WIDE, sigma=1.0, noise="ou"), [[1.0, 2.0], [5000.0, 4.0]]
    agent.eval_mode(0)
    assert act(agent, wanted).tolist() == [[1, 2], [1000, 4]]
    agent.sample_mode(0)
    assert act(agent, wanted).tolist() != [[1, 2], [1000, 4]]


def test_sigma_may_hang_on_the_environment_and_on_itr() -> None:
    agent = acting_deterministic(UNBOUNDED, range(3), sigma=lambda itr: np.array([0.0, 1.0, 2.0, 3.0]) / (1 + itr))
    agent.runtime.set_columns(range(1, 4), 4)
    for itr in (0, 1):
        agent.sample_mode(itr)
        noise = rows(agent, 2000, columns=3)
        np.testing.assert_allclose(noise.std(axis=(0, 2)), np.array([1, 2, 3]) / (1 + itr), rtol=0.06)


def test_ornstein_uhlenbeck_noise_is_correlated_until_its_column_is_reset() -> None:
    noise = rows(acting_deterministic(UNBOUNDED, range(3), noise="ou", sigma=0.3, ou_theta=0.2), 3000, 3, reset=True)

    def correlation(b: int) -> Any:
        return np.corrcoef(noise[:-1, b, 0], noise[1:, b, 0])[0, 1]

    assert correlation(0) == pytest.approx(0.8, abs=0.06)
    assert correlation(1) == pytest.approx(0.0, abs=0.08)
    assert noise[:, 1].std() == pytest.approx(0.3, rel=0.05)
    assert noise[:, 2].std() == pytest.approx(0.3 / np.sqrt(0.2 * 1.8), rel=0.1)


def test_warming_up_is_random() -> None:
    space = spaces.Box(-1, 3, (2,))
    agent = acting_deterministic(space, range(64), sigma=0.0, warmup_random_itrs=2)
    random = RandomAgent()
    random.initialize(space, space)
    random = of_columns(random, range(64))
    for itr in (0, 1):
        agent.sample_mode(itr)
        actions = rows(agent, 50)
        assert (actions.min(), actions.max()) == pytest.approx((-1, 3), abs=0.01)
        wanted = [random.step(None, None, np.zeros(64, np.float32)).action.copy() for _ in actions]
        np.testing.assert_array_equal(actions, wanted)
    agent.eval_mode(0)
    assert (rows(agent, 1) == 0).all(), "evaluations ask the model"
    agent.sample_mode(2)
    assert (rows(agent, 1) == 0).all()


def test_squashing_takes_the_tanh_and_scales_it() -> None:
    space = spaces.Box(np.array([-1.0, 0.0]), np.array([3.0, 10.0]), dtype=np.float64)
    agent = acting_deterministic(space, sigma=0.0, squash=True)
    output = np.array([[0.0, 0.5], [-99.0, 99.0]])
    expected = [[1, 5 + 5 * np.tanh(0.5)], [-1, 10]]
    np.testing.assert_allclose(act(agent, output), expected)
    np.testing.assert_allclose(agent.action_of(torch.from_numpy(output)), expected)
    plain = acting_deterministic(space, sigma=0.0)
    np.testing.assert_array_equal(plain.action_of(torch.from_numpy(output)), output)


def test_used_without_a_sampler_it_explores_as_in_the_first_iteration() -> None:
    agent = DeterministicPgAgent(Echo, sigma=lambda itr: 0.0 if itr else 1.0)
    agent.initialize(UNBOUNDED, UNBOUNDED)
    agent = agent.runtime.column_copy([np.random.default_rng(0)])
    assert act(agent, [[0.0, 0.0]]).tolist() != [[0, 0]]


# ---- what is refused ---------------------------------------------------------------------------


def test_other_noise_is_refused() -> None:
    with pytest.raises(ConfigError, match="noise must be one of gaussian, ou, got 'pink'"):
        DeterministicPgAgent(Echo, noise="pink")  # type: ignore[arg-type]
