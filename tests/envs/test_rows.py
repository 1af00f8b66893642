"""Rows: what environments return is recorded exactly or refused by name, and actions come out as copies."""

from __future__ import annotations

import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from penstock.buffers import NamedArrays
from penstock.buffers.tree import map_tree
from penstock.envs import action_splitter, arrays_like, example_of, observation_example, write_row
from penstock.envs.rows import write_cell
from penstock.errors import SpaceError

from ..scale import examples
from ..support import leaves
from .space_strategies import (
    any_space,
    at,
    children,
    empty_row,
    leaf_paths,
    nested_spaces,
    nodes,
    path_name,
    replaced,
    sample,
)

quick = examples(20, 80)
seeds = st.integers(0, 2**31 - 1)
counts = st.integers(1, 5)


def assert_recorded(space: Any, row: Any, values: list[Any]) -> None:
    for leaf, (path, _) in zip(leaves(row), leaf_paths(space), strict=True):
        for column, value in enumerate(values):
            np.testing.assert_array_equal(leaf[column], at(value, path), err_msg=path_name(path))


# ---- writing -----------------------------------------------------------------------------------


def write(space: Any, row: Any, values: Any, name: str = "observation") -> None:
    write_row(arrays_like(space, row[np.newaxis]), 0, values, name)


@quick
@given(any_space, counts, seeds)
def test_elements_are_recorded_exactly_and_split_again_what_they_were(space: Any, n: int, seed: int) -> None:
    values, row = sample(space, n, seed), empty_row(space, n)
    write(space, row, values)
    assert_recorded(space, row, values)
    actions = action_splitter(space)(row)
    assert len(actions) == n
    assert_recorded(space, row, actions)
    assert all(space.contains(action) for action in actions)


@quick
@given(any_space, counts, seeds)
def test_lists_and_numbers_are_recorded_like_arrays(space: Any, n: int, seed: int) -> None:
    values, row = sample(space, n, seed), empty_row(space, n)
    plain = values
    for path, leaf in leaf_paths(space):
        if 0 not in leaf.shape:  # an empty list has lost its dtype and inner dimensions
            plain = [replaced(value, path, np.asarray(at(value, path)).tolist()) for value in plain]
    write(space, row, plain)
    assert_recorded(space, row, values)


@quick
@given(any_space, counts, seeds)
def test_rows_in_memory_with_gaps_are_written_all_the_same(space: Any, n: int, seed: int) -> None:
    values, wide = sample(space, n, seed), empty_row(space, 2 * n)
    row = wide[::2]
    write(space, row, values)
    assert_recorded(space, row, values)
    assert not any(leaf.any() for leaf in leaves(wide[1::2]))


@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize(
    ("given", "recorded"),
    [(np.float64, np.float32), (np.float32, np.float16), (np.int64, np.float32), (np.int64, np.uint8), (np.bool_, int)],
)
def test_a_value_is_cast_to_the_dtype_that_is_recorded(shape: tuple[int, ...], given: Any, recorded: Any) -> None:
    row = np.zeros((2, *shape), recorded)
    values = [np.ones(shape, given), np.zeros(shape, given)]
    write(spaces.Box(0, 1, shape, recorded), row, values)
    np.testing.assert_array_equal(row, values)


@quick
@given(any_space, counts, seeds, st.data())
def test_a_single_element_is_written_where_it_belongs(space: Any, n: int, seed: int, data: Any) -> None:
    values, row, t = sample(space, n, seed), empty_row(space, 3 * n), data.draw(st.integers(0, 2))
    rows = map_tree(lambda leaf: leaf.reshape(3, n, *leaf.shape[1:]), arrays_like(space, row))
    column = data.draw(st.integers(0, n - 1))
    write_cell(rows, t, column, values[column])
    assert_recorded(space, row[t * n + column :], [values[column]])
    others = np.arange(3 * n) != t * n + column
    assert not any(leaf[others].any() for leaf in leaves(row))


# ---- refusing ----------------------------------------------------------------------------------


def check_refused(space: Any, values: list[Any], path: tuple[Any, ...], column: int, why: str) -> None:
    message = f"{re.escape(path_name(path))} of column {column} {why}"
    with pytest.raises(SpaceError, match=f"^{message}"):
        write(space, empty_row(space, len(values)), values)


def misfit(draw: Any, leaf: Any) -> tuple[Any, str]:
    """A value that does not fit in the leaf space, and what is said of it."""
    kind = draw(st.sampled_from(["shape", "dtype", "nothing", "ragged"]))
    if kind == "nothing":
        return None, "must have (shape|dtype)"
    if kind == "ragged":
        return [[1, 2], [3]], "is ragged"
    if kind == "dtype":
        unfit = {"f": [np.complex64, "U3"], "b": [np.int64, np.float32, "U3"]}
        wrong = draw(st.sampled_from(unfit.get(leaf.dtype.kind, [np.float32, object, "U3"])))
        value = np.zeros(leaf.shape, wrong)
        return value, f"must have dtype {leaf.dtype}, got {value.dtype}"
    shape = draw(st.sampled_from([(*leaf.shape, 2), (1, *leaf.shape), (3, *leaf.shape[1:]), leaf.shape[1:]]))
    if shape == leaf.shape:
        shape = (*leaf.shape, 1)
    shapes = f"must have shape {re.escape(str(leaf.shape))}, got {re.escape(str(shape))}"
    return np.zeros(shape, leaf.dtype), shapes


@examples(80, 320)
@given(any_space, counts, seeds, st.data())
def test_what_does_not_fit_in_a_leaf_names_field_column_and_both(space: Any, n: int, seed: int, data: Any) -> None:
    values, column = sample(space, n, seed), data.draw(st.integers(0, n - 1))
    path, leaf = data.draw(st.sampled_from(leaf_paths(space)))
    value, why = misfit(data.draw, leaf)
    values[column] = replaced(values[column], path, value)
    check_refused(space, values, path, column, why)
    with pytest.raises(SpaceError, match=f"^{re.escape(path_name(path))} of column {column} {why}"):
        write_cell(arrays_like(space, empty_row(space, n)[np.newaxis]), 0, column, values[column])


@pytest.mark.parametrize(("dtype", "wrong"), [(np.bool_, np.int64), (np.uint8, np.float64), (np.float32, np.complex64)])
def test_a_wrong_dtype_is_named_where_there_are_no_values_too(dtype: Any, wrong: Any) -> None:
    space = spaces.Box(0, 1, (0, 2), dtype)
    expected = f"must have dtype {np.dtype(dtype)}, got {np.dtype(wrong)}"
    check_refused(space, [np.zeros((0, 2), dtype), np.zeros((0, 2), wrong)], (), 1, expected)


@quick
@given(nested_spaces, counts, seeds, st.data())
def test_a_missing_entry_names_field_column_and_the_entries_there_should_be(
    space: Any, n: int, seed: int, data: Any
) -> None:
    values, column = sample(space, n, seed), data.draw(st.integers(0, n - 1))
    path, node = data.draw(
        st.sampled_from([node for node in nodes(space) if isinstance(node[1], spaces.Dict | spaces.Tuple)])
    )
    whole = at(values[column], path)
    if isinstance(node, spaces.Dict):
        gone = data.draw(st.sampled_from([*node.keys()]))
        entries, part = [*node.keys()], {key: value for key, value in whole.items() if key != gone}
    else:
        entries, part = [*range(len(node.spaces))], whole[:-1]
    values[column] = replaced(values[column], path, part)
    check_refused(space, values, path, column, f"must have the entries {re.escape(str(entries))}, got")


@pytest.mark.parametrize("value", [5, None, [], np.zeros(())], ids=repr)
def test_something_else_than_a_dict_is_refused_by_name(value: Any) -> None:
    space = spaces.Dict({"a": spaces.Dict({"b": spaces.Discrete(2)})})
    check_refused(space, [{"a": {"b": 1}}, {"a": value}], ("a",), 1, r"must have the entries \['b'\], got")


@pytest.mark.parametrize("shape", [(), (2,)], ids=["scalar", "array"])
@pytest.mark.parametrize(
    ("dtype", "value"),
    [(np.uint8, 256), (np.uint8, -1), (np.int8, 128), (np.int8, -129), (np.int16, 2**15), (np.int32, 2**31)],
)
def test_an_integer_that_the_recorded_dtype_cannot_hold_is_refused(
    shape: tuple[int, ...], dtype: Any, value: int
) -> None:
    values = [np.zeros(shape, np.int64), np.full(shape, value, np.int64)]
    check_refused(spaces.Box(0, 1, shape, dtype), values, (), 1, "must")


@pytest.mark.parametrize("shape", [(2,), (2, 3)], ids=str)
def test_wrong_shapes_that_add_up_to_the_right_size_are_refused_all_the_same(shape: tuple[int, ...]) -> None:
    values = [np.zeros((rows, *shape[1:])) for rows in (2, 1, 3)]
    check_refused(spaces.Box(0, 1, shape), values, (), 1, "must have shape")


def test_the_first_column_that_does_not_fit_is_named() -> None:
    values = [np.zeros(2), np.zeros(2), np.zeros(3), np.zeros(4)]
    check_refused(spaces.Box(0, 1, (2,)), values, (), 2, "must have shape")


def test_the_name_given_stands_in_the_error() -> None:
    with pytest.raises(SpaceError, match=r"^final_obs\[0\] of column 0"):
        write(spaces.Tuple([spaces.Discrete(2)]), NamedArrays(_0=np.zeros(1, int)), [(0.5,)], "final_obs")


# ---- splitting ---------------------------------------------------------------------------------


@quick
@given(any_space, counts, seeds)
def test_each_leaf_of_an_action_is_of_the_documented_type(space: Any, n: int, seed: int) -> None:
    row = empty_row(space, n)
    write(space, row, sample(space, n, seed))
    kinds = {spaces.Dict: dict, spaces.Tuple: tuple, spaces.Discrete: int}
    for action in action_splitter(space)(row):
        for path, node in nodes(space):
            assert type(at(action, path)) is kinds.get(type(node), np.ndarray), path_name(path, "action")
            if isinstance(node, spaces.Dict):
                assert [*at(action, path)] == [*node.keys()]


@quick
@given(any_space, counts, seeds)
def test_an_action_that_its_environment_changes_leaves_the_batch_alone(space: Any, n: int, seed: int) -> None:
    """And one that it keeps is not changed by the next batch."""
    values, row = sample(space, n, seed), empty_row(space, n)
    write(space, row, values)
    kept = action_splitter(space)(row)
    for action in action_splitter(space)(row):
        for path, _ in leaf_paths(space):
            if isinstance(at(action, path), np.ndarray):
                at(action, path)[...] = 1 - at(action, path).astype(np.float64).astype(bool)
    assert_recorded(space, row, values)
    for leaf in leaves(row):
        leaf[...] = 0
    for action, value in zip(kept, values, strict=True):
        for path, _ in leaf_paths(space):
            np.testing.assert_array_equal(at(action, path), at(value, path))


# ---- examples: the structure, shapes and dtypes in which elements are recorded -------------------


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
