"""Looking into a replay: the rows that it holds, and all batches that it could give."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.buffers.named import NamedArrays, map_leaves
from penstock.errors import ConfigError
from penstock.learning.position_draws import DrawIndex
from penstock.learning.priorities import PriorityDraw
from penstock.learning.replay_batches import ReplayBatch, SequenceBatch
from penstock.learning.ring import BEGINS, PARTIAL, TERMINATED, TRUNCATED, VALID, Ring
from penstock.learning.windows import Positions

Batch = TypeVar("Batch", bound=ReplayBatch | SequenceBatch)


class Contents(Generic[Batch]):
    """What a replay holds at the moment: `replay.contents`. It draws nothing, and changes nothing.

    All arrays are copies. Workers that write into the replay finish their batches first, and wait meanwhile.
    """

    def __init__(
        self,
        places: DrawIndex,
        priorities: PriorityDraw | None,
        batch_cls: type[Batch],
        stand_still: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._places, self._priorities, self._batch_cls = places, priorities, batch_cls
        self._stand_still = stand_still

    @property
    def _ring(self) -> Ring:
        return self._places.ring

    @property
    def shape(self) -> tuple[int, int]:
        """`T`, the rows that the replay has room for, and `B`, the environments."""
        return self._ring.T, self._ring.B

    @property
    def steps(self) -> range:
        """The rows that it holds. Row `step` has the positions from `step * B` to `step * B + B - 1`."""
        with self._stand_still():
            return range(self._ring.first, self._ring.end)

    @property
    def index(self) -> npt.NDArray[np.int64]:
        """int64 `[N]`, all positions that `sample` may draw, in order. With `sequences`, those of the first steps."""
        with self._stand_still():
            return self._places.positions(self._eligible())

    @property
    def probability(self) -> npt.NDArray[np.float64]:
        """float64 `[N]`, for each position of `index` the probability that the next draw gives it."""
        with self._stand_still():
            places = self._eligible()
            if self._priorities is None:
                return np.full(len(places), 1 / max(len(places), 1))
            self._priorities.catch_up()
            leaves = self._priorities.leaves()[places - self._priorities.low]
        probability: npt.NDArray[np.float64] = leaves / (leaves.sum() or 1.0)
        return probability

    def rows(self, column: int | slice = slice(None)) -> NamedArrays:
        """The rows as they are stored, of one environment, `[n, ...]`, or of several, `[n, B, ...]`, oldest first.

        The fields are `observation` (with `frames`, the newest frame of each stack), `action`, `reward`, `terminated`,
        `truncated`, `valid`, `policy_version`, and `env_info` and `extra` if the samples have them. `begins` is True
        where a row does not continue the row before it. `is_partial` is True where such a row does not begin an episode
        either: the rows before it are missing.
        """
        with self._stand_still():
            arrays, at = self._ring.arrays, np.arange(self._ring.first, self._ring.end) % self._ring.T

            def read(leaf: Any) -> Any:
                return leaf[:, column][at]

            names = ("observation", "action", "reward", "policy_version", *self._ring.more)
            fields = {name: map_leaves(read, arrays[name]) for name in names}
            flags = read(arrays.flags)
        bits = {"terminated": TERMINATED, "truncated": TRUNCATED, "valid": VALID, "begins": BEGINS}
        fields |= {name: (flags & bit) != 0 for name, bit in (bits | {"is_partial": PARTIAL}).items()}
        return NamedArrays(fields)

    def read(self, index: Any) -> Batch:
        """The batch that `sample` gives where it draws the positions `index` `[N]`, but without `weight`.

        Raises `ConfigError` if one of them is not in `contents.index`.
        """
        positions = np.asarray(index, np.int64).reshape(-1)
        with self._stand_still():
            places = self._places.of_positions(positions)
            low, high = self._places.bounds()
            outside = (places < low) | (places >= high)
            fields = None if outside.any() else self._places.reader.read(positions)
            if fields is None:
                bad = outside if outside.any() else ~self._places.eligible(places)
                raise ConfigError(f"position {positions[bad][0]} cannot be drawn: take those in replay.contents.index")
        batch: Any = self._batch_cls({**fields, "index": positions}).torch()
        return batch  # type: ignore[no-any-return]

    def _eligible(self) -> Positions:
        return self._places.all_eligible(*self._places.bounds())
