"""The compiled part: it writes what numpy would, or says that it did not."""

import importlib.util
import sys
import types
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.buffers.native import COMPILED, put_cell, put_row

pytestmark = pytest.mark.skipif(not COMPILED, reason="was built without a C compiler")

EXTENSION = "penstock.buffers._native"
PLAIN = [np.bool_, np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64, np.float16, np.float32, np.float64, "c8"]
shapes = hnp.array_shapes(min_dims=2, max_dims=4, min_side=1, max_side=5)


def noise(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 2, size=(*shape, dtype.itemsize), dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


def same(a: Any, b: Any) -> bool:
    """Bit for bit, NaN included."""
    return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


@given(shape=shapes, dtype=st.sampled_from(PLAIN), seed=st.integers(0, 2**32), data=st.data())
def test_rows_are_gathered_and_put(shape: tuple[int, ...], dtype: Any, seed: int, data: st.DataObject) -> None:
    # Rows of a worker's columns are not contiguous with each other, but each is.
    batch = np.zeros((3, shape[0] + 2, *shape[1:]), dtype)
    columns, wanted = batch[:, 1:-1], noise(shape, dtype, seed)
    fields = {"a": columns, "b": (np.zeros((3, 2)),)}
    assert put_row(fields, 2, {"b": (np.ones(2),), "a": wanted})
    assert put_row(columns, 0, wanted)
    assert put_row(columns, 1, [part.copy() for part in wanted])
    assert all(same(row.copy(), wanted) for row in columns)
    assert fields["b"][0].tolist() == [[0, 0], [0, 0], [1, 1]]
    b = data.draw(st.integers(0, len(wanted) - 1))
    value = noise(shape[1:], dtype, seed + 1)
    assert put_cell(columns, 1, b, value) is True
    wanted[b] = value
    assert same(columns[1].copy(), wanted)
    columns[...] = 0
    assert not batch.any()  # nothing beside them was touched


@given(st.lists(st.one_of(st.floats(width=32), st.integers(-(2**24), 2**24)), min_size=1, max_size=20))
def test_numbers_are_gathered(numbers: list[Any]) -> None:
    row = np.zeros(len(numbers), np.float32)
    assert put_row(row[np.newaxis], 0, numbers)
    assert same(row, np.asarray(numbers, np.float32))
    row[:] = 0
    doubles = [np.float64(number) for number in numbers]
    assert put_row(row[np.newaxis], 0, doubles)
    assert same(row, np.asarray(numbers, np.float32))
    exact = np.zeros(len(numbers))
    for each in (doubles, [float(number) for number in numbers]):
        exact[:] = 0
        assert put_row(exact[np.newaxis], 0, each)
        assert same(exact, np.array(doubles))


@given(shape=shapes, seed=st.integers(0, 2**32))
def test_float64_is_rounded_to_float32_as_numpy_does(shape: tuple[int, ...], seed: int) -> None:
    rows, values = np.zeros((2, *shape), np.float32), np.random.default_rng(seed).normal(size=shape) * 1e30
    assert put_row(rows, 0, [*values])
    assert put_row(rows, 1, values)
    assert same(rows[0], values.astype(np.float32))
    assert same(rows[1], rows[0])
    values.flat[-1] = 1e39
    assert put_row(rows, 0, [*values]) is False
    values.flat[-1] = np.inf
    assert put_row(rows, 0, [*values])
    assert rows[0].flat[-1] == np.inf


@given(number=st.floats(allow_nan=False))
def test_a_number_is_rounded_as_numpy_does_or_refused(number: float) -> None:
    row = np.zeros(1, np.float32)
    with np.errstate(over="ignore"):
        wanted = np.asarray([number]).astype(np.float32)
    fits = bool(np.isinf(number) or np.isfinite(wanted[0]))
    assert put_row(row[np.newaxis], 0, [number]) is fits
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
    assert put_row(arrays, 1, values)
    assert arrays["a"].tolist() == [[[0.0] * 4] * 3, [[1.5] * 4, [2.5] * 4, [3.5] * 4]]
    assert arrays["b"][0].tolist() == [[0, 0, 0], [1, 2, 3]]
    assert arrays["b"][1]["c"].tolist() == [[0, 0, 0], [0.25, 0.5, 0.75]]
    assert put_cell(arrays, 0, 2, OrderedDict(b=(np.int64(7), {"c": np.float32(8)}), a=np.full(4, 9.0)))
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
        {"a": np.ones(4), "b": (1, {"c": np.float64(1e39)})},
        {"a": np.ones(4), "b": (1, {"c": np.int64(1)})},
        {"a": np.ones(5), "b": (1, {"c": np.float32(1)})},
        (np.ones(4), (1, {"c": np.float32(1)})),
        None,
    ],
    ids=repr,
)
def test_structures_that_are_not_alike_are_left(value: Any) -> None:
    right = {"a": np.ones(4), "b": (1, {"c": np.float32(1)})}
    assert put_cell(nested(), 0, 0, right) is True
    assert put_cell(nested(), 0, 0, value) is False
    assert put_row(nested(), 0, [right, right, value]) is False
    assert put_row(nested(), 0, [right, right]) is False


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
        (np.zeros(4), [0] * 4),
        ([0.0] * 4, np.zeros(4)),
        (np.zeros(4), None),
        (None, None),
    ],
)
def test_what_is_not_alike_is_left_alone(target: Any, value: Any) -> None:
    if not isinstance(target, np.ndarray):
        assert put_row(target, 0, value) is False
    else:
        rows = np.broadcast_to(target, (2, *target.shape)) if not target.flags.writeable else np.stack([target] * 2)
        rows = rows.view(type(target))
        if target.flags.c_contiguous:
            assert put_row(rows, 1, value) is False
            assert put_row({"a": rows}, 1, {"a": value}) is False
            assert put_cell(rows[np.newaxis], 0, 1, value) is False


NEEDS_3 = np.zeros((1, 3, 2))


@pytest.mark.parametrize(
    ("arrays", "values"),
    [
        ({"a": np.zeros((1, 2))}, {"b": np.zeros(2)}),
        ({"a": np.zeros((1, 2))}, {"a": np.zeros(2), "b": np.zeros(2)}),
        ({"a": np.zeros((1, 2)), "b": np.zeros((1, 2))}, {"a": np.zeros(2)}),
        ({"a": np.zeros((1, 2))}, [np.zeros(2)]),
        ([np.zeros((1, 2))], {"a": np.zeros(2)}),
        (NEEDS_3, [np.zeros(2)] * 2),
        (NEEDS_3, [np.zeros(2)] * 4),
        (NEEDS_3, [np.zeros(2), np.zeros(3), np.zeros(2)]),
        (NEEDS_3, [np.zeros(2), np.zeros(2, np.float32), np.zeros(2)]),
        (NEEDS_3, [np.zeros(2), None, np.zeros(2)]),
        (NEEDS_3, (np.zeros(2),) * 3),
        (NEEDS_3, np.zeros((2, 3))),
        (NEEDS_3, None),
        (np.zeros(1), []),
        (np.zeros((3, 8))[:, ::2], np.ones(4)),  # with gaps
        (np.zeros((3, 4, 8))[:, :, ::2], [np.ones(4)] * 4),
    ],
)
def test_other_fields_rows_that_do_not_fit_and_rows_with_gaps_are_left_alone(arrays: Any, values: Any) -> None:
    assert put_row(arrays, 0, values) is False
    assert not any(leaf.any() for leaf in (arrays.values() if isinstance(arrays, dict) else arrays))


@pytest.mark.parametrize(
    "value", [None, "1", np.float16(1), np.int64(1), np.ones(1), 1j, 10**400, 2**53 + 1, 1e39, -1e39, True]
)
def test_what_is_no_ordinary_number_is_not_gathered(value: Any) -> None:
    assert put_row(np.zeros((1, 2), np.float32), 0, [0.0, value]) is False
    assert put_row(np.zeros((1, 1), np.float64), 0, [0]) is False
    assert put_row(np.zeros((1, 1), np.float16), 0, [0.0]) is False
    assert put_row(np.zeros((1, 1), np.int32), 0, [0]) is False
    assert put_row(np.zeros((1, 1, 1), np.float32), 0, [0.0]) is False


@pytest.mark.parametrize("i", [-1, 3, 10**9])
def test_what_is_not_there_is_not_written(i: int) -> None:
    assert put_cell(np.zeros((1, 3, 2)), 0, i, np.ones(2)) is False
    assert put_cell(np.zeros((3, 1, 2)), i, 0, np.ones(2)) is False
    assert put_row(np.zeros((3, 2)), i, np.ones(2)) is False
    assert put_row({"a": np.zeros((3, 2))}, i, {"a": np.ones(2)}) is False
    assert put_row(np.zeros((3, 1, 2)), i, [np.ones(2)]) is False


@pytest.mark.parametrize("index", ["0", 0.0, None, 2**100])
@pytest.mark.parametrize("function", [put_row, put_cell])
def test_an_index_that_is_none_is_an_error(function: Any, index: Any) -> None:
    with pytest.raises(TypeError, match=r"expected . arguments, got 1"):
        function(np.zeros(1))
    more = (0, np.zeros(1)) if function is put_cell else (np.zeros(1),)
    with pytest.raises((TypeError, IndexError)):
        function(np.zeros((1, 1)), index, *more)
    if function is put_cell:
        with pytest.raises((TypeError, IndexError)):
            function(np.zeros((1, 1)), 0, index, np.zeros(()))


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
    arrays: dict[str, Any] = {name: np.zeros((1, 3, 2))}
    assert put_row(arrays, 0, values)
    assert arrays[name].all()
    assert not values
    name.on_compare = arrays.clear
    assert put_row(arrays, 0, [{"a": np.ones(2)}] * 3)
    value: dict[str, Any] = {"b": {"a": np.ones(2)}}
    name.on_compare = value.clear
    arrays = {"b": {name: np.zeros((1, 3, 2))}}
    assert put_cell(arrays, 0, 1, value)
    assert arrays["b"][name][0, 1].tolist() == [1, 1]


class Lazy(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key) + 1


class Pair(NamedTuple):
    one: Any
    other: Any


def test_of_subclasses_that_may_have_other_items_nothing_is_taken() -> None:
    assert put_cell({"a": np.zeros((1, 1))}, 0, 0, Lazy(a=np.zeros(()))) is False
    assert put_cell((np.zeros((1, 1)),) * 2, 0, 0, Pair(np.zeros(()), np.zeros(()))) is False


def test_a_structure_without_end_is_an_error() -> None:
    arrays: dict[str, Any] = {}
    arrays["a"] = arrays
    value: dict[str, Any] = {}
    value["a"] = value
    with pytest.raises(RecursionError):
        put_cell(arrays, 0, 0, value)


def test_an_error_in_comparing_names_comes_through() -> None:
    def refuse() -> None:
        raise RuntimeError("compared")

    name = Name("a")
    name.on_compare = refuse
    arrays = {name: np.zeros((1, 1))}
    for call in (
        lambda: put_row(arrays, 0, {"a": np.zeros(1)}),
        lambda: put_cell(arrays, 0, 0, {"a": 0}),
        lambda: put_row({"b": arrays}, 0, [{"b": {"a": 0}}]),
    ):
        with pytest.raises(RuntimeError, match="compared"):
            call()


def loaded(**changed: Any) -> Any:
    """`penstock.buffers.native` again, with an extension in which this is changed."""
    extension = types.ModuleType(EXTENSION)
    vars(extension).update({**vars(sys.modules[EXTENSION]), **changed})
    spec = importlib.util.find_spec("penstock.buffers.native")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, EXTENSION, extension)
        spec.loader.exec_module(module)
    return module


def test_an_extension_for_another_layout_of_records_is_not_used() -> None:
    assert loaded().COMPILED
    layout: str = sys.modules[EXTENSION].LAYOUT
    names = layout.split()
    for other in (" ".join([names[1], names[0], *names[2:]]), layout.replace("f8", "f4"), " ".join(names[:-1])):
        module = loaded(LAYOUT=other)
        assert not module.COMPILED
        assert "layout" in module.WHY_NOT_COMPILED
        assert all(getattr(module, name) is function for name, function in module.PYTHON.items())
