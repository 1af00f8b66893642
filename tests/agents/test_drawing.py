"""Random elements of a space: inside it, as many as asked, and from the caller's stream alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from penstock.agents import draw
from penstock.buffers import NamedArrays
from penstock.envs import action_splitter, example_of
from penstock.errors import SpaceError

from ..envs.space_strategies import any_space, at, discrete, leaf_paths
from ..scale import examples
from ..support import leaves

pytestmark = pytest.mark.slow

seeds = st.integers(0, 2**32)


def drawn_from(space: Any, n: int, seed: int = 0) -> Any:
    return draw(space, np.random.default_rng(seed), n)


def names_of(tree: Any) -> list[str]:
    return [name for name, _ in tree.leaves()] if isinstance(tree, NamedArrays) else []


@examples(25, 200)
@given(any_space, st.integers(0, 50), seeds)
def test_as_many_elements_of_the_space_as_asked_come_from_the_given_stream_alone(space: Any, n: int, seed: int) -> None:
    drawn = drawn_from(space, n, seed)
    assert names_of(drawn) == names_of(example_of(space))
    for (_, leaf_space), values in zip(leaf_paths(space), leaves(drawn), strict=True):
        assert (values.shape, values.dtype) == ((n, *leaf_space.shape), leaf_space.dtype)
    for action in action_splitter(space)(drawn) if n else ():
        for path, leaf in leaf_paths(space):
            value = at(action, path)
            assert leaf.contains(value if isinstance(leaf, spaces.Discrete) else np.asarray(value))
    space.seed(1)
    for a, b in zip(leaves(drawn), leaves(drawn_from(space, n, seed)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("n", [1, 2, 7, 2**31, 2**40])
def test_numbers_that_are_drawn_one_by_one_are_those_of_one_call(n: int) -> None:
    space, rngs = spaces.Discrete(n, start=-3), [np.random.default_rng(5) for _ in range(3)]
    one_by_one = np.concatenate([draw(space, rngs[0], 1) for _ in range(9)])
    assert one_by_one.tolist() == draw(space, rngs[1], 9).tolist() == rngs[2].integers(-3, n - 3, 9).tolist()
    assert len({rng.bit_generator.state["state"]["state"] for rng in rngs}) == 1


def test_another_stream_gives_other_draws_and_a_stream_advances() -> None:
    space, rng = spaces.Box(0, 1, (3,)), np.random.default_rng(0)
    found = [draw(space, rng, 10), draw(space, rng, 10), drawn_from(space, 10, seed=1)]
    assert len(np.unique(found)) == 90


# ---- distributions: as Gymnasium's `sample` ----------------------------------------------------

N = 20_000


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(4),
        spaces.Discrete(3, start=-1),
        discrete(3, 125, np.int8),
        spaces.MultiDiscrete([4, 4]),
        spaces.MultiDiscrete([3, 3], start=[-1, -3]),
        spaces.MultiDiscrete([3], np.int8, start=[125]),
        spaces.MultiBinary(3),
        spaces.Box(-2, 3, (2,), np.int64),
        spaces.Box(0, 3, (), np.uint8),
        spaces.Box(0, 1, (2,), np.bool_),
    ],
    ids=str,
)
def test_each_value_of_a_finite_space_is_as_likely_as_any(space: Any) -> None:
    # One line per element of the shape: each has its own range.
    draws = drawn_from(space, N).astype(np.int64).reshape(N, -1)
    if isinstance(space, spaces.Box):
        low, high = space.low.astype(np.int64).ravel(), space.high.astype(np.int64).ravel()
    elif isinstance(space, spaces.MultiDiscrete):
        low, high = space.start, space.start + (space.nvec - 1)
    else:
        start, n = (int(space.start), int(space.n)) if isinstance(space, spaces.Discrete) else (0, 2)
        low, high = np.full(draws.shape[1], start), np.full(draws.shape[1], start + n - 1)
    for column, first, last in zip(draws.T, low, high, strict=True):
        values, frequencies = np.unique(column, return_counts=True)
        assert values.tolist() == [*range(int(first), int(last) + 1)]
        p = 1 / len(values)
        assert np.abs(frequencies / N - p).max() < 5 * np.sqrt(p * (1 - p) / N)


def distance(one: Any, other: Any) -> float:
    """The largest difference between two empirical distributions (Kolmogorov and Smirnov's)."""
    grid = np.union1d(one, other)
    cumulative = [np.searchsorted(np.sort(sample), grid, side="right") / len(sample) for sample in (one, other)]
    return float(np.abs(cumulative[0] - cumulative[1]).max())


INF = np.inf
BOUNDS = {
    "uniform": ([-2, 0], [4, 1]),
    "exponential above": ([5], [INF]),
    "exponential below": ([-INF], [-5]),
    "normal": ([-INF], [INF]),
    "all at once": ([0, 5, -INF, -INF], [1, INF, -5, INF]),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int8])
@pytest.mark.parametrize("bounds", BOUNDS)
def test_a_box_is_drawn_as_gymnasium_samples_it(bounds: str, dtype: Any) -> None:
    floats = dtype if np.dtype(dtype).kind == "f" else np.float64  # whole numbers cannot be infinite
    low, high = (np.array(side, floats) for side in BOUNDS[bounds])
    ours = drawn_from(spaces.Box(low.copy(), high.copy(), dtype=dtype), N)
    theirs = spaces.Box(np.tile(low, (N, 1)), np.tile(high, (N, 1)), dtype=dtype, seed=1).sample()
    assert ours.dtype == theirs.dtype
    for i in range(len(low)):
        assert distance(ours[:, i], theirs[:, i]) < 2.7 * np.sqrt(2 / N)


def test_the_whole_range_of_an_integer_is_drawn_from() -> None:
    bounds = np.iinfo(np.int64)
    draws = drawn_from(spaces.Box(bounds.min, bounds.max - 1, (), np.int64), 1000).astype(np.float64)
    assert draws.min() < 0.9 * bounds.min
    assert draws.max() > 0.9 * bounds.max


@pytest.mark.parametrize("space", [spaces.Text(3), spaces.Dict({"a": spaces.Text(3)})], ids=str)
def test_what_cannot_be_recorded_cannot_be_drawn(space: Any) -> None:
    with pytest.raises(SpaceError, match="cannot draw from a Text space"):
        drawn_from(space, 1)
