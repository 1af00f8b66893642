"""CategoricalPgAgent on MultiDiscrete spaces: one distribution per component, side by side in the logits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from penstock.agents import CategoricalPgAgent

from ..models import LogitsAndFirst, act, acting


def acting_multi_discrete(space: spaces.MultiDiscrete, columns: range, **options: Any) -> Any:
    logits = spaces.Box(-np.inf, np.inf, (int(space.nvec.sum()),))
    return acting(CategoricalPgAgent(LogitsAndFirst, **options), logits, space, columns)


def components(space: spaces.MultiDiscrete, logits: Any, action: Any) -> list[tuple[Any, Any]]:
    """Per component, torch's distribution and the index that was taken."""
    nvec, index = space.nvec.ravel(), (action - space.start).reshape(len(action), -1)
    bounds = np.cumsum([0, *nvec])
    return [
        (torch.distributions.Categorical(logits=torch.from_numpy(logits[:, a:b])), torch.from_numpy(index[:, i]))
        for i, (a, b) in enumerate(pairwise(bounds))
    ]


SPACES = [
    spaces.MultiDiscrete([3, 3]),
    spaces.MultiDiscrete([2, 5, 1, 3]),
    spaces.MultiDiscrete([4]),
    spaces.MultiDiscrete([[2, 3], [4, 1]]),
    spaces.MultiDiscrete([2, 3], start=[-5, 7]),
    spaces.MultiDiscrete([2, 3], dtype=np.int32),
    spaces.MultiDiscrete([2, 3], dtype=np.uint8, start=[1, 2]),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_actions_are_of_the_space_and_log_prob_is_the_sum_of_torchs(space: spaces.MultiDiscrete) -> None:
    logits = np.random.default_rng(0).normal(0, 2, (6, int(space.nvec.sum())))
    agent = acting_multi_discrete(space, range(6))
    for _ in range(30):
        step = act(agent, logits)
        assert step.action.dtype == space.dtype
        assert all(space.contains(row) for row in step.action)
        expected = sum(d.log_prob(index) for d, index in components(space, logits, step.action.astype(np.int64)))
        assert step.agent_info.log_prob.dtype == np.float32
        np.testing.assert_allclose(step.agent_info.log_prob, expected, rtol=1e-6)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_frequencies_are_those_of_each_components_softmax(space: spaces.MultiDiscrete) -> None:
    row = np.random.default_rng(1).normal(size=int(space.nvec.sum()))
    logits, agent = np.tile(row, (64, 1)), acting_multi_discrete(space, range(64))
    actions = np.concatenate([act(agent, logits).action for _ in range(200)]).astype(np.int64)
    for distribution, index in components(space, np.tile(row, (len(actions), 1)), actions):
        p = distribution.probs[0].numpy()
        observed = np.bincount(index, minlength=len(p)) / len(actions)
        assert (np.abs(observed - p) <= 4.5 * np.sqrt(p * (1 - p) / len(actions)) + 1e-9).all()


def test_components_are_independent() -> None:
    agent = acting_multi_discrete(spaces.MultiDiscrete([2, 2]), range(64))
    actions = np.concatenate([act(agent, np.zeros((64, 4))).action for _ in range(200)])
    assert abs(np.corrcoef(actions.T)[0, 1]) < 0.04


def test_greedy_eval_takes_each_components_most_probable() -> None:
    agent = acting_multi_discrete(spaces.MultiDiscrete([2, 3], start=[0, 10]), range(2), greedy_eval=True)
    agent.eval_mode(0)
    assert act(agent, [[0, 1, 2, 1, 0], [1, 0, 0, 0, 3]]).action.tolist() == [[1, 10], [0, 12]]
