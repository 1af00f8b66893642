"""Action noise that hangs on the environment: one stream per column, drawn many steps at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.buffers.named import map_leaves

__all__ = ["ColumnNoise"]

_CHUNK = 128  # steps drawn at once; drawing one by one would cost a numpy call per environment step


class ColumnNoise:
    """`draw(rng, n)` gives a column's next n values; `next_row()` gives row after row `[B, ...]`.

    What column b gets depends on `rngs[b]` and on how many rows have gone by, and on nothing else.
    """

    def __init__(self, rngs: Sequence[np.random.Generator], draw: Callable[[np.random.Generator, int], Any]) -> None:
        self._rngs, self._draw = rngs, draw
        self._at = _CHUNK
        self._chunk: Any = None

    def next_row(self) -> Any:
        """The next row; it stays as it is, whatever is drawn later."""
        if self._at == _CHUNK:
            self._fill()
        row = self._chunk[self._at]
        self._at += 1
        return row

    def _fill(self) -> None:
        columns = [self._draw(rng, _CHUNK) for rng in self._rngs]
        self._chunk = map_leaves(lambda leaf: np.empty((_CHUNK, len(columns), *leaf.shape[1:]), leaf.dtype), columns[0])
        for b, column in enumerate(columns):
            self._chunk[:, b] = column
        self._at = 0
