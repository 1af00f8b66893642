"""The replay that the workers of an `AsyncSampler` write into: when they may go on, and when the learner may draw."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.buffers import Samples
from penstock.collectors import TrajInfo
from penstock.errors import ConfigError
from penstock.replays import Ratio, Replay
from penstock.replays.appending import Appender
from penstock.samplers.states import SamplerState

if TYPE_CHECKING:
    from penstock.samplers.asynchronous import AsyncSampler

_MOST_INFOS = 65_536


class ReplayFeed:
    """Links one sampler with its replay. The sampler owns it; references in the other direction are weak."""

    def __init__(self, sampler: AsyncSampler, replay: Replay, ratio: Ratio | None, *, is_pinned: bool) -> None:
        if not isinstance(replay, Replay):
            raise ConfigError(f"replay must be a penstock.replays.Replay, got {replay!r}")
        if not isinstance(ratio, Ratio | None):
            raise ConfigError(f"ratio must be a penstock.replays.Ratio or None, got {ratio!r}")
        self.batch_steps = sampler.batch_T * sampler.batch_B
        if ratio is not None:
            if ratio.batch_steps not in (None, self.batch_steps):
                raise ConfigError(
                    f"ratio has batch_steps={ratio.batch_steps}, but a batch of this sampler has {self.batch_steps}: "
                    "leave batch_steps out"
                )
            ratio = replace(ratio, batch_steps=self.batch_steps)
        elif is_pinned:
            raise ConfigError("lag=1 with a replay needs a ratio, which says how many steps each draw sees: give ratio")
        self.replay, self.ratio, self._is_pinned = replay, ratio, is_pinned
        self._sampler = weakref.ref(sampler)
        self._first_step = 0  # how many steps the replay had before this sampler
        #: Finished trajectories that `take_traj_infos` has not returned yet, and how many were dropped.
        self.traj_infos: deque[TrajInfo] = deque(maxlen=_MOST_INFOS)
        self.n_dropped = 0

    def connect(self, samples: Samples, n_workers: int, n_slots: int) -> Appender:
        """Allocate the ring for batches such as `samples`. Returns the appender of the workers."""
        self._batch_T, B = samples.env.reward.shape
        spare_finals = self._batch_T * -(-B // n_workers) if self._is_pinned else 0  # as many as a batch can have
        appender = self.replay._feed_from(self, samples, n_workers, n_slots * self._batch_T, spare_finals)
        self._first_step, self._ring, self._first_row = self.replay.n_steps, appender.ring, appender.ring.end
        self._show(0, 0)
        return appender

    def _show(self, n_taken: int, n_begun: int) -> None:
        """With `lag=1`: draws see `n_taken` batches from now on, whatever the workers do, and `n_begun` are begun."""
        if self._is_pinned:
            first, T = self._first_row, self._batch_T
            self._ring.pin(first + n_taken * T, first + n_begun * T)

    def take(self, batch: int, infos: list[TrajInfo]) -> None:
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
        return sampler is not None and sampler.state in (SamplerState.READY, SamplerState.RUNNING, SamplerState.PAUSED)

    def before_sample(self, n: int) -> None:
        sampler = self._sampler()
        if sampler is not None and self.is_feeding:  # otherwise the replay draws from the steps that it has
            sampler._await_replay(n)

    @contextmanager
    def stand_still(self) -> Iterator[None]:
        sampler = self._sampler()
        if sampler is None or sampler.state is not SamplerState.RUNNING:
            yield
            return
        sampler.pause()
        try:
            yield
        finally:
            sampler.resume()
