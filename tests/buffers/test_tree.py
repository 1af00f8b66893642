"""Nested dicts and tuples: mapped leaf by leaf, and listed by name."""

from collections import OrderedDict

import pytest

from penstock.buffers.tree import map_tree, tree_leaves

TREE = {"a": 1, "b": (2, OrderedDict(c=3)), 4: ()}


def test_leaves_are_mapped_in_their_places() -> None:
    assert map_tree(lambda leaf: -leaf, TREE) == {"a": -1, "b": (-2, {"c": -3}), 4: ()}
    assert map_tree(str, 5) == "5"


def test_leaves_of_several_trees_are_mapped_together() -> None:
    assert map_tree(lambda *leaves: leaves, {"a": (1, 2)}, {"b": None, "a": ("x", "y")}) == {"a": ((1, "x"), (2, "y"))}
    with pytest.raises(KeyError):
        map_tree(max, {"a": 1}, {"b": 1})
    with pytest.raises(ValueError, match="longer"):
        map_tree(max, (1,), (1, 2))


def test_leaves_have_the_names_of_the_keys_that_lead_to_them() -> None:
    assert dict(tree_leaves(TREE, "tree")) == {"tree['a']": 1, "tree['b'][0]": 2, "tree['b'][1]['c']": 3}
    assert [*tree_leaves(5, "number")] == [("number", 5)]
