"""Trackers: they follow the running trajectories of one worker's columns and hand over the finished ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.buffers.trajectory_queue import RECORD, Frame
from penstock.collectors.traj_info import TrajInfo

__all__ = ["BatchTracker", "ObjectTracker", "StepHook", "Tracker", "make_tracker"]

#: Called for column b after each environment step: (b, observation acted on, action, reward,
#: terminated, truncated, info).
StepHook = Callable[[int, Any, Any, Any, bool, bool, dict[str, Any]], None]


class Tracker(Protocol):
    """What collectors need of a tracker."""

    #: The hook for every environment step, or None if rewards and dones at the batch's end suffice.
    on_step: StepHook | None

    def set_agent_info(self, agent_info: Any) -> None:
        """The agent's report `[B, ...]` on the row that is about to be stepped."""

    def on_done(self, t: int, column: int, final_observation: Any) -> None:
        """Column's trajectory has ended at row t."""

    def end_rows(self, reward: npt.NDArray[Any], done: npt.NDArray[Any], first_t: int = 0) -> int:
        """Rows `[n, B]` are complete: hand over what has finished in them; returns how many."""

    def restart(self) -> None:
        """Drop all running trajectories: the environments have been reset."""

    def drop(self, column: int) -> None:
        """Column's trajectory ended before the first batch: begin a new one, hand nothing over."""

    def preload(self, column: int, rewards: Sequence[float]) -> None:
        """Column's running trajectory begins with these rewards, from before the first batch."""


def make_tracker(
    cls: type[TrajInfo],
    kwargs: Mapping[str, Any],
    env_ranks: range,
    put_records: Callable[[npt.NDArray[Any]], None],
    put_frames: Callable[[Sequence[Frame]], None],
) -> Tracker:
    """The tracker for `cls`: per batch for the stock class itself, per step for its subclasses."""
    if cls is TrajInfo:
        return BatchTracker(env_ranks, put_records, **kwargs)
    return ObjectTracker(cls, kwargs, env_ranks, put_frames)


class BatchTracker:
    """The stock TrajInfo, computed from rewards and dones of many rows at once.

    A trajectory that outlives a batch is carried along as partial sums per column.
    """

    on_step: StepHook | None = None

    def __init__(self, env_ranks: range, put: Callable[[npt.NDArray[Any]], None], discount: float = 1.0) -> None:
        self._env_ranks = np.asarray(env_ranks)
        self._put = put
        self._discount = discount
        self._carry = np.zeros(len(env_ranks), RECORD)

    def set_agent_info(self, agent_info: Any) -> None:
        """Not needed."""

    def on_done(self, t: int, column: int, final_observation: Any) -> None:
        """Not needed: dones are read from the rows."""

    def restart(self) -> None:
        self._carry[...] = 0

    def drop(self, column: int) -> None:
        self._carry[column] = 0

    def preload(self, column: int, rewards: Sequence[float]) -> None:
        reward = np.asarray(rewards, np.float64)
        weights = self._discount ** np.arange(len(reward))
        returns = float(reward.sum()), int(np.count_nonzero(reward)), float((reward * weights).sum())
        self._carry[column] = (0, 0, len(reward), *returns)

    def end_rows(self, reward: npt.NDArray[Any], done: npt.NDArray[Any], first_t: int = 0) -> int:
        records = self._digest(reward, done, first_t)
        if len(records):
            self._put(records)
        return len(records)

    def _digest(self, reward: npt.NDArray[Any], done: npt.NDArray[Any], first_t: int) -> npt.NDArray[Any]:
        n_rows, n_columns = reward.shape
        # Column after column in one line, cut into segments at column starts and behind dones.
        rewards = reward.T.astype(np.float64).ravel()
        begins = np.ones((n_columns, n_rows), np.bool_)
        begins[:, 1:] = done.T[:, :-1]
        starts = np.flatnonzero(begins.ravel())
        lengths = np.diff(starts, append=rewards.size)
        column = starts // n_rows
        ends = starts % n_rows + lengths - 1
        # The first segment of a column continues what the rows before left unfinished.
        continues = starts % n_rows == 0
        carry = np.where(continues, self._carry[column], np.zeros((), RECORD))
        segments = np.zeros(len(starts), RECORD)
        segments["t"] = ends + first_t
        segments["env_rank"] = self._env_ranks[column]
        segments["Length"] = carry["Length"] + lengths
        segments["Return"] = carry["Return"] + np.add.reduceat(rewards, starts)
        segments["NonzeroRewards"] = carry["NonzeroRewards"] + np.add.reduceat((rewards != 0).astype(np.int64), starts)
        if self._discount == 1.0:
            segments["DiscountedReturn"] = segments["Return"]
        else:
            age = np.arange(rewards.size) - np.repeat(starts - carry["Length"], lengths)
            discounted = rewards * self._discount**age
            segments["DiscountedReturn"] = carry["DiscountedReturn"] + np.add.reduceat(discounted, starts)
        finished = done[ends, column]
        last = ends == n_rows - 1
        self._carry[column[last]] = segments[last]
        self._carry[column[last & finished]] = 0
        return np.asarray(segments[finished])


class ObjectTracker:
    """One instance of the user's TrajInfo subclass per column, stepped with the environment."""

    def __init__(
        self,
        cls: type[TrajInfo],
        kwargs: Mapping[str, Any],
        env_ranks: range,
        put: Callable[[Sequence[Frame]], None],
    ) -> None:
        self._cls, self._kwargs = cls, kwargs
        self._env_ranks = env_ranks
        self._put = put
        self._agent_info: Any = None
        self._finished: list[Frame] = []
        self.on_step: StepHook | None = self._step
        self.restart()

    def restart(self) -> None:
        self._running = [self._cls(**self._kwargs) for _ in self._env_ranks]

    def drop(self, column: int) -> None:
        self._running[column] = self._cls(**self._kwargs)

    def preload(self, column: int, rewards: Sequence[float]) -> None:
        """Not needed: `on_step` has seen them."""

    def set_agent_info(self, agent_info: Any) -> None:
        self._agent_info = agent_info

    def _step(
        self, b: int, observation: Any, action: Any, reward: float, terminated: bool, truncated: bool, info: Any
    ) -> None:
        self._running[b].step(observation, action, reward, terminated, truncated, self._agent_info[b], info)

    def on_done(self, t: int, column: int, final_observation: Any) -> None:
        info = self._running[column]
        info.terminate(final_observation)
        self._finished.append((t, self._env_ranks[column], vars(info)))
        self._running[column] = self._cls(**self._kwargs)

    def end_rows(self, reward: npt.NDArray[Any], done: npt.NDArray[Any], first_t: int = 0) -> int:
        finished, self._finished = self._finished, []
        self._put(finished)
        return len(finished)
