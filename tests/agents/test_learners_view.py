"""What a batch holds is enough for the learner: its model finds log_prob and value again, and ratios start at 1."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import pytest
import torch
from torch import distributions as D
from torch import nn

from penstock import (
    CategoricalPgAgent,
    EpsilonGreedyAgent,
    GaussianPgAgent,
    ParallelSampler,
    RecurrentCategoricalPgAgent,
    SquashedGaussianAgent,
)

from ..models import Modes

pytestmark = pytest.mark.slow

CARTPOLE = partial(gym.make, "CartPole-v1", max_episode_steps=25)
PENDULUM = partial(gym.make, "Pendulum-v1", max_episode_steps=12)


class Net(nn.Module):
    def __init__(self, n_inputs: int, n_outputs: int, scale: float = 1.0) -> None:
        super().__init__()
        self.out = nn.Linear(n_inputs, n_outputs + 1)
        self.scale = scale

    def forward(self, observation: Any) -> Any:
        x = observation if isinstance(observation, torch.Tensor) else observation.position.float()
        out = self.out(x)
        return self.scale * out[..., :-1], out[..., -1]


class Gru(nn.Module):
    state_shape = (6,)

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(4 + 2 + 1, 6), nn.Linear(6, 3)

    def forward(self, observation: Any, prev_action: Any, prev_reward: Any, state: Any) -> Any:
        one_hot = torch.nn.functional.one_hot(prev_action, 2).to(observation.dtype)
        state = self.cell(torch.cat([observation, one_hot, prev_reward[:, None]], 1), state)
        out = self.out(state)
        return out[:, :2], out[:, 2], state


def sample(agent: Any, env_fn: Any, n_batches: int = 1, bootstrap_value: bool = True) -> list[Any]:
    with ParallelSampler(env_fn, batch_T=30, batch_B=4, n_workers=2) as sampler:
        sampler.initialize(agent, seed=3, bootstrap_value=bootstrap_value)
        return [sampler.obtain_samples(itr)[0].copy() for itr in range(n_batches)]


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one.detach().float(), other, rtol=1e-4, atol=1e-5)


def test_of_a_categorical_policy() -> None:
    agent = CategoricalPgAgent(lambda: Net(4, 2))
    (samples,) = sample(agent, CARTPOLE)
    logits, value = agent.model(samples.env.observation)
    close(D.Categorical(logits=logits).log_prob(samples.agent.action), samples.agent.agent_info.log_prob)
    close(value, samples.agent.agent_info.value)


def test_of_a_multi_discrete_policy() -> None:
    agent = CategoricalPgAgent(lambda: Net(3, 5))
    (samples,) = sample(agent, Modes)
    logits, _ = agent.model(samples.env.observation)
    action = samples.agent.action
    log_prob = sum(
        D.Categorical(logits=part).log_prob(action[..., i]) for i, part in enumerate(logits.split([2, 3], dim=-1))
    )
    close(log_prob, samples.agent.agent_info.log_prob)


def test_of_a_gaussian_policy_at_the_raw_action() -> None:
    agent = GaussianPgAgent(lambda: Net(3, 1, scale=4.0), initial_log_std=-0.5)
    (samples,) = sample(agent, PENDULUM)
    info = samples.agent.agent_info
    mean, value = agent.model(samples.env.observation)
    log_prob = D.Normal(mean, agent.model.log_std.exp()).log_prob(info.raw_action).sum(-1)
    close(log_prob, info.log_prob)
    close(value, info.value)
    torch.testing.assert_close(info.raw_action.clamp(-2, 2), samples.agent.action)
    assert (info.raw_action.abs() > 2).any(), "there was something to clip"
    log_prob.sum().backward()
    assert agent.model.log_std.grad is not None


def test_of_a_squashed_policy() -> None:
    class Both(Net):
        def forward(self, observation: Any) -> Any:
            (out, _) = super().forward(observation)
            return out[..., :1], out[..., 1:]

    agent = SquashedGaussianAgent(lambda: Both(3, 2))
    (samples,) = sample(agent, PENDULUM, bootstrap_value=False)
    close(agent.action_of(samples.agent.agent_info.raw_action), samples.agent.action)
    mean, _ = agent.model(samples.env.observation)
    close(mean, samples.agent.agent_info.mean)


def test_of_q() -> None:
    agent = EpsilonGreedyAgent(lambda: nn.Linear(4, 2), epsilon=0.3)
    (samples,) = sample(agent, CARTPOLE)
    q = agent.model(samples.env.observation)
    info = samples.agent.agent_info
    close(q.gather(2, samples.agent.action[..., None])[..., 0], info.q)
    assert (q.argmax(2) == samples.agent.action)[~info.explored].all()
    assert info.explored.any()


def test_of_a_recurrent_policy_step_by_step() -> None:
    agent = RecurrentCategoricalPgAgent(Gru)
    before, samples = sample(agent, CARTPOLE, n_batches=2)
    info = samples.agent.agent_info
    begins = torch.cat([before.env.done[-1:], samples.env.done[:-1]])
    assert begins.any()
    # An episode's first step has no action and reward before it; the batch shows those of the episode before.
    prev_action, prev_reward = samples.agent.prev_action * ~begins, samples.env.prev_reward * ~begins
    for t in range(30):
        inputs = samples.env.observation[t], prev_action[t], prev_reward[t], info.prev_rnn_state[t]
        logits, value, state = agent.model(*inputs)
        close(D.Categorical(logits=logits).log_prob(samples.agent.action[t]), info.log_prob[t])
        close(value, info.value[t])
        if t < 29:
            close(state * ~begins[t + 1][:, None], info.prev_rnn_state[t + 1])
