"""What samplers need of a replay that their workers write into. `penstock.learning.Replay` has it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from penstock.buffers import Samples
from penstock.collectors import TrajInfo


class Appender(Protocol):
    """Writes the batches of one worker into the replay."""

    ring: Any  #: its memory, `ring.memory`, is shared

    def of_writer(self, writer: int) -> Appender:
        """The appender of this worker."""

    def bind(self, samples: Samples) -> Any:
        """The arrays of `samples` `[T, B]`, for `append`."""

    def has_batch(self, number: int, batch_T: int) -> bool:
        """Whether this worker, or the one that it replaces, has written batch `number`."""

    def append(self, batch: Any, version: Any, *, continues: bool) -> None:
        """Write one batch."""


class Feed(Protocol):
    """Links one sampler with its replay."""

    traj_infos: deque[TrajInfo]  #: finished trajectories that `take_traj_infos` has not returned yet
    n_dropped: int  #: how many were too old to be kept

    def connect(self, samples: Samples, columns: Sequence[range], n_slots: int) -> Appender:
        """Allocate memory for batches such as `samples`, of which worker i writes `columns[i]`."""

    def begin(self, batch: int) -> bool:
        """Whether the workers may begin batch number `batch`: then they must."""

    def take(self, batch: int, infos: list[TrajInfo]) -> None:
        """Batch number `batch` is in the replay, and these trajectories have finished in it."""

    def expect(self, n: int) -> None:
        """The learner will draw `n` positions."""

    def may_draw(self) -> bool:
        """Whether the learner may draw as many positions as it said."""


class MakesFeed(Protocol):
    """A replay."""

    def make_feed(self, sampler: Any, ratio: Any, *, is_pinned: bool) -> Feed:
        """Link it with `sampler`. `is_pinned`: draws see whole batches that were taken, and no others."""
