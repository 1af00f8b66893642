"""Evaluation where several agents share an environment: games are counted, not agents."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.collectors.lock_step import LockStepCollector
from penstock.envs.seeding import eval_seed
from penstock.workers.control import Phase


class SeatEvalCollector:
    """Runs evaluations in one worker's environments of several agents, with a `LockStepCollector` on memory of its own.

    It plays for `max_T` steps, or until `max_games` have ended; or `shares[e]` games in environment e.
    """

    def __init__(
        self, collector: LockStepCollector, max_T: int, max_games: int | None, shares: Sequence[int] | None
    ) -> None:
        self._collector, self.streams, self._max_T = collector, collector.streams, max_T
        self.envs, self.progress = collector.games, collector.progress
        self._max_games = float("inf") if max_games is None else max_games
        self._shares = shares
        self._left: list[float] = []
        self._n_evaluations = self._n_games = 0
        collector.games.may_reset, collector.games.seed_of = self._may_reset, self._seed_of

    def pull(self) -> int:
        """The agents get the newest parameters."""
        return self._collector.pull()

    def collect_evaluation(self, itr: int) -> None:
        """Run the agents. Finished trajectories go to the trackers."""
        collector, progress, key = self._collector, self.progress, self._n_evaluations
        self._n_evaluations += 1
        n = len(self.envs.envs)
        self._n_games = 0
        self._left = [float("inf")] * n if self._shares is None else list(self._shares)
        self._n_ended = [0] * n
        collector.begin_evaluation([self._seed_of(e) for e in range(n)], key, lambda e: self._left[e] > 0)
        n_sent = 0
        for first_t in range(0, self._max_T, collector.batch_T):
            wanted = min(collector.batch_T, self._max_T - first_t)
            n_sent += collector.collect_rows(itr, wanted, first_t, self._must_stop)
            if collector.rows < wanted:
                break
        progress.enter(Phase.SENDING)
        progress.n_results = n_sent

    def _may_reset(self, e: int) -> bool:
        """A game has ended in environment e."""
        self._n_games += 1
        self.progress.n_results = self._n_games  # the main process ends the evaluation when there are enough
        self._left[e] -= 1
        self._n_ended[e] += 1
        return self._left[e] > 0

    def _seed_of(self, e: int) -> int:
        n_envs = self._collector.desks[0].agent.n_envs or len(self.envs.envs)
        return eval_seed(self.streams.seed, self._n_ended[e] * n_envs + self.streams.env_ranks[e])

    def _must_stop(self) -> bool:
        return self.progress.stop_eval or self._n_games >= self._max_games or not any(n > 0 for n in self._left)
