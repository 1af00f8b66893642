"""Ratio: how many positions a learner draws for each step that is sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from penstock.arguments import integer
from penstock.errors import ConfigError
from penstock.learning.options import require_number


class CountsSteps(Protocol):
    """What a ratio reads of a `Replay`."""

    @property
    def n_steps(self) -> int:
        """How many steps were appended."""

    @property
    def is_ready(self) -> bool:
        """Whether it can draw."""

    @property
    def n_drawn(self) -> int:
        """How many positions were drawn."""


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

    samples_per_step: float
    batch_steps: int | None = None
    batch_size: int | None = None
    min_steps: int = 0
    slack: float | None = None

    def __post_init__(self) -> None:
        if not require_number("samples_per_step", self.samples_per_step, np.finfo(float).max) > 0:
            raise ConfigError("samples_per_step must be more than 0")
        for name in ("batch_steps", "batch_size"):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), 1)
        integer("min_steps", self.min_steps, 0)
        if self.slack is None:
            return
        require_number("slack", self.slack, np.finfo(float).max)
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

    def behind(self, replay: CountsSteps) -> float:
        """How many positions fewer than the target were drawn; negative if more were."""
        return self._behind(replay, replay.n_steps)

    def _behind(self, replay: CountsSteps, n_steps: int) -> float:
        return (n_steps - self.min_steps) * self.samples_per_step - replay.n_drawn

    def may_sample(self, replay: CountsSteps) -> bool:
        """Whether a draw of `batch_size` positions keeps the draws within `slack` of the target."""
        draw_from, _ = self._limits()
        return replay.n_steps >= self.min_steps and replay.is_ready and self.behind(replay) >= draw_from

    def may_append(self, replay: CountsSteps, n_begun: int | None = None) -> bool:
        """Whether the draws have come near enough to the target for another batch of steps. `n_begun`: all steps so
        far, with those that are being sampled now; None: there are no such steps."""
        _, append_to = self._limits()
        n_steps = replay.n_steps if n_begun is None else n_begun
        if n_steps < self.min_steps or (not replay.is_ready and n_steps <= replay.n_steps):
            return True
        return self._behind(replay, n_steps) <= append_to
