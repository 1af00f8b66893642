"""Trackers: they follow the running trajectories of one worker's columns and hand over the finished ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.buffers.named import map_leaves
from penstock.buffers.trajectory_queue import FIGURES, RECORD, MessageKind, ObjectMessage
from penstock.collectors.native import COMPILED, sum_episodes
from penstock.collectors.traj_info import TrajInfo

__all__ = ["BatchTracker", "ObjectTracker", "StepHook", "Tracker", "kept", "make_tracker"]

#: Called for column b after each environment step: (b, observation acted on, action, reward,
#: terminated, truncated, info). Observation and action are copies made before the step.
StepHook = Callable[[int, Any, Any, Any, bool, bool, dict[str, Any]], None]


def kept(value: Any) -> Any:
    """A copy of what an environment gave or was given: it may write into its own arrays again."""
    if value.__class__ is np.ndarray:
        return value.copy()
    if value.__class__ is dict:
        return {key: kept(part) for key, part in value.items()}
    if value.__class__ is tuple:
        return tuple(kept(part) for part in value)
    return copy.deepcopy(value)


class Tracker(Protocol):
    """What collectors need of a tracker."""

    @property
    def on_step(self) -> StepHook | None:
        """The hook for every environment step, or None if rewards and dones at the batch's end suffice."""

    def set_agent_info(self, agent_info: Any) -> None:
        """The agent's report `[B, ...]` on the row that is about to be stepped."""

    def on_episode_end(self, t: int, column: int, final_observation: Any) -> None:
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
    put_frames: Callable[[Sequence[ObjectMessage]], None],
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
        self._discount = float(discount)
        # What each column's running trajectory has added up to so far: FIGURES, and the weight of its next reward.
        self._running = np.zeros((len(FIGURES) + 1, len(env_ranks)))
        self.restart()
        self._is_compiled = COMPILED and env_ranks.step == 1
        self._room = np.empty(0, RECORD)

    def set_agent_info(self, agent_info: Any) -> None:
        """Not needed."""

    def on_episode_end(self, t: int, column: int, final_observation: Any) -> None:
        """Not needed: dones are read from the rows."""

    def restart(self) -> None:
        self._running[:-1], self._running[-1] = 0, 1

    def drop(self, column: int) -> None:
        self.preload(column, ())

    def preload(self, column: int, rewards: Sequence[float]) -> None:
        info = TrajInfo(self._discount)
        for reward in rewards:
            info.step(None, None, reward, False, False, None, {})
        self._running[:, column] = (*(getattr(info, name) for name in FIGURES), info._weight)

    def end_rows(self, reward: npt.NDArray[Any], done: npt.NDArray[Any], first_t: int = 0) -> int:
        records = self._sum(reward, done, first_t) if self._is_compiled else None
        if records is None:
            records = self._digest(reward, done, first_t)
        if len(records):
            self._put(records)
        return len(records)

    def _sum(self, reward: npt.NDArray[Any], done: npt.NDArray[Any], first_t: int) -> npt.NDArray[Any] | None:
        """`_digest`, compiled, if it can be."""
        if len(self._room) < reward.size:  # a trajectory may end in every cell
            self._room = np.empty(reward.size, RECORD)
        first_env_rank = int(self._env_ranks[0])
        room = self._room.view(np.uint8)
        n = sum_episodes(reward, done, self._running, room, first_t, first_env_rank, self._discount)
        return self._room[:n].copy() if n >= 0 else None

    def _digest(self, reward: npt.NDArray[Any], done: npt.NDArray[Any], first_t: int) -> npt.NDArray[Any]:
        """The trajectories that finish in these rows; what is left running stays in the sums."""
        n_rows = len(reward)
        # Column after column in one line, cut into segments behind dones and column ends.
        rewards, is_done = reward.T.astype(np.float64).ravel(), done.T.ravel()
        cuts = is_done.copy()
        cuts[n_rows - 1 :: n_rows] = True
        ends = np.flatnonzero(cuts)
        starts = np.append(0, ends[:-1] + 1)
        last = np.searchsorted(ends, np.arange(n_rows - 1, rewards.size, n_rows))  # segment, of each column
        first = np.append(0, last[:-1] + 1)

        figures = np.empty((len(FIGURES), len(ends)))
        figures[0] = ends - starts + 1
        figures[1] = np.add.reduceat(rewards, starts)
        figures[2] = np.add.reduceat(rewards != 0, starts, dtype=np.int64)
        weighted = rewards if self._discount == 1.0 else rewards * self._discount ** self._ages(starts, ends, first)
        figures[3] = np.add.reduceat(weighted, starts)
        figures[:, first] += self._running[:-1]
        self._running[:-1] = np.where(is_done[ends[last]], 0.0, figures[:, last])
        self._running[-1] = self._discount ** self._running[0]

        finished = is_done[ends]
        column, row = np.divmod(ends[finished], n_rows)
        records = np.empty(len(row), RECORD)
        records["t"], records["env_rank"] = row + first_t, self._env_ranks[column]
        for name, figure in zip(FIGURES, figures[:, finished], strict=True):
            records[name] = figure
        return records

    def _ages(self, starts: Any, ends: Any, first: Any) -> Any:
        """How many steps each reward's trajectory had made before it."""
        begun = starts.astype(np.float64)
        begun[first] -= self._running[0]
        return np.arange(ends[-1] + 1) - np.repeat(begun, ends - starts + 1)


class ObjectTracker:
    """One instance of the user's TrajInfo subclass per column, stepped with the environment."""

    def __init__(
        self,
        cls: type[TrajInfo],
        kwargs: Mapping[str, Any],
        env_ranks: range,
        put: Callable[[Sequence[ObjectMessage]], None],
    ) -> None:
        self._cls, self._kwargs = cls, kwargs
        self._env_ranks = env_ranks
        self._put = put
        self._agent_info: Any = None
        self._finished: list[ObjectMessage] = []
        self.restart()

    @property
    def on_step(self) -> StepHook | None:
        return self._step

    def restart(self) -> None:
        self._running = [self._cls(**self._kwargs) for _ in self._env_ranks]

    def drop(self, column: int) -> None:
        self._running[column] = self._cls(**self._kwargs)

    def preload(self, column: int, rewards: Sequence[float]) -> None:
        """Not needed: `on_step` has seen them."""

    def set_agent_info(self, agent_info: Any) -> None:
        # A copy, of the whole row at once: the next batch overwrites it, while the trajectory may go on.
        self._agent_info = map_leaves(np.copy, agent_info)

    def _step(
        self, b: int, observation: Any, action: Any, reward: float, terminated: bool, truncated: bool, info: Any
    ) -> None:
        self._running[b].step(observation, action, reward, terminated, truncated, self._agent_info[b], info)

    def on_episode_end(self, t: int, column: int, final_observation: Any) -> None:
        info = self._running[column]
        info.terminate(kept(final_observation))
        self._finished.append(ObjectMessage(MessageKind.TRAJ_INFO, t, self._env_ranks[column], vars(info)))
        self._running[column] = self._cls(**self._kwargs)

    def end_rows(self, reward: npt.NDArray[Any], done: npt.NDArray[Any], first_t: int = 0) -> int:
        finished, self._finished = self._finished, []
        self._put(finished)
        return len(finished)
