"""Entries that are copied, and stacks of frames that are built again: in C, in numpy, and as worked out one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.learning.compiled import PYTHON
from penstock.learning.observations import read_ages, take_frames, take_rows
from penstock.learning.ring import BEGINS, PARTIAL, VALID

from ..scale import quick_first

pytestmark = pytest.mark.parametrize("B", [1, 3])


def ring_of(B: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(B)
    size = 11 * B
    flags = np.where(rng.random(size) < 0.3, VALID | BEGINS, VALID).astype(np.uint8)
    flags[(flags == VALID | BEGINS) & (rng.random(size) < 0.5)] |= PARTIAL
    return rng.integers(0, 256, (size, 2, 3)).astype(np.uint8), flags


def ages_of(flags: Any, B: int, back: int) -> list[tuple[int, bool]]:
    """Age of each entry, and whether the frames before it are known."""
    found = []
    for entry in range(len(flags)):
        rows = [flags[entry - k * B] for k in range(back + 1)]
        age = next((k for k, row in enumerate(rows) if row & BEGINS), back)
        found.append((age, age == back or not rows[age] & PARTIAL))
    return found


@pytest.mark.parametrize("back", [0, 1, 3])
@pytest.mark.parametrize("fn", [read_ages, PYTHON["read_ages"]], ids=["compiled", "numpy"])
def test_the_begin_of_the_episode_is_found(fn: Any, B: int, back: int) -> None:
    _, flags = ring_of(B)
    size = len(flags)
    age, known = np.empty(size, np.int64), np.empty(size, np.bool_)
    fn(flags, np.arange(size), B, back, age, known)
    assert list(zip(age.tolist(), known.tolist(), strict=True)) == ages_of(flags, B, back)


@pytest.mark.parametrize("is_zero", [False, True])
@pytest.mark.parametrize("fn", [take_frames, PYTHON["take_frames"]], ids=["compiled", "numpy"])
def test_stacks_are_built(fn: Any, B: int, is_zero: bool) -> None:
    frames, flags = ring_of(B)
    n, size = 4, len(flags)
    rng = np.random.default_rng(0)
    sets = []
    for at in (np.arange(size), rng.permutation(size)):
        age = np.array([ages_of(flags, B, n - 1)[entry][0] for entry in at])
        expected = np.array(
            [
                [frames[e - min(k, a) * B] * (k <= a or not is_zero) for k in (3, 2, 1, 0)]
                for e, a in zip(at, age, strict=True)
            ]
        )
        sets.append((at, age, expected))
    for chosen in (sets[:1], sets[1:], sets):
        outs = [np.full((size, n, 2, 3), 7, np.uint8) for _ in chosen]
        flat = [x for (at, age, _), out in zip(chosen, outs, strict=True) for x in (at, age, out)]
        assert fn(frames, B, is_zero, *flat)
        for (_, _, expected), out in zip(chosen, outs, strict=True):
            np.testing.assert_array_equal(out, expected)


def test_unknown_layouts_are_left_to_numpy(B: int) -> None:
    if take_frames is PYTHON["take_frames"]:
        pytest.skip("was built without a C compiler")
    frames, _ = ring_of(B)
    at, out = np.zeros(2, np.int64), np.full((2, 4, 2, 3), 7, np.uint8)
    for unusual in (out[..., ::-1], out.astype(np.int64), out[:1], out[..., :2].copy(), out[:, :, 0].copy()):
        assert not take_frames(frames, B, False, at, at, unusual)
        assert not take_frames(frames, B, False, at, at, out, at, at, unusual)
    assert (out == 7).all()
    for bad in (np.array([0, len(frames)]), np.array([-1, 0])):
        with pytest.raises(IndexError, match="not in the ring"):
            take_frames(frames, B, False, bad, at, out)


@pytest.mark.parametrize("shape", [(), (1,), (17,), (2, 3), (40, 9)])
@pytest.mark.parametrize("dtype", quick_first(["float32", "uint8", "bool", "float64"], 2))
@pytest.mark.parametrize("fn", [take_rows, PYTHON["take_rows"]], ids=["compiled", "numpy"])
def test_entries_are_copied(fn: Any, dtype: str, shape: tuple[int, ...], B: int) -> None:
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, (50, *shape)).astype(dtype)
    for at in (rng.integers(0, 50, 3 * B), rng.integers(0, 50, (B, 30)), np.array([0, 49]), np.empty(0, np.int64)):
        out = np.zeros((*at.shape, *shape), dtype)
        assert fn(source, at, out)
        np.testing.assert_array_equal(out, source[at])


def test_entries_of_unknown_layout_are_not_copied(B: int) -> None:
    if take_rows is PYTHON["take_rows"]:
        pytest.skip("was built without a C compiler")
    source, at, out = np.ones((5, 4, B), np.float32), np.zeros(3, np.int64), np.zeros((3, 4, B), np.float32)
    for unusual in (out[::-1], out.astype(np.float64), out[:2], out[:, :3].copy(), out[..., None], out[..., 0].copy()):
        assert not take_rows(source, at, unusual)
    assert not take_rows(source[:, ::-1], at, out)
    assert not take_rows(source, at.astype(np.int32), out)
    assert not take_rows(np.empty((0, 4, B), np.float32), at, out)
    for bad in (np.array([0, 5, 0]), np.array([0, 0, -1])):
        with pytest.raises(IndexError, match="not in the ring"):
            take_rows(source, bad, out)
    assert (out == 0).all()
