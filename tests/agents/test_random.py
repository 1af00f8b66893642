"""The random agent: each column's actions are its own, wherever the column is."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from penstock.agents import RandomAgent
from penstock.envs import NestedEnv, action_splitter

from .. import models
from ..envs.space_strategies import any_space
from ..models import acting
from ..scale import examples
from ..support import leaves

OBSERVATIONS = spaces.Box(0, 1, (2,))


def acting_at_random(space: Any, columns: range, seed: int = 0) -> Any:
    return acting(RandomAgent(), OBSERVATIONS, space, columns, seed)


def act(agent: Any, columns: range) -> Any:
    return models.act(agent, np.zeros((len(columns), 2)), np.float32).action


def trajectory(space: Any, columns: range, n_steps: int, seed: int = 0) -> list[Any]:
    """For each leaf of the action space, `[T, B, ...]`."""
    agent = acting_at_random(space, columns, seed)
    rows = [leaves(act(agent, columns).copy()) for _ in range(n_steps)]
    return [np.stack(leaf) for leaf in zip(*rows, strict=True)]


@examples(10, 30)
@given(any_space, st.lists(st.integers(1, 3), min_size=1, max_size=3), st.sampled_from([1, 130, 260]))
def test_actions_are_the_same_bit_for_bit_however_columns_are_split(space: Any, widths: list[int], n: int) -> None:
    bounds = np.cumsum([0, *widths]).tolist()
    parts = [trajectory(space, range(a, b), n) for a, b in pairwise(bounds)]
    for whole, *pieces in zip(trajectory(space, range(bounds[-1]), n), *parts, strict=True):
        assert np.concatenate(pieces, axis=1).tobytes() == whole.tobytes()


def test_columns_and_seeds_have_actions_of_their_own() -> None:
    space = spaces.Box(0, 1, (2,), np.float64)
    (one,), (other,) = trajectory(space, range(4), 10, seed=0), trajectory(space, range(4), 10, seed=1)
    everything = np.concatenate([one, other]).ravel()
    assert len(np.unique(everything)) == everything.size


def test_actions_are_contained_in_a_nested_space_and_reported_without_further_ado() -> None:
    space, columns = NestedEnv().action_space, range(3)
    agent = acting_at_random(space, columns)
    step = agent.step(None, None, np.zeros(3, np.float32))
    assert all(space.contains(action) for action in action_splitter(space)(step.action))
    assert len(step.agent_info) == 0


@pytest.mark.parametrize("n", [1, 5])
def test_values_are_zero_one_per_row(n: int) -> None:
    value = acting_at_random(spaces.Discrete(2), range(2)).value(None, None, np.zeros(n, np.float32))
    assert (value.tolist(), value.dtype) == ([0.0] * n, np.float32)


def test_there_are_no_parameters() -> None:
    assert RandomAgent().read_parameters() == {}
