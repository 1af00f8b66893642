"""GaussianPgAgent and SquashedGaussianAgent: they draw from normal distributions, within bounds, and record it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import distributions as D
from torch import nn

from penstock.agents import GaussianPgAgent, SquashedGaussianAgent
from penstock.errors import SpaceError

from ..models import Echo, act, acting

UNBOUNDED = spaces.Box(-np.inf, np.inf, (2,))


class MeanAndSum(Echo):
    """The observation is the mean, its sum the value."""

    def forward(self, observation: torch.Tensor) -> Any:
        return observation, observation.reshape(len(observation), -1).sum(1)


class WithDeviation(Echo):
    """The observation is `[B, 2, ...]`: mean and log_std."""

    def forward(self, observation: torch.Tensor) -> Any:
        return observation[:, 0], observation[:, 1], observation[:, :1].reshape(len(observation), -1).sum(1)


def acting_gaussian(
    space: Any, columns: range = range(2), model: Any = MeanAndSum, seed: int = 0, **options: Any
) -> Any:
    agent = GaussianPgAgent(model, **options)
    return acting(agent, spaces.Box(-np.inf, np.inf, space.shape), space, columns, seed)


SPACES = [
    spaces.Box(-1, 1, (3,)),
    spaces.Box(-1, 1, (2, 3), np.float64),
    spaces.Box(np.float32([-1, -np.inf, 0]), np.float32([1, 2, np.inf])),
    spaces.Box(-np.inf, np.inf, (1,), np.float64),
    spaces.Box(0, 5, (2,), np.float16),
    spaces.Box(-1, 1, ()),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize("model", [MeanAndSum, WithDeviation])
def test_what_is_recorded_fits_the_space_and_torchs_normal(space: Any, model: Any) -> None:
    rng = np.random.default_rng(0)
    agent = acting_gaussian(space, range(4), model, initial_log_std=-0.5)
    for _ in range(20):
        mean, log_std = rng.normal(size=(4, *space.shape)), rng.normal(size=(4, *space.shape))
        observation = mean if model is MeanAndSum else np.stack([mean, log_std], axis=1)
        step = act(agent, observation)
        info = step.agent_info
        assert [*info.keys()] == ["raw_action", "mean", "log_std", "log_prob", "value"]
        assert (step.action.shape, step.action.dtype) == ((4, *space.shape), space.dtype)
        assert all(space.contains(np.asarray(row)) for row in step.action)
        assert info.raw_action.dtype == np.promote_types(space.dtype, np.float32)
        np.testing.assert_array_equal(np.clip(info.raw_action.astype(space.dtype), space.low, space.high), step.action)
        np.testing.assert_array_equal(info.mean, mean)
        np.testing.assert_array_equal(info.log_std, np.full_like(mean, -0.5) if model is MeanAndSum else log_std)
        normal = torch.distributions.Normal(torch.from_numpy(info.mean), torch.from_numpy(info.log_std.copy()).exp())
        expected = normal.log_prob(torch.from_numpy(info.raw_action).double()).reshape(4, -1).sum(1)
        assert (info.log_prob.shape, info.log_prob.dtype) == ((4,), np.float32)
        np.testing.assert_allclose(info.log_prob, expected.numpy(), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(info.value, mean.reshape(4, -1).sum(1), rtol=1e-6, atol=1e-6)


def test_draws_have_the_mean_and_the_deviation_of_the_model() -> None:
    agent = acting_gaussian(UNBOUNDED, range(64), initial_log_std=[np.log(0.5), np.log(3.0)])
    raw = np.concatenate([act(agent, np.tile([1.0, -2.0], (64, 1))).action for _ in range(300)])
    np.testing.assert_allclose(raw.mean(0), [1, -2], atol=0.1)
    np.testing.assert_allclose(raw.std(0), [0.5, 3], rtol=0.03)
    assert abs(np.corrcoef(raw.T)[0, 1]) < 0.03


def test_bounds_clip_the_action_and_leave_the_raw_one() -> None:
    space = spaces.Box(np.float32([-1, -np.inf]), np.float32([1, np.inf]))
    step = act(acting_gaussian(space), [[50.0, 50.0], [-50.0, -50.0]])
    assert step.action[:, 0].tolist() == [1, -1]
    np.testing.assert_array_equal(step.action[:, 1], step.agent_info.raw_action[:, 1])
    assert (np.abs(step.agent_info.raw_action) > 40).all()


def test_float64_actions_keep_their_digits() -> None:
    space = spaces.Box(-10, 10, (1,), np.float64)
    step = act(acting_gaussian(space, initial_log_std=-30.0), [[1 / 3], [2 / 3]])
    np.testing.assert_allclose(step.action, [[1 / 3], [2 / 3]], rtol=1e-12)


def test_greedy_eval_takes_the_mean_in_evaluation_alone() -> None:
    agent, mean = acting_gaussian(UNBOUNDED, greedy_eval=True), [[1.0, 2.0], [3.0, 4.0]]
    agent.eval_mode(0)
    assert act(agent, mean).action.tolist() == mean
    agent.sample_mode(0)
    assert act(agent, mean).action.tolist() != mean
    other = acting_gaussian(UNBOUNDED)
    other.eval_mode(0)
    assert act(other, mean).action.tolist() != mean


# ---- the deviation -----------------------------------------------------------------------------


def test_the_agents_deviation_is_a_parameter_of_the_model() -> None:
    learner = GaussianPgAgent(MeanAndSum, initial_log_std=-1.0)
    learner.initialize(UNBOUNDED, UNBOUNDED)
    assert "log_std" in dict(learner.model.named_parameters())
    assert learner.model.log_std.tolist() == [-1, -1]
    assert learner.model.log_std.dtype == torch.float64, "like the model's own"


def test_a_deviation_that_the_model_has_is_used() -> None:
    class Own(MeanAndSum):
        def __init__(self) -> None:
            super().__init__()
            self.log_std = nn.Parameter(torch.tensor([0.25, 0.5]))

    step = act(acting_gaussian(UNBOUNDED, model=Own), np.zeros((2, 2)))
    assert step.agent_info.log_std.tolist() == [[0.25, 0.5]] * 2


def test_the_model_may_return_its_own_parameter() -> None:
    class Returning(MeanAndSum):
        def __init__(self) -> None:
            super().__init__()
            self.deviation = nn.Parameter(torch.tensor([0.25, 0.5]))

        def forward(self, observation: torch.Tensor) -> Any:
            return observation, self.deviation, observation[:, 0]

    agent = acting_gaussian(UNBOUNDED, model=Returning, initial_log_std=None)
    assert act(agent, np.zeros((2, 2))).agent_info.log_std.tolist() == [[0.25, 0.5]] * 2
    assert not hasattr(agent.model, "log_std")


def test_with_none_nothing_is_added_and_the_model_must_give_it() -> None:
    agent = acting_gaussian(UNBOUNDED, initial_log_std=None)
    with pytest.raises(SpaceError, match=r"returned \(mean, value\) and has no parameter log_std of shape \(2,\)"):
        act(agent, np.zeros((2, 2)))


def test_an_initial_deviation_of_a_wrong_shape_is_refused() -> None:
    with pytest.raises(SpaceError, match=r"initial_log_std must be one number, or .* \(2,\), got shape \(3,\)"):
        acting_gaussian(UNBOUNDED, initial_log_std=[0, 0, 0])


SQUASHED = [
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


def act_squashed(agent: Any, mean: Any, log_std: Any) -> Any:
    return act(agent, np.stack([mean, log_std], axis=1))


@pytest.mark.parametrize("space", SQUASHED, ids=str)
def test_log_prob_is_that_of_torchs_transformed_distribution(space: Any) -> None:
    rng, agent = np.random.default_rng(0), acting_squashed(space, range(4))
    low, high = (torch.from_numpy(np.asarray(bound, np.float64)) for bound in (space.low, space.high))
    for _ in range(20):
        mean, log_std = rng.normal(size=(2, 4, *space.shape))
        step = act_squashed(agent, mean, log_std)
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
    agent = acting_squashed(SQUASHED[0], range(64))
    raw = np.concatenate(
        [
            act_squashed(agent, np.tile([0.5, -1.0], (64, 1)), np.zeros((64, 2))).agent_info.raw_action
            for _ in range(300)
        ]
    )
    np.testing.assert_allclose(raw.mean(0), [0.5, -1], atol=0.03)
    np.testing.assert_allclose(raw.std(0), 1, rtol=0.03)


def test_far_out_the_action_is_the_bound_and_log_prob_finite() -> None:
    step = act_squashed(acting_squashed(spaces.Box(-1, 3, (1,))), [[500.0], [-500.0]], [[0.0], [0.0]])
    assert step.action.tolist() == [[3], [-1]]
    assert np.isfinite(step.agent_info.log_prob).all()


def test_evaluations_take_the_mean_unless_told() -> None:
    mean, log_std = np.zeros((2, 2)), np.zeros((2, 2))
    for greedy in (True, False):
        agent = acting_squashed(SQUASHED[0], greedy_eval=greedy)
        agent.eval_mode(0)
        assert (act_squashed(agent, mean, log_std).action == 0).all() == greedy
        agent.sample_mode(0)
        assert not (act_squashed(agent, mean, log_std).action == 0).any()


def test_warming_up_is_uniform() -> None:
    agent = acting_squashed(spaces.Box(-1, 3, (1,)), range(64), warmup_random_itrs=1)
    agent.sample_mode(0)
    steps = [act_squashed(agent, np.zeros((64, 1)), np.zeros((64, 1))) for _ in range(200)]
    actions = np.concatenate([step.action for step in steps])
    observed, _ = np.histogram(actions, bins=8, range=(-1, 3))
    np.testing.assert_allclose(observed / actions.size, 1 / 8, atol=0.015)
    np.testing.assert_allclose(steps[0].agent_info.log_prob, np.log(1 / 4), rtol=1e-6)
    np.testing.assert_allclose(1 + 2 * np.tanh(steps[0].agent_info.raw_action), steps[0].action, rtol=1e-4, atol=1e-5)
    agent.sample_mode(1)
    raw = np.concatenate([act_squashed(agent, np.zeros((64, 1)), np.full((64, 1), -9.0)).action for _ in range(5)])
    np.testing.assert_allclose(raw, 1, atol=0.01)
