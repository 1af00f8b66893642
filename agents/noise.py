"""Action noise that hangs on the environment: one stream per column, drawn many steps at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.buffers.named import map_leaves

__all__ = ["ColumnNoise", "OrnsteinUhlenbeck"]

_CHUNK = 128  # steps drawn at once; drawing one by one would cost a numpy call per environment step


class ColumnNoise:
    """`draw(rng, n)` gives a column's next n values; `next_row()` gives row after row `[B, ...]`.

    What column b gets depends on `rngs[b]` and on how many rows have gone by, and on nothing else.
    """

    def __init__(self, rngs: Sequence[np.random.Generator], draw: Callable[[np.random.Generator, int], Any]) -> None:
        self._rngs, self._draw = rngs, draw
        self._at = _CHUNK
        self._chunk: Any = None
        self._at_each = np.zeros(0, np.intp)  # where each column is, once they have gone apart

    def reseed(self, columns: npt.NDArray[np.intp], rngs: Sequence[np.random.Generator]) -> None:
        """Begin anew in these columns, with other streams."""
        self._go_apart()
        self._rngs = list(self._rngs)
        for b, rng in zip(columns, rngs, strict=True):
            self._rngs[b] = rng
        self._at_each[columns] = _CHUNK

    def next_row(self, columns: npt.NDArray[np.intp] | None = None) -> Any:
        """The next row, of `columns` if not of all; it stays as it is, whatever is drawn later."""
        if columns is not None or len(self._at_each):
            return self._next_of(np.arange(len(self._rngs)) if columns is None else columns)
        if self._at == _CHUNK:
            self._fill()
        row = self._chunk[self._at]
        self._at += 1
        return row

    def _next_of(self, columns: npt.NDArray[np.intp]) -> Any:
        self._go_apart()
        at = self._at_each
        for b in columns[at[columns] == _CHUNK]:
            self._chunk[:, b] = self._draw(self._rngs[b], _CHUNK)
            at[b] = 0
        row = self._chunk[at[columns], columns]
        at[columns] += 1
        return row

    def _go_apart(self) -> None:
        if not len(self._at_each):
            if self._chunk is None:
                self._fill()
            self._chunk = map_leaves(np.copy, self._chunk)  # rows of it that were handed out are to stay as they are
            self._at_each = np.full(len(self._rngs), self._at)

    def _fill(self) -> None:
        columns = [self._draw(rng, _CHUNK) for rng in self._rngs]
        self._chunk = map_leaves(lambda leaf: np.empty((_CHUNK, len(columns), *leaf.shape[1:]), leaf.dtype), columns[0])
        for b, column in enumerate(columns):
            self._chunk[:, b] = column
        self._at = 0


class OrnsteinUhlenbeck:
    """Noise that drifts back to zero: x += -theta x dt + sigma sqrt(dt) n, with state `[B, ...]` per column.

    Left alone, it has mean 0 and standard deviation sigma / sqrt(theta (2 - theta dt)), and two values k rows
    apart have the correlation (1 - theta dt) ** k.
    """

    def __init__(self, n_columns: int, shape: tuple[int, ...], theta: float, dt: float) -> None:
        self._x = np.zeros((n_columns, *shape))
        self._keep, self._scale = 1.0 - theta * dt, dt**0.5

    def next_row(
        self, normals: npt.NDArray[Any], sigma: npt.NDArray[Any], columns: npt.NDArray[np.intp] | None = None
    ) -> npt.NDArray[Any]:
        """Go on by a row of standard normal numbers `[B, ...]`, of `columns` if not of all; `sigma` broadcasts
        against them."""
        before = self._x if columns is None else self._x[columns]
        after: npt.NDArray[Any] = self._keep * before + self._scale * sigma * normals
        if columns is None:
            self._x = after
        else:
            self._x[columns] = after
        return after

    def reset_one(self, column: int) -> None:
        """Start column from zero."""
        self._x[column] = 0.0
