"""Sequences of a recurrent agent: from its stored state, a model computes what the agent computed."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock import ParallelSampler, RecurrentCategoricalPgAgent, WaitResetCollector
from penstock.envs import CountingEnv
from penstock.learning import Replay, Sequences

from ..scale import pairs, quick_first


class Memory(nn.Module):
    state_shape = (8,)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.policy, self.critic = nn.GRUCell(6, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, observation: Tensor, action: Tensor, reward: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        inputs = torch.cat([observation.float(), nn.functional.one_hot(action, 3), reward[:, None]], 1)
        state = self.cell(inputs, state)
        return self.policy(state), self.critic(state).squeeze(1), state


@pytest.mark.parametrize(
    ("how", "collector_cls"), quick_first(pairs([("step", 4), ("step", 3), ("batch", 8)], [None, WaitResetCollector]))
)
def test_a_model_computes_again_what_the_agent_computed(collector_cls: Any, how: tuple[Any, int]) -> None:
    record_state, every = how
    options = {} if collector_cls is None else {"collector_cls": collector_cls}
    replay = Replay(3 * 48, 2, sequences=Sequences(length=10, state_every=every), seed=0, max_truncations=99)
    recorded = []
    agent = RecurrentCategoricalPgAgent(Memory, record_state=record_state)
    with ParallelSampler(partial(CountingEnv, length=5), batch_T=8, batch_B=3, n_workers=2, **options) as sampler:
        sampler.initialize(agent, seed=0)
        for itr in range(10):
            samples, _ = sampler.obtain_samples(itr)
            replay.append(samples)
            recorded.append(samples.agent.agent_info.value.clone())
    values = torch.cat(recorded)
    batch = replay.sample(200)
    state, step, b = batch.state, batch.index // 3, batch.index % 3
    n_compared = 0
    with torch.no_grad():
        for t in range(len(batch.reward)):
            state = torch.where(batch.prev_done[t][:, None], 0.0, state)
            _, value, state = agent.model(batch.observation[t], batch.prev_action[t], batch.prev_reward[t], state)
            # Rows that are not valid have a value of 0, and the row after them begins an episode.
            is_valid = values[step + t, b] != 0
            torch.testing.assert_close(value[is_valid], values[step + t, b][is_valid], rtol=1e-6, atol=1e-6)
            n_compared += int(is_valid.sum())
    assert n_compared > 1000
    assert set((batch.index // 3 % every).tolist()) == {0}
    assert np.unique(batch.index).size > 10
