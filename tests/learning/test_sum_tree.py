"""The sum tree: in C and in numpy the same to the last bit, exact, and drawn in proportion."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.learning import sum_tree
from penstock.learning.compiled import COMPILED, PYTHON
from penstock.learning.sum_tree import SumTree

from ..scale import scaled
from .test_drawing import p_value

values = st.floats(0, 1e6) | st.sampled_from([0.0, 1e-300, 1e300, 1.0])


@pytest.fixture(params=["compiled", "numpy"])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "compiled" and not COMPILED:
        pytest.skip("was built without a C compiler")
    if request.param == "numpy":
        for name in filter(re.compile("tree_").match, PYTHON):
            monkeypatch.setattr(sum_tree, name, PYTHON[name])
    return str(request.param)


@pytest.mark.skipif(not COMPILED, reason="was built without a C compiler")
@settings(deadline=None)
@given(size=st.integers(1, 70), data=st.data())
def test_both_versions_are_equal_to_the_last_bit(size: int, data: st.DataObject) -> None:
    trees = [SumTree(size), SumTree(size)]

    def on_both(name: str, *arguments: Any) -> list[Any]:
        compiled = getattr(sum_tree, name)
        results = []
        for tree, fn in zip(trees, (compiled, PYTHON[name]), strict=True):
            own = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
            returned = fn(tree.sums, *([] if name in ("tree_draw", "tree_ratios") else [tree.maxima]), *own)
            results.append((returned if name == "tree_assign" else None, own[-1].tobytes()))
        return results

    for _ in range(data.draw(st.integers(1, 6))):
        leaves = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=9)), np.int64)
        on_both("tree_update", leaves, np.array([data.draw(values) for _ in leaves], np.float64))
        first = data.draw(st.integers(0, size))
        on_both("tree_range", first, np.array([data.draw(values) for _ in range(min(5, size - first))]))
        low = data.draw(st.integers(0, 200))
        places = np.array(data.draw(st.lists(st.integers(low - 3, low + size), max_size=9)), np.int64)
        priorities = np.array([data.draw(values) for _ in places], np.float64)
        first_result, second_result = on_both(
            "tree_assign", size, low, low + size, places, priorities, priorities.copy() ** 0.5
        )
        assert first_result == second_result
        assert trees[0].sums.tobytes() == trees[1].sums.tobytes()
        assert trees[0].maxima.tobytes() == trees[1].maxima.tobytes()
        mass = np.array(data.draw(st.lists(st.floats(0, 1), max_size=9)), np.float64) * trees[0].total
        first_result, second_result = on_both("tree_draw", mass, size, low, np.zeros(len(mass), np.int64))
        assert first_result == second_result
        drawn = trees[0].draw(mass, low)
        assert ((drawn >= low) & (drawn < low + size)).all()
        if trees[0].total:
            first_result, second_result = on_both("tree_ratios", size, drawn, np.zeros(len(mass)))
            assert first_result == second_result


@pytest.mark.parametrize("n_leaves", [1, 2, 3, 4, 5, 64, 65])
def test_the_size_is_as_estimated(n_leaves: int) -> None:
    tree = SumTree(n_leaves)
    assert tree.sums.nbytes + tree.maxima.nbytes == SumTree.nbytes(n_leaves) < 64 * (n_leaves + 1)
    assert len(tree.leaves) == n_leaves


@pytest.mark.slow
def test_the_root_has_no_drift(version: str) -> None:
    rng, tree = np.random.default_rng(0), SumTree(1000)
    for _ in range(2000 if version == "numpy" else scaled(40_000, 15_000)):
        tree.update(rng.integers(0, 1000, 256), rng.exponential(size=256) ** 8)
    assert tree.total == pytest.approx(math.fsum(tree.leaves), rel=1e-12)
    assert tree.largest == tree.leaves.max()
    tree.set_range(0, np.zeros(1000))
    assert (tree.total, tree.largest) == (0, 0)


def test_draws_are_in_proportion_and_never_of_zero(version: str) -> None:
    rng, tree = np.random.default_rng(1), SumTree(77)
    leaves = rng.random(77) * (rng.random(77) < 0.7)
    tree.set_range(0, leaves)
    counts = np.zeros(77)
    n_rounds = 20 if version == "numpy" else scaled(5000, 200)
    for _ in range(n_rounds):
        counts += np.bincount(tree.draw(rng.random(20_000) * tree.total), minlength=77)
    assert not counts[leaves == 0].any()
    drawn = leaves > 0
    assert p_value(counts[drawn], (counts.sum() * leaves / leaves.sum())[drawn]) > 1e-3


@pytest.mark.parametrize("n_leaves", [1, 2, 3, 8, 100])
def test_no_mass_falls_into_a_leaf_of_zero_even_at_the_edges(version: str, n_leaves: int) -> None:
    rng = np.random.default_rng(2)
    for _ in range(50):
        tree = SumTree(n_leaves)
        leaves = rng.exponential(size=n_leaves) ** 20 * (rng.random(n_leaves) < 0.5)
        tree.set_range(0, leaves)
        if tree.total:
            edges = np.concatenate([leaves.cumsum(), [0.0, tree.total, np.nextafter(tree.total, np.inf)]])
            assert (leaves[tree.draw(edges)] > 0).all()


def test_a_range_wraps_and_the_last_of_equal_leaves_counts(version: str) -> None:
    tree = SumTree(5)
    tree.set_range(13, np.array([1.0, 2.0, 3.0, 4.0]))
    assert tree.leaves.tolist() == [3, 4, 0, 1, 2]
    tree.update(np.array([2, 2, 2]), np.array([9.0, 8.0, 7.0]))
    assert tree.leaves.tolist() == [3, 4, 7, 1, 2]
    assert (tree.total, tree.largest) == (17, 7)


def test_assigned_places_wrap_and_the_largest_of_equal_ones_counts(version: str) -> None:
    tree = SumTree(5)
    tree.set_range(13, np.ones(5))
    ones = np.ones(5)
    n_left_out = tree.assign(13, 18, np.array([14, 17, 14, 3, 14]), ones, np.array([2.0, 3.0, 9.0, 7.0, 4.0]))
    assert n_left_out == 1
    assert tree.leaves.tolist() == [1, 1, 3, 1, 9]
    assert (tree.total, tree.largest) == (15, 9)
    assert tree.draw(np.array([0.0, 1.0, 2.0, 5.0, 14.5]), 13).tolist() == [15, 16, 17, 13, 14]
    assert tree.ratios(np.array([14, 17])).tolist() == [3, 1]
    tree.set_range(13, np.zeros(1))
    before = tree.sums.copy(), tree.maxima.copy()
    # A leaf of 0, a place that is too high or negative, and numbers that are not above 0 and finite.
    for place, priority, value in (
        (13, 1.0, 1.0),
        (18, 1.0, 1.0),
        (-1, 1.0, 1.0),
        *((15, bad, 1.0) for bad in (0.0, -1.0, np.inf, np.nan)),
        *((15, 1.0, bad) for bad in (0.0, -1.0, np.inf, np.nan)),
    ):
        places = np.array([16, place])
        assert tree.assign(13, 18, places, np.array([1.0, priority]), np.array([5.0, value])) == -1
    assert all((a == b).all() for a, b in zip(before, (tree.sums, tree.maxima), strict=True))


@pytest.mark.skipif(not COMPILED, reason="was built without a C compiler")
def test_wrong_arguments_are_refused_before_anything_is_written() -> None:
    tree, one = SumTree(4), np.ones(1)
    with pytest.raises(IndexError):
        sum_tree.tree_update(tree.sums, tree.maxima, np.array([4]), one)
    with pytest.raises(IndexError):
        sum_tree.tree_update(tree.sums, tree.maxima, np.array([0, 1]), one)
    with pytest.raises(IndexError):
        sum_tree.tree_range(tree.sums, tree.maxima, 4, one)
    place = np.zeros(1, np.int64)
    with pytest.raises(TypeError):
        sum_tree.tree_draw(tree.sums, one.astype(np.float32), 4, 0, place)
    for n_leaves, low, places in ((4, 0, np.zeros(2, np.int64)), (5, 0, place), (0, 0, place), (4, -1, place)):
        with pytest.raises(ValueError):
            sum_tree.tree_draw(tree.sums, one, n_leaves, low, places)
    for n_leaves, low, high, value in (
        (5, 0, 4, one),
        (0, 0, 0, one),
        (4, 0, 5, one),
        (4, 2, 1, one),
        (4, 0, 4, one[:0]),
    ):
        with pytest.raises(ValueError):
            sum_tree.tree_assign(tree.sums, tree.maxima, n_leaves, low, high, place, one, value)
    with pytest.raises(ValueError):
        sum_tree.tree_ratios(tree.sums, 5, place, one)
    assert tree.total == 0
