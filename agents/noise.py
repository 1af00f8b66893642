"""Action noise: one random stream per column, drawn many steps at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.buffers.named import map_leaves

_CHUNK = 128  # steps drawn at once, to avoid a numpy call per environment step


class ColumnNoise:
    """Rows `[B, ...]` of noise, one per call of `next_row`. `draw(rng, n)` returns a column's next n values.

    The values of column b depend only on `rngs[b]` and on the number of rows that the column has used.
    """

    def __init__(self, rngs: Sequence[np.random.Generator], draw: Callable[[np.random.Generator, int], Any]) -> None:
        self._rngs, self._draw = rngs, draw
        self._position = _CHUNK  # of all columns, until they differ
        self._chunk: Any = None
        self._positions: npt.NDArray[np.intp] | None = None  # of each column, once they differ

    def reseed(self, columns: npt.NDArray[np.intp], rngs: Sequence[np.random.Generator]) -> None:
        """Give these columns new streams. Values drawn from the old ones are dropped."""
        positions = self._separate_columns()
        self._rngs = list(self._rngs)
        for b, rng in zip(columns, rngs, strict=True):
            self._rngs[b] = rng
        positions[columns] = _CHUNK

    def column_state(self, column: int) -> dict[str, Any]:
        """The column's stream, and the values that were drawn from it and are not used yet."""
        position = self._position if self._positions is None else int(self._positions[column])
        left = None if self._chunk is None else map_leaves(np.copy, self._chunk[position:, column])
        return {"rng": self._rngs[column].bit_generator.state, "position": position, "left": left}

    def load_column_state(self, column: int, state: Mapping[str, Any]) -> None:
        """Continue as the column with this `column_state`."""
        positions = self._separate_columns()
        self._rngs[column].bit_generator.state = state["rng"]
        positions[column] = position = state["position"]
        if state["left"] is not None:
            self._chunk[position:, column] = state["left"]
        if (positions == position).all():  # all columns go together again, which is faster
            self._position, self._positions = position, None

    def next_row(self, columns: npt.NDArray[np.intp] | None = None) -> Any:
        """The next row, of all columns or of `columns`. Later calls do not change it."""
        if columns is not None or self._positions is not None:
            return self._next_of(np.arange(len(self._rngs)) if columns is None else columns)
        if self._position == _CHUNK:
            self._fill()
        row = self._chunk[self._position]
        self._position += 1
        return row

    def _next_of(self, columns: npt.NDArray[np.intp]) -> Any:
        at = self._separate_columns()
        for b in columns[at[columns] == _CHUNK]:
            self._chunk[:, b] = self._draw(self._rngs[b], _CHUNK)
            at[b] = 0
        row = self._chunk[at[columns], columns]
        at[columns] += 1
        return row

    def _separate_columns(self) -> npt.NDArray[np.intp]:
        """From now on, each column has its own position. Returns the positions."""
        if self._positions is None:
            if self._chunk is None:
                self._fill()
            # Earlier rows are views of the old chunk, and must not change.
            self._chunk = map_leaves(np.copy, self._chunk)
            self._positions = np.full(len(self._rngs), self._position)
        return self._positions

    def _fill(self) -> None:
        columns = [self._draw(rng, _CHUNK) for rng in self._rngs]
        self._chunk = map_leaves(lambda leaf: np.empty((_CHUNK, len(columns), *leaf.shape[1:]), leaf.dtype), columns[0])
        for b, column in enumerate(columns):
            self._chunk[:, b] = column
        self._position = 0


class OrnsteinUhlenbeck:
    """Noise that drifts back to zero: x += -theta x dt + sigma sqrt(dt) n, with the state x `[B, ...]`.

    In the long run it has mean 0 and standard deviation sigma / sqrt(theta (2 - theta dt)). Two values k rows apart
    have the correlation (1 - theta dt) ** k.
    """

    def __init__(self, n_columns: int, shape: tuple[int, ...], theta: float, dt: float) -> None:
        self._x = np.zeros((n_columns, *shape))
        self._decay, self._scale = 1.0 - theta * dt, dt**0.5

    def next_row(
        self, normals: npt.NDArray[Any], sigma: npt.NDArray[Any], columns: npt.NDArray[np.intp] | None = None
    ) -> npt.NDArray[Any]:
        """The next row, for all columns or for `columns`, from standard normal numbers `[B, ...]`. `sigma` must
        broadcast with them."""
        before = self._x if columns is None else self._x[columns]
        after: npt.NDArray[Any] = self._decay * before + self._scale * sigma * normals
        if columns is None:
            self._x = after
        else:
            self._x[columns] = after
        return after

    def reset_one(self, column: int) -> None:
        """Set one column to zero."""
        self._x[column] = 0.0

    def column_state(self, column: int) -> npt.NDArray[Any]:
        """The column's x."""
        return self._x[column].copy()  # type: ignore[no-any-return]

    def load_column_state(self, column: int, state: npt.NDArray[Any]) -> None:
        """Continue with this x."""
        self._x[column] = state
