"""GaussianPgAgent: draws from normal distributions, clips for the environment, records what to train on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from penstock.agents import GaussianPgAgent
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
