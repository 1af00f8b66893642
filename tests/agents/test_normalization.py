"""ObservationNorm and RewardNorm: exact statistics, equal for any number of workers, and published with the model."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock import CategoricalPgAgent, ConfigError, ParallelSampler, SpaceError
from penstock.agents import Moments, ObservationNorm, RewardNorm
from penstock.envs import CountingEnv


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rewards = ObservationNorm(2, clip=3.0), RewardNorm(0.9)
        self.policy, self.critic = nn.Linear(2, 3), nn.Linear(2, 1)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.norm(observation)
        return self.policy(x), self.critic(x)


def rows_of(rng: np.random.Generator, n: int) -> Any:
    return rng.normal(1000.0, 3.0, (n, 4, 2, 3)).astype(np.float32)


@pytest.mark.parametrize("kind", [torch.from_numpy, np.asarray])
def test_the_statistics_are_those_of_all_rows_together(kind: Any) -> None:
    rng, norm = np.random.default_rng(0), ObservationNorm((2, 3), clip=2.0)
    batches = [rows_of(rng, n) for n in (7, 1, 40)]
    for batch in batches:
        norm.update(kind(batch))
    whole = np.concatenate(batches).astype(np.float64)
    assert norm.count == 48 * 4
    np.testing.assert_allclose(norm.moments.mean, whole.mean((0, 1)), rtol=1e-14)
    np.testing.assert_allclose(norm.moments.squares / norm.count, whole.var((0, 1)), rtol=1e-12)
    np.testing.assert_allclose(norm.std.numpy(), whole.std((0, 1)), rtol=1e-6)
    expected = ((whole - whole.mean((0, 1))) / whole.std((0, 1))).clip(-2, 2)
    np.testing.assert_allclose(norm(torch.from_numpy(np.concatenate(batches))).numpy(), expected, atol=2e-4)


def test_the_last_dimensions_may_share_their_statistics() -> None:
    norm, images = ObservationNorm(3), np.arange(5 * 2 * 4 * 4 * 3, dtype=np.uint8).reshape(5, 2, 4, 4, 3)
    norm.update(images)
    np.testing.assert_allclose(norm.mean.numpy(), images.reshape(-1, 3).mean(0), rtol=1e-6)
    assert norm(torch.from_numpy(images)).shape == images.shape


def test_rows_that_are_not_valid_are_left_out() -> None:
    rows, valid = np.arange(12.0).reshape(3, 2, 2), np.array([[True, False], [True, True], [False, True]])
    norm = ObservationNorm((2,))
    norm.update(rows, torch.from_numpy(valid))
    assert norm.count == 4
    np.testing.assert_allclose(norm.moments.mean, rows[valid].mean(0))
    norm.update(rows, np.zeros((3, 2), bool))
    assert norm.count == 4


@pytest.mark.parametrize("discount", [0.0, 0.9, 1.0])
def test_rewards_are_scaled_as_by_gymnasiums_wrapper(discount: float) -> None:
    rng = np.random.default_rng(1)
    reward, done = rng.normal(2.0, 5.0, (60, 3)).astype(np.float32), rng.random((60, 3)) < 0.2
    norm = RewardNorm(discount)
    for rows in np.split(np.arange(60), [1, 20, 35]):  # returns go on in the next batch
        norm.update(reward[rows], torch.from_numpy(done[rows]))
    returns, running = [], np.zeros(3)
    for r, d in zip(reward, done, strict=True):
        returns.append(running := running * discount + r)
        running = np.where(d, 0.0, running)
    np.testing.assert_allclose(norm.std.item(), np.std(returns), rtol=1e-6)
    scaled = norm(torch.from_numpy(reward))
    np.testing.assert_allclose(scaled.numpy(), (reward / np.std(returns)).clip(-10, 10), rtol=1e-5)


@pytest.mark.parametrize("inference", ["numpy", "torch", "traced"])
def test_workers_act_with_published_statistics(inference: Any) -> None:
    agent = CategoricalPgAgent(Model, inference=inference)
    with ParallelSampler(CountingEnv, batch_T=10, batch_B=3, n_workers=2) as sampler:
        sampler.initialize(agent, seed=0)
        for itr in range(3):
            samples, _ = sampler.obtain_samples(itr)
            with torch.no_grad():
                value = agent.model(samples.env.observation)[1].squeeze(-1)
            torch.testing.assert_close(samples.agent.agent_info.value, value)
            agent.model.norm.update(samples.env.observation)
            agent.sync_shared_memory()
    assert agent.model.norm.std.min() > 0.5
    assert agent.model.norm.std.max() != 1


def test_a_saved_model_continues_with_the_exact_statistics() -> None:
    rng, model = np.random.default_rng(0), Model()
    batches = [rng.normal(5.0, 2.0, (9, 4, 2)).astype(np.float32) for _ in range(2)]
    rewards, done = rng.normal(size=(2, 9, 4)), rng.random((2, 9, 4)) < 0.1

    def update(model: Any, i: int) -> None:
        model.norm.update(batches[i])
        model.rewards.update(rewards[i], done[i])

    update(model, 0)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = Model()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for other in (model, loaded):
        update(other, 1)
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name


def test_parts_of_several_processes_are_merged() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(n, 4, 2)) for n in (3, 8)]
    merged, whole = ObservationNorm(2), ObservationNorm(2)
    for part in parts:
        merged.merge(ObservationNorm(2).moments_of(part))
    whole.update(np.concatenate(parts))
    np.testing.assert_allclose(merged.moments.mean, whole.moments.mean, rtol=1e-13)
    np.testing.assert_allclose(merged.moments.squares, whole.moments.squares, rtol=1e-12)
    assert Moments.of(np.zeros((0, 2))).with_others(whole.moments).n_rows == 44


def test_wrong_values_are_named() -> None:
    with pytest.raises(SpaceError, match=r"ObservationNorm\(\(4,\)\) got observations of shape \(2, 3, 5\)"):
        ObservationNorm(4).update(np.zeros((2, 3, 5)))
    norm = ObservationNorm(2)
    with pytest.raises(SpaceError, match="finite"):
        norm.update(np.array([[[1.0, np.nan]]]))
    assert norm.count == 0
    with pytest.raises(ConfigError, match="clip"):
        ObservationNorm(2, clip=0.0)
