"""What the compiled functions of replays do not know, they leave to numpy. They write nothing beside their arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.learning.appending import pack_flags
from penstock.learning.compiled import COMPILED, PYTHON
from penstock.learning.observations import take_frames, take_rows
from penstock.learning.ring import copy_rows

pytestmark = pytest.mark.skipif(not COMPILED, reason="was built without a C compiler")


@pytest.mark.parametrize("fn", [pack_flags, PYTHON["pack_flags"]], ids=["compiled", "numpy"])
def test_steps_that_are_truncated_only_are_counted(fn: Any) -> None:
    valid, terminated, truncated, begins = np.random.default_rng(0).random((4, 16, 33)) < 0.5
    n = fn(valid, terminated, truncated, begins, np.zeros((16, 33), np.uint8))
    assert n == np.count_nonzero(valid & truncated & ~terminated)


def test_flags_of_unknown_layout_are_not_packed() -> None:
    flags, out = np.zeros((3, 4), np.bool_), np.zeros((3, 4), np.uint8)
    for unusual in (flags.T.copy().T, flags.astype(np.int64), flags[:2], flags[0]):
        assert pack_flags(flags, flags, unusual, flags, out) in (-1, 0)


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
        assert not copy_rows((target, target), (source, rows), row, column)
        assert not target.any(), "the arrays before it are not copied either"


def test_frames_of_unknown_layout_are_not_stacked() -> None:
    frames = np.ones((11, 2, 3), np.uint8)
    at, out = np.zeros(2, np.int64), np.full((2, 4, 2, 3), 7, np.uint8)
    for unusual in (out[..., ::-1], out.astype(np.int64), out[:1], out[..., :2].copy(), out[:, :, 0].copy()):
        assert not take_frames(frames, 1, False, at, at, unusual)
        assert not take_frames(frames, 1, False, at, at, out, at, at, unusual)
    for bad in (np.array([0, len(frames)]), np.array([-1, 0])):
        with pytest.raises(IndexError, match="not in the ring"):
            take_frames(frames, 1, False, bad, at, out)
    assert (out == 7).all()


def test_entries_of_unknown_layout_are_not_taken() -> None:
    source, at, out = np.ones((5, 4, 3), np.float32), np.zeros(3, np.int64), np.zeros((3, 4, 3), np.float32)
    for unusual in (out[::-1], out.astype(np.float64), out[:2], out[:, :3].copy(), out[..., None], out[..., 0].copy()):
        assert not take_rows(source, at, unusual)
    assert not take_rows(source[:, ::-1], at, out)
    assert not take_rows(source, at.astype(np.int32), out)
    assert not take_rows(np.empty((0, 4, 3), np.float32), at, out)
    for bad in (np.array([0, 5, 0]), np.array([0, 0, -1])):
        with pytest.raises(IndexError, match="not in the ring"):
            take_rows(source, bad, out)
    assert (out == 0).all()
