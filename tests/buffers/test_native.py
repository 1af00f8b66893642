"""The compiled part: it does what numpy would, or says that it has not."""

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.buffers.native import (
    COMPILED,
    copy,
    copy_fields,
    copy_row,
    gather,
    gather_numbers,
    mark,
    put_end,
)

pytestmark = pytest.mark.skipif(not COMPILED, reason="was built without a C compiler")

PLAIN = [np.bool_, np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64, np.float16, np.float32, np.float64, "c8"]
shapes = hnp.array_shapes(min_dims=2, max_dims=4, min_side=1, max_side=5)


def noise(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 2, size=(*shape, dtype.itemsize), dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


def flags(*shape: int) -> tuple[Any, Any, Any]:
    """done, terminated, truncated"""
    done, terminated, truncated = np.zeros((3, *shape), np.bool_)
    return done, terminated, truncated


def put(arrays: Any, t: int, b: int, value: Any) -> bool:
    """One element of a space, as the last of an episode that has terminated."""
    leaf = leaves(arrays)[0]
    done, terminated, truncated = flags(*np.shape(leaf)[:2]) if np.ndim(leaf) > 1 else flags(1, 1)
    is_put = put_end((done, terminated, truncated, arrays), t, b, value, True, False)
    marked = [(t, b)] if is_put else []
    assert [tuple(cell) for cell in np.argwhere(done)] == [tuple(cell) for cell in np.argwhere(terminated)] == marked
    assert not truncated.any()
    return is_put


def same(a: Any, b: Any) -> bool:
    """Bit for bit, NaN included."""
    return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


@given(shape=shapes, dtype=st.sampled_from(PLAIN), seed=st.integers(0, 2**32))
def test_equal_arrays_are_copied(shape: tuple[int, ...], dtype: Any, seed: int) -> None:
    target, value = np.zeros(shape, dtype), noise(shape, dtype, seed)
    assert copy(target, value)
    assert same(target, value)
    # Rows of a worker's columns are not contiguous with each other, but each is.
    batch = np.zeros((3, shape[0] + 2, *shape[1:]), dtype)
    columns = batch[:, 1:-1]
    assert copy_row(columns, 1, value)
    assert same(columns[1].copy(), value)
    fields = {"a": columns, "b": np.zeros((3, 2))}
    assert copy_fields(fields, 2, {"b": np.ones(2), "a": value})
    assert same(columns[2].copy(), value)
    assert fields["b"].tolist() == [[0, 0], [0, 0], [1, 1]]
    columns[1:] = 0
    assert not batch.any()  # nothing beside them was touched


@given(shape=shapes, dtype=st.sampled_from(PLAIN), seed=st.integers(0, 2**32), data=st.data())
def test_rows_are_gathered_and_put(shape: tuple[int, ...], dtype: Any, seed: int, data: st.DataObject) -> None:
    batch = np.zeros((3, shape[0] + 2, *shape[1:]), dtype)
    columns, wanted = batch[:, 1:-1], noise(shape, dtype, seed)
    assert gather(columns, 1, [part.copy() for part in wanted])
    assert same(columns[1].copy(), wanted)
    b = data.draw(st.integers(0, len(wanted) - 1))
    value = noise(shape[1:], dtype, seed + 1)
    assert put(columns, 1, b, value) is True
    wanted[b] = value
    assert same(columns[1].copy(), wanted)
    columns[1] = 0
    assert not batch.any()


@given(shape=st.tuples(st.integers(1, 4), st.integers(1, 4)), is_so=st.tuples(*[st.booleans()] * 2), data=st.data())
def test_an_end_is_recorded(shape: tuple[int, int], is_so: tuple[bool, bool], data: st.DataObject) -> None:
    batch = np.zeros((4, shape[0], shape[1] + 2), np.bool_)
    done, terminated, truncated, final = batch[:, :, 1:-1]
    t, b = data.draw(st.integers(0, shape[0] - 1)), data.draw(st.integers(0, shape[1] - 1))
    terminated[t, b] = truncated[t, b] = True
    assert put_end((done, terminated, truncated, final), t, b, np.ones((), np.bool_), *is_so)
    assert np.argwhere(done).tolist() == np.argwhere(final).tolist() == [[t, b]]
    assert (bool(terminated[t, b]), bool(truncated[t, b])) == is_so
    assert batch.sum() == 2 + sum(is_so)


@given(st.lists(st.one_of(st.floats(width=32), st.integers(-(2**24), 2**24)), min_size=1, max_size=20))
def test_numbers_are_gathered(numbers: list[Any]) -> None:
    row = np.zeros(len(numbers), np.float32)
    assert gather_numbers(row, numbers)
    assert same(row, np.asarray(numbers, np.float32))
    assert gather_numbers(row, [np.float64(number) for number in numbers])
    assert same(row, np.asarray(numbers, np.float32))


@given(number=st.floats(allow_nan=False))
def test_a_number_is_rounded_as_numpy_does_or_refused(number: float) -> None:
    row = np.zeros(1, np.float32)
    with np.errstate(over="ignore"):
        wanted = np.asarray([number]).astype(np.float32)
    fits = bool(np.isinf(number) or np.isfinite(wanted[0]))
    assert gather_numbers(row, [number]) is fits
    if fits:
        assert same(row, wanted)


def nested() -> Any:
    return {"a": np.zeros((2, 3, 4)), "b": (np.zeros((2, 3), np.int64), {"c": np.zeros((2, 3), np.float32)})}


def leaves(arrays: Any) -> list[Any]:
    if isinstance(arrays, dict):
        return [leaf for part in arrays.values() for leaf in leaves(part)]
    return [leaf for part in arrays for leaf in leaves(part)] if isinstance(arrays, tuple) else [arrays]


def test_structures_are_gathered_and_put() -> None:
    arrays = nested()
    values = [{"b": (b, {"c": np.float32(b / 4)}), "a": np.full(4, b + 0.5)} for b in range(1, 4)]
    assert gather(arrays, 1, values)
    assert arrays["a"].tolist() == [[[0.0] * 4] * 3, [[1.5] * 4, [2.5] * 4, [3.5] * 4]]
    assert arrays["b"][0].tolist() == [[0, 0, 0], [1, 2, 3]]
    assert arrays["b"][1]["c"].tolist() == [[0, 0, 0], [0.25, 0.5, 0.75]]
    assert put(arrays, 0, 2, OrderedDict(b=(np.int64(7), {"c": np.float32(8)}), a=np.full(4, 9.0)))
    assert [leaf[0, 2].tolist() for leaf in leaves(arrays)] == [[9.0] * 4, 7, 8.0]
    assert [leaf[0, :2].any() for leaf in leaves(arrays)] == [False] * 3


@pytest.mark.parametrize(
    "value",
    [
        {"a": np.ones(4)},
        {"a": np.ones(4), "b": (1, {"c": np.float32(1)}), "d": 1},
        {"a": np.ones(4), "d": (1, {"c": np.float32(1)})},
        {"a": np.ones(4), "b": (1,)},
        {"a": np.ones(4), "b": [1, {"c": np.float32(1)}]},
        {"a": np.ones(4), "b": (1, {"d": np.float32(1)})},
        {"a": np.ones(4), "b": (1.0, {"c": np.float32(1)})},
        {"a": np.ones(4), "b": (2**63, {"c": np.float32(1)})},
        {"a": np.ones(4), "b": (True, {"c": np.float32(1)})},
        {"a": np.ones(4), "b": (np.int32(1), {"c": np.float32(1)})},
        {"a": np.ones(4), "b": (1, {"c": np.float64(1)})},
        {"a": np.ones(4), "b": (1, {"c": 1})},
        {"a": np.ones(5), "b": (1, {"c": np.float32(1)})},
        (np.ones(4), (1, {"c": np.float32(1)})),
        None,
    ],
    ids=repr,
)
def test_structures_that_are_not_alike_are_left(value: Any) -> None:
    right = {"a": np.ones(4), "b": (1, {"c": np.float32(1)})}
    assert put(nested(), 0, 0, right) is True
    assert put(nested(), 0, 0, value) is False
    assert gather(nested(), 0, [right, right, value]) is False
    assert gather(nested(), 0, [right, right]) is False


class Subclass(np.ndarray):
    pass


def read_only() -> Any:
    array = np.zeros(4)
    array.flags.writeable = False
    return array


SWAPPED = np.dtype(np.float64).newbyteorder()


@pytest.mark.parametrize(
    ("target", "value"),
    [
        (np.zeros(4), np.zeros(5)),
        (np.zeros(4), np.zeros((4, 1))),
        (np.zeros(4), np.zeros(4, np.float32)),
        (np.zeros(4), np.zeros(4, SWAPPED)),
        (np.zeros(4, SWAPPED), np.zeros(4, SWAPPED)),
        (np.zeros(4), np.zeros(8)[::2]),
        (np.zeros(8)[::2], np.zeros(4)),
        (read_only(), np.zeros(4)),
        (np.zeros(4).view(Subclass), np.zeros(4)),
        (np.zeros(4), np.zeros(4).view(Subclass)),
        (np.zeros(2, object), np.zeros(2, object)),
        (np.zeros(2, "M8[s]"), np.zeros(2, "M8[D]")),
        (np.zeros(2, "V8"), np.zeros(2, "V8")),
        (np.zeros(4), [0.0] * 4),
        ([0.0] * 4, np.zeros(4)),
        (np.zeros(4), None),
        (None, None),
    ],
)
def test_what_is_not_alike_is_left_alone(target: Any, value: Any) -> None:
    assert copy(target, value) is False
    if isinstance(target, np.ndarray):
        rows = np.broadcast_to(target, (2, *target.shape)) if not target.flags.writeable else np.stack([target] * 2)
        rows = rows.view(type(target))
        if target.flags.c_contiguous:
            assert copy_row(rows, 1, value) is False
            assert copy_fields({"a": rows}, 1, {"a": value}) is False
            assert put(rows[np.newaxis], 0, 1, value) is False


def test_rows_with_gaps_are_left_alone() -> None:
    gaps = np.zeros((3, 8))[:, ::2]
    assert copy_row(gaps, 1, np.ones(4)) is False
    assert gather(np.zeros((3, 4, 8))[:, :, ::2], 1, [np.ones(4)] * 4) is False
    assert not gaps.any()


@pytest.mark.parametrize(
    ("arrays", "values"),
    [
        ({"a": np.zeros((1, 2))}, {"b": np.zeros(2)}),
        ({"a": np.zeros((1, 2))}, {"a": np.zeros(2), "b": np.zeros(2)}),
        ({"a": np.zeros((1, 2)), "b": np.zeros((1, 2))}, {"a": np.zeros(2)}),
        ({"a": np.zeros((1, 2))}, [np.zeros(2)]),
        ([np.zeros((1, 2))], {"a": np.zeros(2)}),
    ],
)
def test_other_fields_are_left_alone(arrays: Any, values: Any) -> None:
    assert copy_fields(arrays, 0, values) is False


@pytest.mark.parametrize(
    "values",
    [
        [np.zeros(2)] * 2,
        [np.zeros(2)] * 4,
        [np.zeros(2), np.zeros(3), np.zeros(2)],
        [np.zeros(2), np.zeros(2, np.float32), np.zeros(2)],
        [np.zeros(2), None, np.zeros(2)],
        (np.zeros(2),) * 3,
        np.zeros((3, 2)),
        None,
    ],
    ids=repr,
)
def test_rows_that_do_not_fit_are_not_gathered(values: Any) -> None:
    assert gather(np.zeros((1, 3, 2)), 0, values) is False
    assert gather(np.zeros(1), 0, []) is False


@pytest.mark.parametrize(
    "value", [None, "1", np.float32(1), np.int64(1), np.ones(1), 1j, 10**400, 2**53 + 1, 1e39, -1e39, True]
)
def test_what_is_no_ordinary_number_is_not_gathered(value: Any) -> None:
    assert gather_numbers(np.zeros(2, np.float32), [0.0, value]) is False
    assert gather_numbers(np.zeros(1, np.float64), [0.0]) is False
    assert gather_numbers(np.zeros((1, 1), np.float32), [0.0]) is False


@pytest.mark.parametrize("i", [-1, 3, 10**9])
def test_what_is_not_there_is_not_written(i: int) -> None:
    assert put(np.zeros((1, 3, 2)), 0, i, np.ones(2)) is False
    assert put(np.zeros((3, 1, 2)), i, 0, np.ones(2)) is False
    assert copy_row(np.zeros((3, 2)), i, np.ones(2)) is False
    assert copy_fields({"a": np.zeros((3, 2))}, i, {"a": np.ones(2)}) is False
    assert gather(np.zeros((3, 1, 2)), i, [np.ones(2)]) is False


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize(
    "wrong",
    [
        None,
        np.zeros((1, 1), np.uint8),
        np.zeros(1, np.bool_),
        np.zeros((1, 1, 1), np.bool_),
        np.zeros((1, 0), np.bool_),
    ],
)
def test_where_a_flag_cannot_be_set_no_end_is_recorded(which: int, wrong: Any) -> None:
    ends = [*flags(1, 1), np.zeros((1, 1))]
    ends[which] = wrong
    assert put_end(tuple(ends), 0, 0, np.ones(()), True, False) is False
    assert not any(np.any(part) for part in ends if part is not wrong)


def test_flags_with_gaps_are_left_alone() -> None:
    gaps = np.zeros((3, 8), np.bool_)[:, ::2]
    assert put_end((gaps, *flags(3, 4)[1:], np.zeros((3, 4))), 1, 1, np.ones(()), True, False) is False
    assert not gaps.any()


@pytest.mark.parametrize("is_so", [(1, False), (False, np.True_), (None, False)])
def test_flags_that_are_no_bools_are_left_alone(is_so: tuple[Any, Any]) -> None:
    ends = (*flags(1, 1), np.zeros((1, 1)))
    assert put_end(ends, 0, 0, np.ones(()), *is_so) is False
    assert put_end(list(ends), 0, 0, np.ones(()), True, False) is False
    assert put_end(ends[:3], 0, 0, np.ones(()), True, False) is False
    assert not any(part.any() for part in ends)


FUNCTIONS = [copy, copy_row, copy_fields, put_end, gather, gather_numbers, mark]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_too_few_arguments_are_an_error(function: Any) -> None:
    with pytest.raises(TypeError, match="arguments are wanted, got 1"):
        function(np.zeros(1))


@pytest.mark.parametrize("index", ["0", 0.0, None, 2**100])
@pytest.mark.parametrize("function", [copy_row, copy_fields, gather, put_end])
def test_an_index_that_is_none_is_an_error(function: Any, index: Any) -> None:
    more = (0, np.zeros(1), True, False) if function is put_end else (np.zeros(1),)
    with pytest.raises((TypeError, IndexError)):
        function(np.zeros((1, 1)), index, *more)


class Name(str):
    """A name of the user's own, which does something when it is compared."""

    __slots__ = ("on_compare",)
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        self.on_compare()
        return str.__eq__(self, other)


def test_what_is_written_is_held_while_names_are_compared() -> None:
    name = Name("a")
    values: list[Any] = [{"a": np.ones(2)} for _ in range(3)]
    name.on_compare = values.clear
    assert gather({name: np.zeros((1, 3, 2))}, 0, values) is False
    value: dict[str, Any] = {"b": {"a": np.ones(2)}}
    name.on_compare = value.clear
    arrays = {"b": {name: np.zeros((1, 3, 2))}}
    assert put(arrays, 0, 1, value)
    assert arrays["b"][name][0, 1].tolist() == [1, 1]


class Lazy(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key) + 1


class Pair(NamedTuple):
    one: Any
    other: Any


def test_of_subclasses_that_may_have_other_items_nothing_is_taken() -> None:
    assert put({"a": np.zeros((1, 1))}, 0, 0, Lazy(a=np.zeros(()))) is False
    assert put((np.zeros((1, 1)),) * 2, 0, 0, Pair(np.zeros(()), np.zeros(()))) is False


def test_a_structure_without_end_is_an_error() -> None:
    arrays: dict[str, Any] = {}
    arrays["a"] = arrays
    value: dict[str, Any] = {}
    value["a"] = value
    with pytest.raises(RecursionError):
        put(arrays, 0, 0, value)


def test_an_error_in_comparing_names_comes_through() -> None:
    def refuse() -> None:
        raise RuntimeError("compared")

    name = Name("a")
    name.on_compare = refuse
    arrays = {name: np.zeros((1, 1))}
    for call in (
        lambda: copy_fields(arrays, 0, {"a": np.zeros(1)}),
        lambda: put(arrays, 0, 0, {"a": 0}),
        lambda: gather({"b": arrays}, 0, [{"b": {"a": 0}}]),
    ):
        with pytest.raises(RuntimeError, match="compared"):
            call()


def test_a_row_and_its_time_are_marked() -> None:
    row, stamps = np.zeros(6, np.int64), np.zeros(3)
    assert mark(row, stamps, 1, 5, 7, 2.5)
    assert row.tolist() == [5, 7, 0, 2_500_000_000, 0, 0]
    assert stamps.tolist() == [0, 2.5, 0]


ROW, STAMPS = np.zeros(6, np.int64), np.zeros(3)


@pytest.mark.parametrize(
    ("row", "stamps", "i"),
    [
        (ROW[:3], STAMPS, 0),
        (ROW.astype(np.int32), STAMPS, 0),
        (ROW[np.newaxis], STAMPS, 0),
        (ROW, STAMPS.astype(np.float32), 0),
        (ROW, STAMPS[np.newaxis], 0),
        (ROW, STAMPS, 3),
        (ROW, STAMPS, -1),
        (None, STAMPS, 0),
        (ROW, None, 0),
    ],
)
def test_what_is_no_progress_row_is_not_marked(row: Any, stamps: Any, i: int) -> None:
    assert mark(row, stamps, i, 5, 7, 2.5) is False
    assert not ROW.any()
    assert not STAMPS.any()
    with pytest.raises(TypeError):
        mark(ROW, STAMPS, 0, 5, 7, "now")
