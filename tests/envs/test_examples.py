"""Examples of spaces: the structure, shapes and dtypes in which elements are recorded."""

from __future__ import annotations

import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given

from penstock.buffers import NamedArrays
from penstock.envs import example_of, observation_example
from penstock.errors import SpaceError

from ..scale import examples
from ..support import leaves
from .space_strategies import any_space, children

quick = examples(20, 60)


@quick
@given(any_space)
def test_fields_are_the_keys_of_a_dict_and_the_numbered_members_of_a_tuple_and_leaves_are_zeros(space: Any) -> None:
    def check(example: Any, space: Any) -> None:
        below = children(space)
        if not below:
            assert type(example) is np.ndarray
            assert (example.shape, example.dtype) == (space.shape, space.dtype)
            assert not example.any()
            return
        assert isinstance(example, NamedArrays)
        assert [*example.keys()] == [f"_{key}" if isinstance(space, spaces.Tuple) else str(key) for key, _ in below]
        for value, (_, child) in zip(example, below, strict=True):
            check(value, child)

    check(example_of(space), space)


def test_keys_with_the_same_text_are_refused() -> None:
    box = spaces.Box(0, 1, (2,))
    with pytest.raises(SpaceError, match="observation"):
        example_of(spaces.Dict({1: box, "1": box}))


class OwnSpace(gym.Space[Any]):
    pass


@pytest.mark.parametrize(
    ("space", "remedy"),
    [
        (spaces.Text(5), "encode the text .*TransformObservation"),
        (spaces.Sequence(spaces.Discrete(3)), "pad the sequence .*TransformObservation"),
        (spaces.Graph(spaces.Box(0, 1, (2,)), None), "pad nodes and edges .*TransformObservation"),
        (spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1, (2,))]), "FlattenObservation"),
        (OwnSpace(), "OwnSpace, which penstock does not support: wrap the environment .* Box, Discrete"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda space: space, "sight"),
        (lambda space: spaces.Dict({"a": spaces.Tuple([spaces.Discrete(2), space])}), "sight['a'][1]"),
    ],
    ids=["alone", "nested"],
)
def test_a_space_without_fixed_shape_is_refused_with_a_remedy(space: Any, remedy: str, wrap: Any, name: str) -> None:
    with pytest.raises(SpaceError, match=f"^{re.escape(name)} has a .*{remedy}"):
        example_of(wrap(space), "sight")


@pytest.mark.parametrize("space", [spaces.OneOf([spaces.Discrete(2), spaces.Discrete(3)]), spaces.Text(5)], ids=str)
def test_the_remedy_for_an_action_space_is_a_wrapper_for_actions(space: Any) -> None:
    with pytest.raises(SpaceError, match=r"^action has a .*gymnasium\.wrappers\.TransformAction$"):
        example_of(space, "action")


@quick
@given(any_space)
def test_a_float_dtype_replaces_only_float_dtypes(space: Any) -> None:
    plain, same, cast = map(leaves, (example_of(space), observation_example(space), observation_example(space, "f4")))
    for before, as_it_was, after in zip(plain, same, cast, strict=True):
        assert after.shape == before.shape
        assert as_it_was.dtype == before.dtype
        assert after.dtype == (np.float32 if before.dtype.kind == "f" else before.dtype)
