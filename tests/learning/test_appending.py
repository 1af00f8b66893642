"""Flags of a batch, and rows that are copied and compared: in C, in numpy, and as worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.learning import Replay
from penstock.learning.appending import pack_flags, same_rows
from penstock.learning.compiled import PYTHON
from penstock.learning.ring import BEGINS, TERMINATED, TRUNCATED, VALID, copy_rows

from ..scale import quick_first
from .streams import Stream, storage_of

BITS = (VALID, TERMINATED, TRUNCATED, BEGINS)
LEAVES = [((), "float32"), ((3,), "float64"), ((2, 1), "int64"), ((), "bool"), ((4, 3), "uint8")]


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 1), (16, 33)])
@pytest.mark.parametrize("columns", [slice(None), slice(1, -1)])
@pytest.mark.parametrize("fn", [pack_flags, PYTHON["pack_flags"]], ids=["compiled", "numpy"])
def test_flags_are_packed(fn: object, shape: tuple[int, int], columns: slice) -> None:
    rng = np.random.default_rng(0)
    wider = (shape[0], shape[1] + 2) if columns.start else shape
    fields = [rng.random(wider)[:, columns] < 0.5 for _ in range(3)] + [(rng.random(wider) < 0.5)[:, columns]]
    out = np.full(shape, 255, np.uint8)
    n = fn(*fields, out)  # type: ignore[operator]
    expected = sum(field.astype(np.uint8) * bit for field, bit in zip(fields, BITS, strict=True))
    assert (out == expected).all()
    assert n == int((fields[0] & fields[2] & ~fields[1]).sum())


def test_other_layouts_are_left_to_numpy() -> None:
    flags, out = np.zeros((3, 4), np.bool_), np.zeros((3, 4), np.uint8)
    for unusual in (flags.T.copy().T, flags.astype(np.int64), flags[:2], flags[0]):
        assert pack_flags(flags, flags, unusual, flags, out) in (-1, 0)


def random_rows(shape: tuple[int, ...], dtype: str, columns: slice, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    wider = (shape[0], shape[1] + 3 if columns.start else shape[1], *shape[2:])
    return rng.integers(0, 100, wider).astype(dtype)[:, columns]


@pytest.mark.parametrize(("T", "row", "t"), [(7, 0, 7), (7, 3, 4), (7, 3, 5), (7, 6, 7), (1, 0, 1)])
@pytest.mark.parametrize("columns", [slice(None), slice(1, -2)])
@pytest.mark.parametrize("first", quick_first([2, 0]))
@pytest.mark.parametrize("fn", [copy_rows, PYTHON["copy_rows"]], ids=["compiled", "numpy"])
def test_rows_are_copied(fn: Any, T: int, row: int, t: int, columns: slice, first: int) -> None:
    B, b = 6, 6 - first
    targets = tuple(random_rows((T, B, *rest), dtype, slice(None), i) for i, (rest, dtype) in enumerate(LEAVES))
    sources = [random_rows((t, b, *rest), dtype, columns, 9 + i) for i, (rest, dtype) in enumerate(LEAVES)]
    # The newest frames of stacks: their columns are not next to each other.
    sources[-1] = np.stack([sources[-1], sources[-1] + 1], 2)[:, :, 1]
    expected = [target.copy() for target in targets]
    for target, source in zip(expected, sources, strict=True):
        for i in range(t):
            target[(row + i) % T, first : first + b] = source[i]
    assert fn(targets, tuple(sources), row, first)
    for target, wanted in zip(targets, expected, strict=True):
        np.testing.assert_array_equal(target, wanted)


def test_rows_of_unknown_layout_are_not_copied() -> None:
    target, source = np.zeros((5, 4, 3), np.float32), np.ones((2, 4, 3), np.float32)
    unknown = [
        (source[..., ::-1], 0, 0),
        (source.astype(np.float64), 0, 0),
        (source[..., :2], 0, 0),
        (source[0], 0, 0),
        (np.ones((6, 4, 3), np.float32), 0, 0),
        (source, 0, 1),
        (source, 5, 0),
        (source, -1, 0),
        (source.tolist(), 0, 0),
    ]
    for rows, row, column in unknown:
        # The arrays before it are not copied either.
        if copy_rows is not PYTHON["copy_rows"]:
            assert not copy_rows((target, target), (source, rows), row, column)
        assert not target.any()


@pytest.mark.parametrize("fn", [same_rows, PYTHON["same_rows"]], ids=["compiled", "numpy"])
def test_rows_are_compared_where_an_episode_goes_on(fn: Any) -> None:
    kept = tuple(random_rows((4, 6, *rest), dtype, slice(None), i) for i, (rest, dtype) in enumerate(LEAVES))
    for row, first in ((0, 0), (3, 2)):
        done = np.zeros((2, 6 - first), np.bool_)
        rows = tuple(np.stack([leaf[row, first:], leaf[row - 1, first:]]) for leaf in kept)
        assert fn(kept, rows, row, first, done)
        for leaf in rows:
            before = leaf[0, 1].copy()
            leaf[0, 1] = ~before if leaf.dtype == np.bool_ else before + 1
            assert not fn(kept, rows, row, first, done)
            done[0, 1] = True
            if fn is not PYTHON["same_rows"]:
                assert fn(kept, rows, row, first, done)
            done[0, 1], leaf[0, 1] = False, before


def test_a_writer_knows_which_batches_it_has_written() -> None:
    """A worker that replaces another collects only the batches that are missing."""
    stream, replay = Stream(0, 2), Replay(100)
    for n_batches in range(3):
        if n_batches:
            replay.append(stream.batch(5))
            appender = storage_of(replay).appender
            assert [appender.has_batch(number, 5) for number in range(3)] == [number < n_batches for number in range(3)]
