"""NamedArrays: an operation on all fields equals the operation on each field."""

from __future__ import annotations

import copy
import pickle
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.buffers import AgentSamples, NamedArrays, as_named
from penstock.buffers.named import map_leaves
from penstock.errors import ConfigError

from ..scale import examples
from ..support import assert_same

torch = pytest.importorskip("torch")

T, B = 4, 3
quick = examples(15, 40)

# Names of methods, of dunder methods and with spaces are all fair: a Dict space may have such keys.
NAMES = st.sampled_from(["observation", "reward", "values", "copy", "a name", "_0", "map", "0", "torch"])
DTYPES = st.sampled_from([np.bool_, np.uint8, np.int64, np.float16, np.float32, np.float64])


@st.composite
def leaves(draw: Any) -> Any:
    shape = (T, B, *draw(hnp.array_shapes(min_dims=0, max_dims=2, max_side=3)))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).integers(0, 200, shape)
    return numbers.astype(draw(DTYPES))


trees = st.dictionaries(
    NAMES, st.recursive(leaves(), lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3), max_leaves=4)
)
trees = trees.filter(bool)

locations = st.one_of(
    hnp.basic_indices((T, B), allow_newaxis=True, allow_ellipsis=False),
    hnp.arrays(np.bool_, (T, B)),
    hnp.arrays(np.bool_, (T,)),
    hnp.integer_array_indices((T, B), result_shape=hnp.array_shapes(max_dims=2, max_side=4)),
    st.lists(st.integers(-T, T - 1), min_size=1),
)


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The arrays of a nest of dicts by dotted path, in order."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


# ---- all fields at once ------------------------------------------------------------------------


@quick
@given(trees, locations)
def test_an_index_goes_to_every_field_as_numpy_would(tree: Any, loc: Any) -> None:
    assert_same(dict(as_named(tree)[loc].leaves()), {name: leaf[loc] for name, leaf in flatten(tree).items()})


@quick
@given(trees, hnp.basic_indices((T, B), allow_ellipsis=False))
def test_a_basic_index_gives_views(tree: Any, loc: Any) -> None:
    for part, whole in zip(as_named(tree)[loc].leaves(), flatten(tree).values(), strict=True):
        assert isinstance(part[1], np.generic) or part[1].size == 0 or np.shares_memory(part[1], whole)


@quick
@given(trees, locations)
def test_an_assignment_writes_every_field_as_numpy_would(tree: Any, loc: Any) -> None:
    source = as_named(tree).map(lambda leaf: ~leaf if leaf.dtype == bool else leaf + 1)
    for value, new in ((source[loc], dict(source.leaves())), (1, None)):
        target, expected = as_named(tree).copy(), {name: leaf.copy() for name, leaf in flatten(tree).items()}
        for name, array in expected.items():
            array[loc] = 1 if new is None else new[name][loc]
        target[loc] = value
        assert_same(dict(target.leaves()), expected)


COPIES: list[Any] = [NamedArrays.copy, copy.deepcopy, lambda named: pickle.loads(pickle.dumps(named))]


@quick
@given(trees, st.sampled_from(COPIES))
def test_copies_are_equal_and_have_memory_of_their_own(tree: Any, copied: Any) -> None:
    named = as_named(tree)
    twin = copied(named)
    assert type(twin) is NamedArrays
    assert_same(dict(twin.leaves()), flatten(tree))
    for (_, mine), (_, theirs) in zip(twin.leaves(), named.leaves(), strict=True):
        assert not np.shares_memory(mine, theirs)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_keeps_the_class(protocol: int) -> None:
    samples = AgentSamples(action=np.arange(6).reshape(2, 3), bootstrap_value=np.arange(3.0))
    twin = pickle.loads(pickle.dumps(samples, protocol))
    assert type(twin) is AgentSamples
    assert twin[:, 1].bootstrap_value == 1


def test_a_shallow_copy_shares_the_arrays() -> None:
    named = NamedArrays(a=np.zeros(3))
    twin = copy.copy(named)
    assert twin is not named
    assert twin.a is named.a


@quick
@given(trees)
def test_torch_shares_the_memory_and_numpy_leads_back(tree: Any) -> None:
    named = as_named(tree)
    tensors = named.torch()
    for (_, tensor), (_, array) in zip(tensors.leaves(), named.leaves(), strict=True):
        assert isinstance(tensor, torch.Tensor)
        tensor.fill_(1)
        assert (array == 1).all()
    for (_, back), (_, array) in zip(tensors.numpy().leaves(), named.leaves(), strict=True):
        assert type(back) is np.ndarray
        assert np.shares_memory(back, array)


def test_torch_and_numpy_leave_what_they_find_converted_and_copy_copies_tensors() -> None:
    tensors, arrays = NamedArrays(a=torch.zeros(2)), NamedArrays(a=np.zeros(2))
    assert tensors.torch().a is tensors.a
    assert arrays.numpy().a is arrays.a
    tensors.copy().a[0] = 1
    assert tensors.a.tolist() == [0, 0]


@quick
@given(trees)
def test_map_applies_to_every_leaf_and_keeps_the_structure(tree: Any) -> None:
    shapes = as_named(tree).map(lambda leaf: leaf.shape)
    assert dict(shapes.leaves()) == {name: leaf.shape for name, leaf in flatten(tree).items()}
    assert map_leaves(lambda leaf: leaf + 1, 2) == 3, "a single leaf"


# ---- fields ------------------------------------------------------------------------------------


@quick
@given(st.dictionaries(NAMES, st.integers(), min_size=1))
def test_fields_unpack_in_order_and_are_found_by_name(fields: dict[str, int]) -> None:
    named = NamedArrays(fields)
    assert [*named] == [*named.values()] == [*fields.values()]
    assert [*named.keys()] == [*fields]
    assert [*named.items()] == [*fields.items()]
    assert {**named} == fields
    assert len(named) == len(fields)
    assert all(name in named and named[name] == value for name, value in fields.items())


def test_fields_are_read_as_attributes() -> None:
    named = NamedArrays({"a": 1}, b=2)
    a, b = named
    assert (named.a, named.b) == (a, b) == (1, 2)
    assert {"a", "b", "copy"} <= set(dir(named))


def test_an_unknown_name_is_refused_with_the_fields_there_are() -> None:
    with pytest.raises(AttributeError, match="NamedArrays has no field 'rewards'; it has reward, done"):
        _ = NamedArrays(reward=1, done=2).rewards
    with pytest.raises(KeyError, match="no field 'rewards'; there are reward, done"):
        _ = NamedArrays(reward=1, done=2)["rewards"]


@pytest.mark.parametrize("name", ["reward", "brand_new", "_values"])
def test_no_attribute_can_be_bound(name: str) -> None:
    named = NamedArrays(reward=1)
    with pytest.raises(AttributeError, match="cannot be replaced"):
        setattr(named, name, 2)
    assert {**named} == {"reward": 1}


def test_a_string_index_is_written_into_and_not_rebound() -> None:
    array = np.zeros(3)
    named = NamedArrays(a=array)
    named["a"] = 5
    assert named.a is array
    assert array.tolist() == [5, 5, 5]


@pytest.mark.parametrize(
    "value",
    [{"a": 1}, {"a": 1, "b": 2, "c": 3}, NamedArrays(a=1, B=2), namedtuple("Other", "a c")(1, 2), (1, 2), (1, 2, 3)],
    ids=["missing", "extra", "misspelt", "other namedtuple", "tuple", "longer tuple"],
)
def test_writing_mismatched_fields_names_both_sides_and_writes_nothing(value: Any) -> None:
    named = NamedArrays(a=np.zeros(2), b=np.zeros(2))
    with pytest.raises(ConfigError, match=r"cannot write the fields \[.*\] into the fields \['a', 'b'\]"):
        named[0] = value
    assert named.a.tolist() == named.b.tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"cannot write the fields \[.*\] into the fields \['a', 'b'\]"):
        NamedArrays(deep=named)[0] = {"deep": value}


@pytest.mark.parametrize(
    "value",
    [{"b": 2, "a": 1}, namedtuple("Pair", "a b")(1, 2), NamedArrays(a=np.int64(1), b=np.int64(2))],
    ids=["dict", "namedtuple", "NamedArrays"],
)
def test_values_are_matched_by_name(value: Any) -> None:
    named = NamedArrays(a=np.zeros(2), b=np.zeros(2))
    named[1] = value
    assert (named.a.tolist(), named.b.tolist()) == ([0, 1], [0, 2])
    of_a_tuple_space = NamedArrays(_0=np.zeros(2), _1=np.zeros(2))
    of_a_tuple_space[1] = (1, 2)
    assert (of_a_tuple_space._0.tolist(), of_a_tuple_space._1.tolist()) == ([0, 1], [0, 2])


def test_truth_is_whether_there_are_fields() -> None:
    assert NamedArrays(a=np.zeros(2))
    assert not NamedArrays()


def test_repr_shows_shapes_and_dtypes_as_a_tree() -> None:
    named = AgentSamples(
        action=np.zeros((T, B), np.int64),
        agent_info=NamedArrays(dist=NamedArrays(logits=torch.zeros(T, B, 5)), value=np.float32(1)),
        note="text",
        nothing=NamedArrays(),
    )
    assert repr(named).splitlines() == [
        "AgentSamples(",
        "  action: [4, 3] int64",
        "  agent_info=NamedArrays(",
        "    dist=NamedArrays(",
        "      logits: [4, 3, 5] torch.float32",
        "    )",
        "    value: [] float32",
        "  )",
        "  note: 'text'",
        "  nothing=NamedArrays()",
        ")",
    ]


# ---- as_named ----------------------------------------------------------------------------------


def test_as_named_converts_mappings_namedtuples_and_tuples_at_any_depth() -> None:
    pair = namedtuple("Pair", "x y")
    named = as_named({"a": (1, {"b": 2}), 3: pair(x=4, y=(5,))})
    assert dict(named.leaves()) == {"a._0": 1, "a._1.b": 2, "3.x": 4, "3.y._0": 5}
    assert all(isinstance(node, NamedArrays) for node in (named, named.a, named.a._1, named["3"], named["3"].y))
    assert dict(as_named(NamedArrays(dist={"mean": 1, "scale": 2})).leaves()) == {"dist.mean": 1, "dist.scale": 2}


@pytest.mark.parametrize(
    "leaf", [np.zeros(2), [1, 2], 3.0, "text", torch.zeros(2)], ids=lambda leaf: type(leaf).__name__
)
def test_as_named_leaves_leaves_as_they_are(leaf: Any) -> None:
    assert as_named(leaf) is leaf


# ---- AgentSamples: bootstrap_value has no time dimension ---------------------------------------


def agent_samples() -> AgentSamples:
    return AgentSamples(
        action=np.arange(T * B).reshape(T, B),
        agent_info=NamedArrays(logits=np.arange(T * B * 2).reshape(T, B, 2)),
        bootstrap_value=np.arange(B) * 10.0,
    )


def has_last_row(loc: Any) -> bool:
    """Whether the index `loc` keeps the last row, and those before it without a gap; or it is that of a single row."""
    rows = loc[0] if isinstance(loc, tuple) else loc
    if isinstance(rows, slice):
        return rows.step in (None, 1) and list(range(T))[rows][-1:] == [T - 1]
    return isinstance(rows, int) or rows is Ellipsis


def check(loc: Any, bootstrap_value: Any) -> None:
    """Indexing gives `bootstrap_value`, and every other field what numpy gives."""
    samples = agent_samples()
    part = samples[loc]
    np.testing.assert_array_equal(part.action, samples.action[loc])
    np.testing.assert_array_equal(part.agent_info.logits, samples.agent_info.logits[loc])
    if not has_last_row(loc):
        assert "bootstrap_value" not in part
        return
    assert np.shape(part.bootstrap_value) == np.shape(bootstrap_value)
    np.testing.assert_array_equal(part.bootstrap_value, bootstrap_value)


WHOLE = np.arange(B) * 10.0
rows = st.one_of(st.integers(-T, T - 1), st.slices(T))
columns = st.one_of(st.integers(-B, B - 1), st.slices(B))


@quick
@given(
    rows,
    st.lists(st.integers(0, T - 1), min_size=1),
    hnp.arrays(np.bool_, (T,)),
    hnp.arrays(np.bool_, (T, B)),
    columns,
    hnp.arrays(np.bool_, (B,)),
    st.lists(st.integers(-B, B - 1), min_size=1),
)
def test_an_index_of_columns_and_no_other_picks_their_bootstrap_values(
    t: Any, times: Any, mask: Any, cells: Any, b: Any, of: Any, listed: Any
) -> None:
    for own in (t, (t,), times, mask, cells, ..., (..., 0), (1, ...), (slice(1, 3), ...)):
        check(own, WHOLE)
    for own in (b, of, listed, np.array(listed)):
        check((t, own), WHOLE[own])
    check((t, b, ...), WHOLE[b])
    check((mask, b), WHOLE[b])


def test_an_assignment_writes_the_bootstrap_values_of_its_columns() -> None:
    samples, source = agent_samples(), agent_samples().map(lambda leaf: leaf + 1)
    samples[:, 1:] = source[:, 1:]
    assert samples.bootstrap_value.tolist() == [0, 11, 21]
    assert samples.action[0].tolist() == [0, 2, 3]
    samples[:2, 1:] = agent_samples()[:2, 1:]
    assert samples.bootstrap_value.tolist() == [0, 11, 21]
    assert samples.action[0].tolist() == [0, 1, 2]


def test_a_bootstrap_value_on_the_way_through_samples_is_picked_alike() -> None:
    samples = NamedArrays(env=NamedArrays(reward=np.zeros((T, B))), agent=agent_samples())
    assert samples[1:T, 2].agent.bootstrap_value == 20
    assert samples[1:].agent.bootstrap_value.tolist() == WHOLE.tolist()
