"""Ratio: how many positions a learner draws for each step that is sampled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.errors import ConfigError
from penstock.replays.options import require_count, require_number
from penstock.replays.replay import Replay


@dataclass(frozen=True)
class Ratio:
    """Keeps the number of drawn positions near `samples_per_step` for each appended step.

    Args:
        samples_per_step: positions drawn for each step, such as 8.
        batch_steps: steps of one batch that is appended, `batch_T * batch_B`.
        batch_size: positions of one `replay.sample`.
        min_steps: steps to append before the first draw. No positions are drawn for these.
        slack: how many positions the draws may be ahead of the target, or behind it: at least
            `samples_per_step * batch_steps + batch_size`, which is the default.

    At least one of `may_append` and `may_sample` is always True, so a loop that asks both never stalls:

        while ...:
            if ratio.may_append(replay):
                replay.append(sampler.obtain_samples(itr)[0])
            if ratio.may_sample(replay):
                train(replay.sample(256))

    Raises `ConfigError` if `slack` is too small.
    """

    samples_per_step: float
    batch_steps: int
    batch_size: int
    min_steps: int = 0
    slack: float | None = None

    def __post_init__(self) -> None:
        if not require_number("samples_per_step", self.samples_per_step, np.finfo(float).max) > 0:
            raise ConfigError("samples_per_step must be more than 0")
        require_count("batch_steps", self.batch_steps)
        require_count("batch_size", self.batch_size)
        require_count("min_steps", self.min_steps, 0)
        if self.slack is None:
            return
        require_number("slack", self.slack, np.finfo(float).max)
        if self.slack < self._smallest_slack:
            raise ConfigError(
                f"slack={self.slack:g} is too small: one batch of {self.batch_steps} steps is worth "
                f"{self.samples_per_step * self.batch_steps:g} positions, and one sample draws {self.batch_size}. "
                f"Set slack to at least {self._smallest_slack:g}"
            )

    @property
    def _smallest_slack(self) -> float:
        return self.samples_per_step * self.batch_steps + self.batch_size

    @property
    def _slack(self) -> float:
        return self._smallest_slack if self.slack is None else self.slack

    def behind(self, replay: Replay) -> float:
        """How many positions fewer than the target were drawn; negative if more were."""
        return (replay.n_steps - self.min_steps) * self.samples_per_step - replay.n_drawn

    def may_sample(self, replay: Replay) -> bool:
        """Whether a draw of `batch_size` positions keeps the draws within `slack` of the target."""
        if replay.n_steps < self.min_steps or not replay.is_ready:
            return False
        return self.behind(replay) + self._slack >= self.batch_size

    def may_append(self, replay: Replay) -> bool:
        """Whether the draws have come near enough to the target for another batch of steps."""
        if replay.n_steps < self.min_steps or not replay.is_ready:
            return True
        return self.behind(replay) + self.samples_per_step * self.batch_steps <= self._slack
