"""Copies of what environments return: nobody else can change them."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.buffers.tree import snapshot

BOARD = np.zeros(2, np.float32)
Pair = namedtuple("Pair", ["left", "right"])


class Lazy:
    """Makes its array when it is asked for, out of memory that is not its own, and cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.array(BOARD, dtype)


@pytest.mark.parametrize(
    "show",
    [
        lambda: BOARD,
        lambda: BOARD[::-1],
        lambda: BOARD.view(np.memmap),
        lambda: memoryview(BOARD),
        lambda: pytest.importorskip("torch").from_numpy(BOARD),
        lambda: {"a": (BOARD, [BOARD])},
        lambda: OrderedDict(a=BOARD),
        lambda: deque([BOARD]),
        lambda: Pair(BOARD, 1.0),
        lambda: np.array([BOARD, None], object),
        Lazy,
    ],
)
def test_nobody_else_can_change_a_snapshot(show: Callable[[], Any]) -> None:
    def text(value: Any) -> str:
        return repr(np.asarray(value).tolist() if isinstance(value, Lazy | memoryview | np.ndarray) else value)

    BOARD[:] = 1, 2
    value = show()
    before, kept = text(value), snapshot(value)
    BOARD[:] = 8, 9
    assert text(value) != before
    assert text(kept) == before


@pytest.mark.parametrize("value", [1, 1.5, True, None, "text", b"bytes", np.float32(2), np.bool_(1)])
def test_what_cannot_be_changed_is_not_copied(value: Any) -> None:
    assert snapshot(value) is value


def test_what_cannot_be_copied_is_returned_as_it_is() -> None:
    lock = threading.Lock()
    assert snapshot(lock) is lock
