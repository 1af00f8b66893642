"""The flags of a batch: in C, in numpy, and as worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.replays.appending import PYTHON, pack_flags
from penstock.replays.ring import BEGINS, TERMINATED, TRUNCATED, VALID

BITS = (VALID, TERMINATED, TRUNCATED, BEGINS)


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
