"""BoxActions: bounds of every kind, in the form that agents compute with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from penstock.agents.distributions import BoxActions
from penstock.errors import SpaceError

HALF = spaces.Box(np.array([-1, -np.inf, 0, -np.inf], np.float32), np.array([3, 2, np.inf, np.inf], np.float32))


def test_center_and_half_range_are_those_of_bounded_dimensions() -> None:
    box = BoxActions(HALF, "A")
    assert box.center.tolist() == [1, 0, 0, 0]
    assert box.half_range.tolist() == [2, 1, 1, 1]


def test_only_where_there_are_bounds_is_clipped() -> None:
    box = BoxActions(HALF, "A")
    clipped = box.clip(np.array([[-9.0] * 4, [9.0] * 4]))
    assert clipped.tolist() == [[-1, -9, 0, -9], [3, 2, 9, 9]]
    assert clipped.dtype == np.float32


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_largest_numbers_of_a_type_do_not_overflow(dtype: Any) -> None:
    limit = np.finfo(dtype).max
    box = BoxActions(spaces.Box(-limit, limit, (2,), dtype), "A", bounded=True)
    corners = box.scale(np.array([[-1.0, 1.0]]))
    assert corners.tolist() == [[-limit, limit]]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_squashed_actions_lie_in_the_space_whatever_the_bounds(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    low = rng.normal(size=(3, 2)).astype(dtype)
    space = spaces.Box(low, low + np.abs(rng.normal(size=(3, 2))).astype(dtype), dtype=dtype)
    box = BoxActions(space, "A", bounded=True)
    for row in box.scale(rng.choice([-1.0, 0.0, 0.3, 1.0], size=(50, 3, 2))):
        assert space.contains(row)


def test_tensors_are_scaled_alike_and_with_gradients() -> None:
    box = BoxActions(spaces.Box(np.float32([-1, 0]), np.float32([3, 10])), "A", bounded=True)
    x = torch.tensor([[0.5, -1.0]], dtype=torch.float64, requires_grad=True)
    action = box.scale_torch(x)
    np.testing.assert_allclose(action.detach().numpy(), box.scale(x.detach().numpy()))
    action.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[2, 5]]


@pytest.mark.parametrize(
    "space", [spaces.Discrete(3), spaces.Box(0, 9, (2,), np.int64), spaces.Dict({"a": spaces.Box(0, 1)})], ids=str
)
def test_other_spaces_are_refused_with_the_agents_name(space: Any) -> None:
    with pytest.raises(SpaceError, match=r"SomeAgent needs a Box action space of a floating-point type"):
        BoxActions(space, "SomeAgent")


def test_squashing_needs_bounds() -> None:
    with pytest.raises(SpaceError, match=r"SomeAgent squashes .*, but not every dimension of .* has two bounds"):
        BoxActions(HALF, "SomeAgent", bounded=True)
