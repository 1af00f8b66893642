"""`record_distribution=True`: the batch has all parameters of the distribution."""

from typing import Any

import pytest
import torch
from torch import nn

from penstock import (
    CategoricalPgAgent,
    GaussianPgAgent,
    GpuSampler,
    ParallelSampler,
    RecurrentCategoricalPgAgent,
    SerialSampler,
)
from penstock.envs import CountingEnv

from ..models import Gru, Net
from ..scale import pairs, quick_first


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.critic = nn.Linear(2, 3), nn.Linear(2, 1)

    def forward(self, observation: torch.Tensor) -> Any:
        x = observation * 0.1
        return self.policy(x), self.critic(x)


@pytest.mark.parametrize(
    ("cls", "inference"), quick_first(pairs([SerialSampler, ParallelSampler, GpuSampler], ["torch", "numpy"]))
)
def test_the_logits_are_those_that_the_actions_were_drawn_from(cls: Any, inference: Any) -> None:
    plain, recording = (CategoricalPgAgent(Model, record_distribution=r, inference=inference) for r in (False, True))
    found = []
    for agent in (plain, recording):
        with cls(CountingEnv, batch_T=12, batch_B=3, n_workers=2) as sampler:
            sampler.initialize(agent, seed=0, bootstrap_value=True)
            found.append(sampler.obtain_samples(0)[0].copy())
    one, two = found
    assert set(two.agent.agent_info.keys()) - set(one.agent.agent_info.keys()) == {"logits"}
    assert torch.equal(one.agent.action, two.agent.action)
    logits = two.agent.agent_info.logits
    assert logits.shape == (12, 3, 3)
    torch.testing.assert_close(logits, recording.model(two.env.observation)[0].detach())
    log_prob = torch.distributions.Categorical(logits=logits).log_prob(two.agent.action)
    torch.testing.assert_close(log_prob, two.agent.agent_info.log_prob)


def test_other_agents_record_theirs() -> None:
    with SerialSampler(CountingEnv, batch_T=4, batch_B=2) as sampler:
        sampler.initialize(RecurrentCategoricalPgAgent(lambda: Gru(2, 3), record_distribution=True), seed=0)
        info = sampler.obtain_samples(0)[0].agent.agent_info
        assert set(info.keys()) == {"log_prob", "value", "logits", "prev_rnn_state"}
        assert info.logits.shape == (4, 2, 3)
    with SerialSampler("Pendulum-v1", batch_T=4, batch_B=2) as sampler:
        sampler.initialize(GaussianPgAgent(lambda: Net(3, 1, 0), record_distribution=True), seed=0)
        info = sampler.obtain_samples(0)[0].agent.agent_info
        assert set(info.keys()) == {"raw_action", "mean", "log_std", "log_prob", "value"}
