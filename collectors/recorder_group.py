"""The recorders of all policies that act in games, and the figures of whole games: as one recorder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.collectors.recorder import Recorder
from penstock.collectors.tracking import Tracker
from penstock.columns.interface import Columns, Events
from penstock.workers.control import Progress, UntimedProgress


class RecorderGroup:
    """What a collector calls in place of the only `Recorder`, where environments have several agents.

    It also follows whole games, the environments' own sums of all rewards.
    """

    stateful = True  # `join` counts the rows of parked games, also if no agent has a state

    def __init__(self, recorders: Sequence[Recorder], tracker: Tracker, columns: Columns, progress: Progress) -> None:
        self._recorders, self._game_tracker, self._columns, self._progress = recorders, tracker, columns, progress
        self._batch_T = min(recorder.batch_T for recorder in recorders)
        # Rewards for agents that did not act, as (row, environment, reward), and where games have ended.
        self._late, self._over = list[tuple[int, int, float]](), list[tuple[int, int]]()
        self._n_parked = 0  # rows of games that wait for the end of the batch
        self._settled = 0, 0  # the row that was recorded last, and how many games waited then

    def use_slot(self, slot: int) -> None:
        for recorder in self._recorders:
            recorder.use_slot(slot)

    def begin_batch(self, itr: int) -> None:
        for recorder in self._recorders:
            recorder.begin_batch(itr)
        self._late, self._over = [], []
        self._n_parked = self._batch_T * len(self._columns.waiting)

    def act(self, t: int) -> None:
        for recorder in self._recorders:
            recorder.act(t)

    def record_env_info(self, t: int) -> None:
        for recorder in self._recorders:
            recorder.record_env_info(t)

    def record(self, t: int, events: Events) -> Sequence[int]:
        for recorder, policy_events in zip(self._recorders, events.policies, strict=True):
            recorder.record(t, Events(events.over, [policy_events]))
        for e in events.cut:
            self._game_tracker.cut(e, max((end + 1 for end, ended in self._over if ended == e), default=0), t)
            for recorder, columns in zip(self._recorders, self._columns.columns_of(e), strict=True):
                for column in columns:  # also of who had ended: a trajectory may go on (`TrajInfo.traj_done`)
                    recorder.tracker.cut(column, t + 1, t)
        if events.over:
            self._over += [(t, e) for e in events.over if e not in events.cut]
        if events.late:
            self._late += [(t, e, reward) for e, reward in events.late]
            self._count_late(events.late)
        self._settled = t, len(self._columns.waiting)
        return ()

    def _count_late(self, late: Sequence[tuple[int, float]]) -> None:
        if not isinstance(self._progress, UntimedProgress):
            self._progress.add_late_rewards(len(late))

    def join(self, joined: Sequence[Sequence[int]]) -> None:
        for recorder, columns in zip(self._recorders, joined, strict=True):
            recorder.begin(columns)
        t, n_waiting = self._settled
        self._n_parked += (len(self._columns.waiting) - n_waiting) * (self._batch_T - 1 - t)

    def write_step(self, t: int) -> None:
        for recorder in self._recorders:
            recorder.write_step(t)

    @property
    def n_steps(self) -> int:
        """How many steps of games the batch has."""
        n: int = self._batch_T * len(self._columns.env_ranks)
        return n - self._n_parked

    def end_batch(self, n_rows: int) -> int:
        n_sent = sum([recorder.end_batch(n_rows) for recorder in self._recorders])
        if not n_rows:
            return n_sent
        rewards, over = self._table(n_rows, self._late, np.float32), self._table(n_rows, self._over, np.bool_)
        columns_of = self._columns.columns_of
        for p, recorder in enumerate(self._recorders):  # a policy's columns of one environment are neighbours
            firsts = {e: columns[0] for e in range(rewards.shape[1]) if (columns := columns_of(e)[p])}
            policy_rewards = recorder.samples.reward[1 : n_rows + 1]
            rewards[:, list(firsts)] += np.add.reduceat(policy_rewards, list(firsts.values()), axis=1)
        return n_sent + self._game_tracker.end_rows(rewards, over, self._recorders[0].first_t)

    def _table(self, n_rows: int, entries: Sequence[tuple[Any, ...]], dtype: Any) -> npt.NDArray[Any]:
        """An array `[n_rows, environments]` with these sums: (row, environment, number), or 1 without a number."""
        table = np.zeros((n_rows, len(self._columns.env_ranks)), dtype)
        for t, e, *number in entries:
            table[t, e] += number[0] if number else True
        return table

    def pull(self, version: int = 0) -> int:
        """Returns the version of the first policy."""
        first, *_ = [recorder.pull(version) for recorder in self._recorders]
        return first
