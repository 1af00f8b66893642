"""Evaluation: the agent in separate environments. Only finished trajectories are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.buffers.named import NamedArrays, map_leaves
from penstock.buffers.slots import BatchColumns
from penstock.collectors.collector import Collector, CollectorParts
from penstock.columns.interface import Events, Start
from penstock.envs.seeding import Purpose, eval_seed
from penstock.workers.control import Phase

_MOST_ROWS, _MOST_BYTES = 128, 1 << 22  # of the rows that are collected before their trajectories are sent
_NEEDED = ("observation", "action", "reward", "terminated", "truncated", "done", "valid", "prev_done", "agent_info")


def eval_columns(layout: NamedArrays, batch_T: int, n_columns: int) -> BatchColumns:
    """Memory for a few rows of an evaluation, in the structure of a policy's arrays with `batch_T` rows."""
    kept = NamedArrays({name: layout[name] for name in _NEEDED if name in layout})
    row_bytes = sum(leaf[0, :1].nbytes for _, leaf in kept.leaves()) * n_columns
    n_rows = max(1, min(_MOST_ROWS, _MOST_BYTES // max(1, row_bytes)))

    def rows(leaf: Any) -> Any:  # some have batch_T + 1 rows
        return np.zeros((n_rows + len(leaf) - batch_T, n_columns, *leaf.shape[2:]), leaf.dtype)

    arrays = {name: map_leaves(rows, field) for name, field in kept.items()}
    arrays["prev_done"] = np.zeros((n_rows, n_columns), np.bool_)  # idle columns have gaps
    return BatchColumns(NamedArrays(arrays, policy_version=np.zeros(n_columns, np.int64)), slice(None))


class EvalCollector(Collector):
    """Evaluates: the loop of a collector, on memory of a few rows, in environments of any kind.

    Each evaluation plays for `max_T` steps, or until `max_trajectories` have finished; or the given number of
    trajectories in each environment, which is parked then. The number per environment is fixed, because the first n
    episodes that end in any environment would be short ones. Unfinished trajectories are dropped at the end.

    Trajectory k of an environment begins with the same seed in each evaluation, so evaluations can be compared.
    """

    evaluates = True

    def __init__(self, parts: CollectorParts) -> None:
        super().__init__(parts)
        assert parts.limits is not None
        self.limits, self._n_evaluations, n = parts.limits, 0, len(parts.columns.env_ranks)
        most = self.limits.max_trajectories
        self._most = float("inf") if most is None else most
        self._left, self._n_ended, self._n_found = [0.0] * n, [0] * n, 0
        self.columns.keeps_seeds = True

    def collect_evaluation(self, itr: int) -> None:
        """Run the agents. Finished trajectories go to the trackers, and `progress.n_results` counts them."""
        self.begin_evaluation()
        n_sent, max_T = 0, self.limits.max_T
        for first_t in range(0, max_T, self.batch_T):
            wanted = min(self.batch_T, max_T - first_t)
            for recorder in self.recorders:
                recorder.first_t = first_t
            self.begin_batch(itr)
            n_rows = self._collect_rows(wanted)
            n_sent += self.end_rows(n_rows)
            if n_rows < wanted:
                break
        self.progress.enter(Phase.SENDING)
        self.progress.n_results = n_sent

    def _collect_rows(self, n_rows: int) -> int:
        """Collect so many rows, or fewer if the evaluation ends. Returns how many."""
        for t in range(n_rows):
            if self.must_stop():
                return t
            self.act(t)
            self.step_envs(t)
        return n_rows

    def begin_evaluation(self) -> None:
        """Reset the environments with the seeds of their first trajectories, and the agents with new ones: an
        evaluation does not depend on the one before."""
        key, n = self._n_evaluations, len(self.columns.env_ranks)
        self.columns.evaluation = self._n_evaluations = key + 1
        shares = self.limits.episodes
        self._left = [float("inf")] * n if shares is None else list(shares)
        self._n_ended, self._n_found = [0] * n, 0
        self.reset_envs([self.seed_of(e) for e in range(n)], [e for e in range(n) if self._left[e] > 0])
        for recorder in self.recorders:
            recorder.agent.seed_columns(recorder.streams.rngs(Purpose.EVAL_ACTION, key))
            recorder.agent.reset()

    def seed_of(self, e: int) -> int:
        """The seed of the next trajectory of environment e. All evaluation environments share one sequence of seeds."""
        return eval_seed(self.streams.seed, self._n_ended[e] * self.limits.n_envs + self.streams.env_ranks[e])

    def must_stop(self) -> bool:
        """Whether to end now: the main process says so, or this worker alone has finished enough trajectories."""
        return self.progress.stop_eval or self._n_found >= self._most or not any(self._left)

    def begin_episodes(self, events: Events, going: Sequence[int]) -> Sequence[Sequence[int]]:
        over, columns = list(events.over), self.columns
        goes_on = set(going)
        for e in over:
            if e not in goes_on and e not in events.cut:  # the game of one that was cut is played again
                self._left[e] -= 1
                self._n_ended[e] += 1
                self._n_found += 1
        self.progress.n_results = self._n_found  # the main process reads it, and stops when there are enough
        if finished := [e for e in over if self._left[e] <= 0]:
            columns.park(finished)
            over = [e for e in over if self._left[e] > 0]
        starts = [Start(None if e in goes_on else self.seed_of(e)) for e in over] if columns.can_step_one else None
        return columns.reset(over, starts)
