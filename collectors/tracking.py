"""TrajInfo, the figures of one trajectory, and trackers: they follow the trajectories of one worker's columns, and send
the finished ones to the main process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.buffers.named import ArrayTree, map_leaves
from penstock.buffers.native import sum_episodes
from penstock.buffers.object_pipe import FIGURES, RECORD, MessageKind, ObjectMessage
from penstock.buffers.tree import snapshot
from penstock.columns.interface import StepHook
from penstock.errors import ConfigError


class TrajInfo:
    """The record of one finished trajectory.

    Attributes: `Length`, the number of steps; `Return`, the sum of the rewards; `NonzeroRewards`, the number of rewards
    that are not zero; `DiscountedReturn`, the sum with reward k weighted by `discount ** k`.

    To record more, write a subclass. Add attributes in `__init__`. Override `step`, which is called after every
    environment step, or `terminate`, which is called once at the end. Both run in the worker; call `super().step(...)`
    in `step`. Override `traj_done` if a trajectory has several episodes. Arguments of `__init__` come from
    `sampler.initialize(..., traj_info_kwargs={...})`. Attributes with a leading underscore are left out of the `repr`.
    The instance's `__dict__` is sent to the main process, so all of it must be picklable.

    Without a subclass nothing is called per step: the figures are computed once per batch, from its float32 rewards.
    """

    # The sampler sets these. Where several agents share an environment, there is one record for each agent, and one for
    # the whole game, with `agent_id` None and the rewards of all agents.
    env_rank: int | None = None  #: the environment
    #: How many trajectories, or games, had ended in it before: since the first batch, or in this evaluation. In
    #: batches, games that were cut or lost count too, so (env_rank, number) names one game.
    number: int | None = None
    #: The seed of a reset, if it had one. In evaluations: of the reset that began the trajectory. In batches, with
    #: `seed_episodes=True`: of the reset that began the episode, or game, in which the trajectory ended.
    seed: int | None = None
    agent_id: Any = None  #: the agent
    policy: str | None = None  #: the name of the policy that played the agent

    def __init__(self, discount: float = 1.0) -> None:
        number: object = discount  # numpy's floats are real numbers too
        if not isinstance(number, Real):
            raise ConfigError(f"discount must be a number, got {discount!r}")
        self.Length = 0
        self.Return = 0.0
        self.NonzeroRewards = 0
        self.DiscountedReturn = 0.0
        self._discount = discount
        self._weight = 1.0

    def step(
        self,
        observation: Any,
        action: Any,
        reward: float,
        terminated: bool,
        truncated: bool,
        agent_info: Any,
        env_info: dict[str, Any],
    ) -> None:
        """Add one step: the agent saw `observation` and chose `action`, with its `agent_info`.

        The environment returned the rest. `observation`, `action` and `reward` are the environment's own values, not
        the recorded ones. `agent_info` is this column's part. All of these are copies, so you may keep them. `env_info`
        is the environment's own dict, which it may reuse: copy what you keep of it.
        """
        self.Length += 1
        self.Return += float(reward)
        self.NonzeroRewards += int(reward != 0)
        self.DiscountedReturn += self._weight * float(reward)
        self._weight *= self._discount

    def traj_done(self, terminated: bool, truncated: bool, env_info: dict[str, Any]) -> bool:
        """Whether the trajectory has ended. Called after `step`, where an episode has ended.

        Override it if a trajectory has several episodes: if each is one life of a game, for example. Where it returns
        False, the trajectory goes on in the environment's next episode, and nothing is reported.
        """
        return True

    def terminate(self, final_observation: Any) -> None:
        """The trajectory ended with `final_observation`, a copy that you may keep."""

    @classmethod
    def restore(cls, attributes: dict[str, Any]) -> TrajInfo:
        """An instance with the attributes that a worker sent. `__init__` does not run again."""
        info = cls.__new__(cls)
        vars(info).update(attributes)
        return info

    @classmethod
    def from_records(cls, records: Iterable[tuple[int, int, int, float, int, float]]) -> list[TrajInfo]:
        """One instance per record: t, env_rank, Length, Return, NonzeroRewards and DiscountedReturn."""
        infos = []
        for _, env_rank, length, return_, nonzero_rewards, discounted_return in records:
            info = cls.__new__(cls)
            # Three times as fast as `restore`: thousands of short episodes may end in one batch.
            info.Length, info.Return = length, return_
            info.NonzeroRewards, info.DiscountedReturn, info.env_rank = nonzero_rewards, discounted_return, env_rank
            infos.append(info)
        return infos

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if not k.startswith("_"))
        return f"{type(self).__name__}({fields})"


Rows = npt.NDArray[Any]  # [n, B]


class Tracker(ABC):
    """What collectors call."""

    #: The hook for every environment step. None if the tracker needs only the rewards and dones of whole rows.
    on_step: StepHook | None = None

    def set_agent_info(self, agent_info: Any) -> None:
        """The agent_info `[B, ...]` of the row that is stepped next."""

    def on_episode_end(self, t: int, column: int, final_observation: Any) -> bool:
        """Column's episode has ended at row t. Returns whether its trajectory has ended too."""
        return True

    @abstractmethod
    def end_rows(
        self, reward: Rows, done: Rows, first_t: int = 0, valid: Rows | None = None, times: Rows | None = None
    ) -> int:
        """Rows `[n, B]` are complete: send the trajectories that finished in them. Returns how many. Cells that are not
        `valid` `[n, B]` belong to no trajectory; None: all are. `times` `[n, B]` are the time steps of the cells; None:
        their rows, counted from `first_t`."""

    @abstractmethod
    def restart(self) -> None:
        """Drop all unfinished trajectories: the environments were reset."""

    @abstractmethod
    def drop(self, column: int) -> None:
        """Start a new trajectory in column, and send nothing: the old one was not sampled.

        This does nothing if an episode has just ended and its trajectory goes on.
        """

    @abstractmethod
    def cut(self, column: int, first: int, t: int) -> None:
        """Column's trajectory was cut at row t of the rows that `end_rows` gets next, and its episode began in row
        `first` of them, or before: send nothing of it, and start a new one."""

    def preload(self, column: int, rewards: Sequence[float]) -> None:
        """Column's trajectory starts with these rewards, from before the first batch."""

    @abstractmethod
    def column_state(self, column: int) -> Any:
        """Column's unfinished trajectory, to be pickled."""

    @abstractmethod
    def load_column_state(self, column: int, state: Any) -> None:
        """Continue with this trajectory in column."""


def make_tracker(
    cls: type[TrajInfo],
    kwargs: Mapping[str, Any],
    env_ranks: Sequence[int],
    put_records: Callable[[npt.NDArray[Any]], None],
    put_messages: Callable[[Sequence[ObjectMessage]], None],
) -> Tracker:
    """The tracker for `cls`: a `BatchTracker` for `TrajInfo` itself, an `ObjectTracker` for a subclass."""
    if cls is TrajInfo:
        return BatchTracker(env_ranks, put_records, **kwargs)
    return ObjectTracker(cls, kwargs, env_ranks, put_messages)


class BatchTracker(Tracker):
    """Computes `TrajInfo` itself from the rewards and dones of many rows.

    It adds in the same order as `TrajInfo.step`, so the figures are equal to the last bit.
    """

    def __init__(
        self,
        env_ranks: Sequence[int],
        put: Callable[[npt.NDArray[Any]], None],
        discount: float = 1.0,
        *,
        reports_cuts: bool = False,
    ) -> None:
        """`reports_cuts`: send a record without a step for each trajectory that was cut, with the inverse `~env_rank`,
        which is negative."""
        self._env_ranks = np.asarray(env_ranks, np.int64)[np.newaxis]
        self._put, self._reports_cuts = put, reports_cuts
        self._discount = float(discount)
        # The FIGURES of each column's unfinished trajectory so far, and the weight of its next reward.
        self._running = np.zeros((len(env_ranks), len(FIGURES) + 1))
        self._cuts: list[tuple[int, slice]] = []
        self.restart()
        self._records = np.empty(0, RECORD)
        self._output = self._records.view(np.uint8)[np.newaxis]

    def restart(self) -> None:
        self._running[:, :-1], self._running[:, -1] = 0, 1

    def drop(self, column: int) -> None:
        self.preload(column, ())

    def cut(self, column: int, first: int, t: int) -> None:
        self._cuts.append((column, slice(first, t + 1)))

    def preload(self, column: int, rewards: Sequence[float]) -> None:
        info = TrajInfo(self._discount)
        for reward in rewards:
            info.step(None, None, reward, False, False, None, {})
        self._running[column] = (*(getattr(info, name) for name in FIGURES), info._weight)

    def column_state(self, column: int) -> Any:
        return self._running[column].copy()

    def load_column_state(self, column: int, state: Any) -> None:
        self._running[column] = state
        self._cuts = [entry for entry in self._cuts if entry[0] != column]  # its game goes on

    def end_rows(
        self, reward: Rows, done: Rows, first_t: int = 0, valid: Rows | None = None, times: Rows | None = None
    ) -> int:
        n_cut = 0
        if self._cuts:
            done, valid = done.copy(), np.ones_like(done) if valid is None else valid.copy()
            for column, rows in self._cuts:
                done[rows, column] = valid[rows, column] = False
                if rows.start == 0:  # it may have begun before these rows
                    self.drop(column)
            if self._reports_cuts:
                cuts = [(first_t + rows.stop - 1, ~self._env_ranks[0, b], 0, 0.0, 0, 0.0) for b, rows in self._cuts]
                n_cut = len(cuts)
                self._put(np.array(cuts, RECORD))
            self._cuts.clear()
        if len(self._records) < reward.size:  # a trajectory may finish in every cell
            self._records = np.empty(reward.size, RECORD)
            self._output = self._records.view(np.uint8)[np.newaxis]
        n = sum_episodes(reward, done, valid, self._running, self._output, first_t, self._env_ranks, self._discount)
        if n == 0:
            return n_cut
        records = self._records[:n].copy() if n > 0 else self._sum_episodes(reward, done, first_t, valid)
        if times is not None:
            columns = np.searchsorted(self._env_ranks[0], records["env_rank"])
            records["t"] = times[records["t"] - first_t, columns] + first_t
        if len(records):
            self._put(records)
        return n_cut + len(records)

    def send_empty_games(self, ends: Sequence[tuple[int, int, float]]) -> int:
        """Send the trajectories of games without a step: time step, column and late reward. Returns how many."""
        records = [(t, self._env_ranks[0, column], 0, reward, reward != 0, reward) for t, column, reward in ends]
        if records:
            self._put(np.array(records, RECORD))
        return len(records)

    def _sum_episodes(self, reward: Rows, done: Rows, first_t: int, valid: Rows | None) -> npt.NDArray[Any]:
        """As the compiled `sum_episodes`, with numpy: row by row."""
        running, parts = self._running, []
        for t, numbers in enumerate(reward.astype(np.float64)):
            counts = np.ones_like(done[t]) if valid is None else valid[t]
            terms = np.stack([np.ones_like(numbers), numbers, numbers != 0, numbers * running[:, -1]], 1)
            running[counts, :-1] += terms[counts]
            running[counts, -1] *= self._discount
            ended = np.flatnonzero(counts & done[t])
            records = np.empty(len(ended), RECORD)
            records["t"], records["env_rank"] = t + first_t, self._env_ranks[0, ended]
            for name, figures in zip(FIGURES, running[ended].T, strict=False):  # the last one is the weight
                records[name] = figures
            running[ended, :-1], running[ended, -1] = 0, 1
            parts.append(records)
        return np.concatenate(parts) if parts else np.empty(0, RECORD)


class ObjectTracker(Tracker):
    """One instance of a TrajInfo subclass per column, stepped with the environment."""

    def __init__(
        self,
        cls: type[TrajInfo],
        kwargs: Mapping[str, Any],
        env_ranks: Sequence[int],
        put: Callable[[Sequence[ObjectMessage]], None],
    ) -> None:
        self._cls, self._kwargs = cls, kwargs
        self._env_ranks = env_ranks
        self._put = put
        self.on_step = self._step
        self._agent_info: Any = None
        self._finished: list[ObjectMessage] = []
        self.restart()

    def restart(self) -> None:
        self._running = [self._cls(**self._kwargs) for _ in self._env_ranks]
        # Per column: whether its last step has ended an episode, but not the trajectory.
        self._goes_on = [False] * len(self._running)

    def drop(self, column: int) -> None:
        if not self._goes_on[column]:
            self._running[column] = self._cls(**self._kwargs)

    def cut(self, column: int, first: int, t: int) -> None:
        self._goes_on[column] = False
        self.drop(column)

    def column_state(self, column: int) -> Any:
        return vars(self._running[column])

    def load_column_state(self, column: int, state: dict[str, Any]) -> None:
        self._running[column] = self._cls.restore(state)

    def set_agent_info(self, agent_info: ArrayTree) -> None:
        # A copy, because the next batch overwrites the row, and a TrajInfo may keep its part.
        self._agent_info = map_leaves(np.copy, agent_info)

    def _step(
        self,
        b: int,
        observation: object,
        action: object,
        reward: float,
        terminated: bool,
        truncated: bool,
        info: dict[str, Any],
    ) -> None:
        running = self._running[b]
        running.step(observation, action, reward, terminated, truncated, self._agent_info[b], info)
        self._goes_on[b] = (terminated or truncated) and not running.traj_done(terminated, truncated, info)

    def on_episode_end(self, t: int, column: int, final_observation: object) -> bool:
        if self._goes_on[column]:
            return False
        info = self._running[column]
        info.terminate(snapshot(final_observation))
        self._finished.append(ObjectMessage(MessageKind.TRAJ_INFO, t, self._env_ranks[column], vars(info)))
        self._running[column] = self._cls(**self._kwargs)
        return True

    def end_rows(
        self, reward: Rows, done: Rows, first_t: int = 0, valid: Rows | None = None, times: Rows | None = None
    ) -> int:
        finished, self._finished = self._finished, []
        if finished:
            self._put(finished)
        return len(finished)


def put_as_objects(
    cls: type[TrajInfo],
    kwargs: Mapping[str, Any],
    put: Callable[[Sequence[ObjectMessage]], None],
    records: npt.NDArray[Any],
) -> None:
    """Send records as instances of a subclass of `TrajInfo`. Its own attributes keep their first values."""
    messages = []
    for t, env_rank, *figures in records.tolist():
        attributes = {**vars(cls(**kwargs)), **dict(zip(FIGURES, figures, strict=True))}
        messages.append(ObjectMessage(MessageKind.TRAJ_INFO, t, env_rank, attributes))
    put(messages)
