"""Nested dicts and tuples: mapped leaf by leaf, and listed by name."""

import re
from collections import OrderedDict

import pytest

from penstock.buffers.named import NamedArrays
from penstock.buffers.tree import map_tree, tree_leaves, tree_of
from penstock.errors import SpaceError

TREE = {"a": 1, "b": (2, OrderedDict(c=3)), 4: ()}


def test_leaves_are_mapped_in_their_places() -> None:
    assert map_tree(lambda leaf: -leaf, TREE) == {"a": -1, "b": (-2, {"c": -3}), 4: ()}
    assert map_tree(str, 5) == "5"


def test_leaves_of_several_trees_are_mapped_together() -> None:
    pairs = map_tree(lambda *leaves: leaves, {"a": (1, 2), 3: 4}, {3: "z", "a": ["x", "y"]})
    assert pairs == {"a": ((1, "x"), (2, "y")), 3: (4, "z")}
    named = NamedArrays({"3": "z", "a": NamedArrays({"_0": "x", "_1": "y"})})
    assert map_tree(lambda *leaves: leaves, {"a": (1, 2), 3: 4}, named) == pairs
    assert tree_of(named, [1, 2, 3]).to_dict() == {"3": 1, "a": {"_0": 2, "_1": 3}}
    for tree, other, message in (
        ({"a": 1}, {"b": 1}, "one dict with the keys ['a'], got {'b': 1}"),
        ({"a": 1}, {"a": 1, "b": 2}, "one dict with the keys ['a'], got"),
        ((1,), (1, 2), "one tuple of 1, got (1, 2)"),
        ({"a": 1}, 5, "one dict with the keys ['a'], got 5"),
    ):
        with pytest.raises(SpaceError, match=re.escape(message)):
            map_tree(max, tree, other)


def test_leaves_have_the_names_of_the_keys_that_lead_to_them() -> None:
    assert dict(tree_leaves(TREE, "tree")) == {"tree['a']": 1, "tree['b'][0]": 2, "tree['b'][1]['c']": 3}
    assert [*tree_leaves(5, "number")] == [("number", 5)]
