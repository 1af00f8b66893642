"""SquashedGaussianAgent: normal distributions through a tanh, and their densities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import distributions as D

from penstock.agents import SquashedGaussianAgent

from .. import models
from ..models import Echo, acting

SPACES = [
    spaces.Box(-1, 1, (2,)),
    spaces.Box(np.array([-1.0, 0.0]), np.array([3.0, 10.0]), dtype=np.float64),
    spaces.Box(-2, 5, (2, 3), np.float64),
    spaces.Box(-1, 1, (1,), np.float16),
]


class MeanAndLogStd(Echo):
    """The observation is `[B, 2, ...]`: mean and log_std."""

    def forward(self, observation: torch.Tensor) -> Any:
        return observation[:, 0], observation[:, 1]


def acting_squashed(space: Any, columns: range = range(2), model: Any = MeanAndLogStd, **options: Any) -> Any:
    observations = spaces.Box(-np.inf, np.inf, (2, *space.shape))
    return acting(SquashedGaussianAgent(model, **options), observations, space, columns)


def act(agent: Any, mean: Any, log_std: Any) -> Any:
    return models.act(agent, np.stack([mean, log_std], axis=1))


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_log_prob_is_that_of_torchs_transformed_distribution(space: Any) -> None:
    rng, agent = np.random.default_rng(0), acting_squashed(space, range(4))
    low, high = (torch.from_numpy(np.asarray(bound, np.float64)) for bound in (space.low, space.high))
    for _ in range(20):
        mean, log_std = rng.normal(size=(2, 4, *space.shape))
        step = act(agent, mean, log_std)
        info = step.agent_info
        assert (step.action.dtype, step.action.shape) == (space.dtype, (4, *space.shape))
        assert all(space.contains(row) for row in step.action)
        raw = torch.from_numpy(info.raw_action).double()
        affine = D.AffineTransform((high + low) / 2, (high - low) / 2, cache_size=1)
        squashed = D.TransformedDistribution(
            D.Normal(torch.from_numpy(mean), torch.from_numpy(log_std).exp()), [D.TanhTransform(cache_size=1), affine]
        )
        # The transforms are cached, so that the tanh is not inverted where it is flat.
        exact = squashed.transforms[1](squashed.transforms[0](raw))
        expected = squashed.log_prob(exact).reshape(4, -1).sum(1)
        np.testing.assert_allclose(info.log_prob, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(step.action, exact, rtol=1e-3 if space.dtype == np.float16 else 1e-6, atol=1e-6)
        np.testing.assert_allclose(agent.action_of(raw), exact, atol=1e-12)
        assert info.log_prob.dtype == np.float32


def test_draws_have_the_distribution_of_the_model() -> None:
    agent = acting_squashed(SPACES[0], range(64))
    raw = np.concatenate(
        [act(agent, np.tile([0.5, -1.0], (64, 1)), np.zeros((64, 2))).agent_info.raw_action for _ in range(300)]
    )
    np.testing.assert_allclose(raw.mean(0), [0.5, -1], atol=0.03)
    np.testing.assert_allclose(raw.std(0), 1, rtol=0.03)


def test_far_out_the_action_is_the_bound_and_log_prob_finite() -> None:
    step = act(acting_squashed(spaces.Box(-1, 3, (1,))), [[500.0], [-500.0]], [[0.0], [0.0]])
    assert step.action.tolist() == [[3], [-1]]
    assert np.isfinite(step.agent_info.log_prob).all()


def test_evaluations_take_the_mean_unless_told() -> None:
    mean, log_std = np.zeros((2, 2)), np.zeros((2, 2))
    for greedy in (True, False):
        agent = acting_squashed(SPACES[0], greedy_eval=greedy)
        agent.eval_mode(0)
        assert (act(agent, mean, log_std).action == 0).all() == greedy
        agent.sample_mode(0)
        assert not (act(agent, mean, log_std).action == 0).any()


def test_warming_up_is_uniform() -> None:
    agent = acting_squashed(spaces.Box(-1, 3, (1,)), range(64), warmup_random_itrs=1)
    agent.sample_mode(0)
    steps = [act(agent, np.zeros((64, 1)), np.zeros((64, 1))) for _ in range(200)]
    actions = np.concatenate([step.action for step in steps])
    observed, _ = np.histogram(actions, bins=8, range=(-1, 3))
    np.testing.assert_allclose(observed / actions.size, 1 / 8, atol=0.015)
    np.testing.assert_allclose(steps[0].agent_info.log_prob, np.log(1 / 4), rtol=1e-6)
    np.testing.assert_allclose(1 + 2 * np.tanh(steps[0].agent_info.raw_action), steps[0].action, rtol=1e-4, atol=1e-5)
    agent.sample_mode(1)
    raw = np.concatenate([act(agent, np.zeros((64, 1)), np.full((64, 1), -9.0)).action for _ in range(5)])
    np.testing.assert_allclose(raw, 1, atol=0.01)
