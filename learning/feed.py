"""A replay that the workers of an `AsyncSampler` write into, and how many positions a learner draws for each step."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from penstock.arguments import between, check_fields, must_be, number, optional
from penstock.buffers import Samples
from penstock.errors import ConfigError
from penstock.learning.appending import Appender

if TYPE_CHECKING:
    from penstock.learning.replay import Replay


@dataclass(frozen=True)
class Ratio:
    """Keeps the number of drawn positions near `samples_per_step` for each appended step.

    Args:
        samples_per_step: positions drawn for each step, such as 8.
        batch_steps: steps of one batch that is appended, `batch_T * batch_B`. `AsyncSampler` knows it.
        batch_size: positions of one `replay.sample`. With `AsyncSampler` it may be left out: then it is what
            `replay.sample` gets.
        min_steps: steps to append before the first draw. No positions are drawn for these.
        slack: how many positions the draws may be ahead of the target, or behind it. The default is
            `samples_per_step * batch_steps + batch_size`, and the least is half of it: then appends and draws take
            turns. With less there are counts with which neither of the two could go on.

    With `AsyncSampler(..., replay=replay, ratio=Ratio(8))`, `replay.sample` waits for the workers, and the workers wait
    for it. With other samplers, ask before each step. At least one of `may_append` and `may_sample` is always True, so
    a loop that asks both never stalls:

        while ...:
            if ratio.may_append(replay):
                replay.append(sampler.obtain_samples(itr)[0])
            if ratio.may_sample(replay):
                train(replay.sample(256))

    Raises `ConfigError` if `slack` is too small.
    """

    samples_per_step: Annotated[float, number]
    batch_steps: Annotated[int | None, optional(between(1))] = None
    batch_size: Annotated[int | None, optional(between(1))] = None
    min_steps: Annotated[int, between(0)] = 0
    slack: Annotated[float | None, optional(number)] = None

    def __post_init__(self) -> None:
        check_fields(self)
        must_be("samples_per_step", self.samples_per_step, self.samples_per_step > 0, "more than 0")
        if self.slack is None:
            return
        least = (self.samples_per_step * (self.batch_steps or 1) + (self.batch_size or 1)) / 2
        if self.slack < least:
            raise ConfigError(
                f"slack={self.slack} is too small: one batch of {self.batch_steps or 1} steps is worth "
                f"{self.samples_per_step * (self.batch_steps or 1):g} positions, and one sample draws "
                f"{self.batch_size or 1}. Set slack to at least half of their sum, {least}"
            )

    def _limits(self) -> tuple[float, float]:
        """How many positions the draws must at least be behind the target to go on, and at most for the appends."""
        if self.batch_steps is None or self.batch_size is None:
            raise ConfigError("without an AsyncSampler, Ratio needs batch_steps and batch_size")
        worth = self.samples_per_step * self.batch_steps
        slack = worth + self.batch_size if self.slack is None else self.slack
        draw_from = self.batch_size - slack
        # With the least slack both are the same number, except for rounding. Nothing may lie between them.
        return draw_from, max(slack - worth, draw_from)

    def behind(self, replay: Replay[Any]) -> float:
        """How many positions fewer than the target were drawn; negative if more were."""
        return self._behind(replay, replay.n_steps)

    def _behind(self, replay: Replay[Any], n_steps: int) -> float:
        return (n_steps - self.min_steps) * self.samples_per_step - replay.n_drawn

    def may_sample(self, replay: Replay[Any]) -> bool:
        """Whether a draw of `batch_size` positions keeps the draws within `slack` of the target."""
        draw_from, _ = self._limits()
        return replay.n_steps >= self.min_steps and replay.is_ready and self.behind(replay) >= draw_from

    def may_append(self, replay: Replay[Any], n_begun: int | None = None) -> bool:
        """Whether the draws have come near enough to the target for another batch of steps. `n_begun`: all steps so
        far, with those that are being sampled now; None: there are no such steps."""
        _, append_to = self._limits()
        n_steps = replay.n_steps if n_begun is None else n_begun
        if n_steps < self.min_steps or (not replay.is_ready and n_steps <= replay.n_steps):
            return True
        return self._behind(replay, n_steps) <= append_to


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

    def __init__(self, sampler: FeedingSampler, replay: Replay[Any], ratio: Ratio | None, *, is_pinned: bool) -> None:
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
        appender = self.replay.feed_from(self, samples, columns, n_slots * self._batch_T, spare_finals)
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
        """Whether the workers may still write."""
        sampler = self._sampler()
        return sampler is not None and sampler.is_feeding

    def before_sample(self, n: int) -> None:
        """`n` positions will be drawn: report failures, let the workers continue, and wait until enough is there."""
        sampler = self._sampler()
        if sampler is not None and self.is_feeding:  # otherwise the replay draws from the steps that it has
            sampler.await_replay(n)

    def stand_still(self) -> AbstractContextManager[None]:
        """A context in which no worker writes."""
        sampler = self._sampler()
        return nullcontext() if sampler is None else sampler.stand_still()
