"""A replay that the workers of an `AsyncSampler` write into."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

from penstock.buffers import Samples
from penstock.errors import ConfigError
from penstock.learning.appending import Appender
from penstock.learning.ratio import CountsSteps, Ratio


class FedReplay(CountsSteps, Protocol):
    """What a feed needs of its replay."""

    def _feed_from(
        self, feeder: Any, samples: Samples, columns: Sequence[range], rows_ahead: int, spare_finals: int = 0
    ) -> Appender:
        """See `Replay._feed_from`."""


class FeedingSampler(Protocol):
    """What a feed needs of its sampler."""

    batch_T: int
    batch_B: int

    @property
    def is_feeding(self) -> bool:
        """Whether the workers write into the replay, or may do so soon."""

    def await_replay(self, n: int) -> None:
        """Wait until the ratio allows to draw `n` positions."""

    def stand_still(self) -> AbstractContextManager[None]:
        """Inside, no worker writes."""


_MOST_INFOS = 65_536


class ReplayFeed:
    """Links one sampler with its replay. The sampler owns it; references in the other direction are weak."""

    def __init__(self, sampler: FeedingSampler, replay: FedReplay, ratio: Ratio | None, *, is_pinned: bool) -> None:
        self.ratio, self._is_pinned = ratio, is_pinned
        self._set_batch_steps(sampler.batch_T * sampler.batch_B)
        if ratio is None and is_pinned:
            raise ConfigError("lag=1 with a replay needs a ratio, which says how many steps each draw sees: give ratio")
        self.replay = replay
        self._sampler = weakref.ref(sampler)
        self._first_step = 0  # how many steps the replay had before this sampler
        #: Finished trajectories that `take_traj_infos` has not returned yet, and how many were dropped.
        self.traj_infos: deque[Any] = deque(maxlen=_MOST_INFOS)
        self.n_dropped = 0

    def _set_batch_steps(self, n: int) -> None:
        self.batch_steps, ratio = n, self.ratio
        if ratio is not None:
            if ratio.batch_steps not in (None, n):
                raise ConfigError(
                    f"ratio has batch_steps={ratio.batch_steps}, but a batch of this sampler has {n}: leave "
                    "batch_steps out"
                )
            self.ratio = replace(ratio, batch_steps=n)

    def connect(self, samples: Samples, columns: Sequence[range], n_slots: int) -> Appender:
        """Allocate the ring for batches such as `samples`, of which worker i writes `columns[i]`. Returns the appender
        of the workers."""
        self._batch_T, B = samples.env.reward.shape
        if self.ratio is not None:  # with several agents, a batch has more steps than environment steps
            self.ratio = replace(self.ratio, batch_steps=None)
        self._set_batch_steps(self._batch_T * B)
        widest = max(map(len, columns))
        spare_finals = self._batch_T * widest if self._is_pinned else 0  # as many as a batch can have
        appender = self.replay._feed_from(self, samples, columns, n_slots * self._batch_T, spare_finals)
        self._first_step, self._ring, self._first_row = self.replay.n_steps, appender.ring, appender.ring.end
        self._show(0, 0)
        return appender

    def _show(self, n_taken: int, n_begun: int) -> None:
        """With `lag=1`: draws see `n_taken` batches from now on, whatever the workers do, and `n_begun` are begun."""
        if self._is_pinned:
            first, T = self._first_row, self._batch_T
            self._ring.pin(first + n_taken * T, first + n_begun * T)

    def take(self, batch: int, infos: list[Any]) -> None:
        """Batch number `batch` is in the replay. Keep the newest trajectories."""
        self._show(batch + 1, batch + 1)
        self.n_dropped += max(0, len(self.traj_infos) + len(infos) - _MOST_INFOS)
        self.traj_infos.extend(infos)

    # ---- the two sides of the ratio ----------------------------------------------------------

    def begin(self, batch: int) -> bool:
        """Whether the workers may begin batch number `batch`: then they must."""
        if self.ratio is not None:
            ratio = self.ratio if self.ratio.batch_size else replace(self.ratio, batch_size=1)  # nothing was drawn yet
            if not ratio.may_append(self.replay, self._first_step + batch * self.batch_steps):
                return False
        self._show(batch, batch + 1)  # with `lag=1`, all batches before have been taken
        return True

    def expect(self, n: int) -> None:
        """The learner will draw `n` positions. Raises `ConfigError` if the slack is too small for this."""
        if self.ratio is not None and self.ratio.batch_size != n:
            self.ratio = replace(self.ratio, batch_size=n)

    def may_draw(self) -> bool:
        """Whether the learner may draw as many positions as it said."""
        return self.replay.is_ready if self.ratio is None else self.ratio.may_sample(self.replay)

    # ---- for the replay ----------------------------------------------------------------------

    @property
    def is_feeding(self) -> bool:
        sampler = self._sampler()
        return sampler is not None and sampler.is_feeding

    def before_sample(self, n: int) -> None:
        sampler = self._sampler()
        if sampler is not None and self.is_feeding:  # otherwise the replay draws from the steps that it has
            sampler.await_replay(n)

    def stand_still(self) -> AbstractContextManager[None]:
        sampler = self._sampler()
        return nullcontext() if sampler is None else sampler.stand_still()
