"""Renewal: one environment is built again after its game has failed, and the others of its worker go on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.buffers.reports import in_one_line
from penstock.columns.builder import EnvBuilder
from penstock.envs.factory import EnvContext
from penstock.envs.seeding import ColumnStreams, Purpose
from penstock.errors import GameError
from penstock.workers.control import Phase, Progress

_log = logging.getLogger("penstock")


@dataclass
class Renewals:
    """The renewals of a worker's environments of one purpose."""

    errors: tuple[type[Exception], ...]  #: what an environment raises whose game has failed
    max_renewals: int  #: of each environment within `window` seconds, and the most starts in a row that fail
    window: float
    builder: EnvBuilder
    builds: Sequence[Callable[[EnvContext, Phase], Any]]  #: by column
    streams: ColumnStreams
    purpose: Purpose
    worker_rank: int
    progress: Progress
    is_exhausted: bool = False  #: whether there were too many: no error is caught any more
    first_seeds: dict[int, int] = field(default_factory=dict)  #: of environments that have not been reset since
    _history: dict[int, list[tuple[float, str]]] = field(default_factory=dict)
    _failed_starts: dict[int, int] = field(default_factory=dict)  # since the last reset that succeeded

    def note_reset(self, column: int) -> None:
        """The environment was reset: its game has started."""
        self._failed_starts.pop(column, None)

    def renew(self, column: int, old: object, error: Exception, *, is_cut: bool) -> Any:
        """Close the environment, whose game has failed with `error`, and build it again. Returns it. `is_cut`: an
        episode has ended with it.

        Raises `GameError` if there were too many renewals of this environment.
        """
        while True:
            history, now = self._history.setdefault(column, []), time.monotonic()
            recent = [f"  {now - when:.1f} s ago: {what}" for when, what in history if when > now - self.window]
            env_rank = self.streams.env_ranks[column]
            n_failed = self._failed_starts[column] = self._failed_starts.get(column, 0) + (not is_cut)
            if len(recent) >= self.max_renewals or n_failed > self.max_renewals:
                self.is_exhausted = True
                how = f"It was built again {len(recent)} times in {self.window:g} s"
                if len(recent) < self.max_renewals:  # starts that fail slowly leave the window
                    recent = [f"  {now - when:.1f} s ago: {what}" for when, what in history[-self.max_renewals :]]
                    how = f"It has failed to start {n_failed} times in a row"
                text = (
                    f"the game of env_rank {env_rank} has failed: {in_one_line(error)}. {how} "
                    f"(max_renewals={self.max_renewals}): raise max_renewals, or find out why it fails"
                )
                recent = ["Earlier failures:", *recent] if recent else []
                raise GameError("\n".join([text, *recent, str(error)])) from error
            history.append((now, in_one_line(error)))
            self.progress.count_renewal(is_cut=is_cut)
            cut = ", and its episode is cut" if is_cut else ""
            # As text: a handler may keep the record, and with the error it would keep the memory of this sampler.
            _log.warning("env_rank %d is built again (renewal %d)%s: %s", env_rank, len(history), cut, str(error))
            seed = self.streams.renewal_seed(column, self.purpose, len(history))
            context = EnvContext(env_rank, self.worker_rank, seed, self.purpose)
            try:
                env, self.first_seeds[column] = self.builder.renew(old, self.builds[column], context), seed
                return env
            except self.errors as another:  # the new game has failed at its start
                error, old, is_cut = another, None, False
