"""Games in which agents take turns: each seat counts its own decisions.

Row t of a column is the seat's t-th decision. The reward in it is everything that the agent gets until it decides again
or ends. An environment stops when one of its seats is asked for decision `batch_T` + 1. The batch is complete when all
environments have stopped. A decision that is still *open* then, because its reward is not complete, is row 0 of the
next batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.agents.action_masks import ActionMask
from penstock.agents.agent import AgentStep, as_agent_step
from penstock.buffers.named import NamedArrays, map_leaves
from penstock.buffers.native import put_cell, put_row
from penstock.collectors.acting import NO_AGENT_INFO, AgentInfoWriter, write_action
from penstock.collectors.collector import Collector
from penstock.collectors.recorder import Recorder
from penstock.collectors.tracking import BatchTracker
from penstock.columns.interface import Events, no_legal_action, not_flags
from penstock.columns.turn_columns import TurnColumns, TurnSeats
from penstock.envs.rows import ColumnError, arrays_like
from penstock.errors import SpaceError, brief
from penstock.workers.control import Phase

_MOST = float(np.finfo(np.float32).max)


class _Part:
    """Memory for what the agent gets and returns for m seats."""

    def __init__(self, recorder: TurnRecorder, m: int) -> None:
        samples = recorder.samples
        observations, self.actions, infos = (
            map_leaves(lambda leaf: np.zeros((1, m, *leaf.shape[2:]), leaf.dtype), field)
            for field in (samples.observation, samples.action, samples.agent_info)
        )
        self.observation, self.write_info = observations[0], AgentInfoWriter(infos).write
        self.arrays = arrays_like(recorder.columns.observation_space, observations)
        self.leaves = [leaf[0] for leaf in _leaves(self.actions, infos)]


def _leaves(*fields: Any) -> list[Any]:
    return [leaf for field in fields for _, leaf in NamedArrays(field=field).leaves()]


class TurnRecorder(Recorder):
    """Acts for the seats of one policy that are asked, and records each decision in the next row of its column."""

    columns: TurnSeats

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.columns.most_rows = self.batch_T
        self._parts, self._prev_leaves = dict[int, _Part](), _leaves(self.prev_action)
        self._acted: tuple[Any, Any] | None = None  # the rows and the columns of this round's decisions
        self._ends_at = np.zeros((self.batch_T, len(self.columns)), np.int64)  # the round in which a row's episode ends
        self._random: dict[int, list[float]] = {}  # the rewards before a random step that is open
        # What is recorded beside the observation and the action of the decisions that are open.
        self._open = self._beside().map(lambda leaf: np.zeros_like(leaf[0]))

    def use_slot(self, slot: int) -> None:
        super().use_slot(slot)
        self._targets = _leaves(self.samples.action[1:], self.samples.agent_info)
        # An item of a memoryview is written faster than one of an array.
        self._rewards: Any = memoryview(self.samples.reward)
        self._prev_reward: Any = memoryview(self.prev_reward)
        self._extra_row = self.samples.extra.map(lambda leaf: np.zeros_like(leaf[:1]))
        self._extra = self._extra_row.to_dict()

    def _beside(self) -> NamedArrays:
        return NamedArrays(agent_info=self.samples.agent_info, extra=self.samples.extra)

    # ---- a batch ---------------------------------------------------------------------------

    def begin_batch(self, itr: int) -> None:
        samples, seats = self.samples, self.columns
        samples.zero_rows()  # what is no decision stays so
        if samples.env_info is not None:
            samples.env_info[...] = 0
        samples.begin_batch(self._first_row)
        at = np.flatnonzero(self._is_open())
        samples.action[1, at] = self.prev_action[at]
        self._beside()[0, at] = self._open[at]
        self._write_asked(seats.asked)
        self._enter_mode(itr)

    def _is_open(self) -> Any:
        """Of each column, whether its next row has a decision that is open."""
        return np.array(self.columns.is_open) & np.greater_equal(self.columns.rows, 0)

    def _write_asked(self, columns: Sequence[int]) -> None:
        """The agents of these columns are asked. Write what they see."""
        seats = self.columns
        for column in columns:
            row, observation = seats.rows[column], seats.observations[column]
            if self._unchecked is None or not put_cell(self._unchecked, row, column, observation):
                seats._write_one(self._observations, row, column, observation, "observation")

    def act(self, t: int) -> None:
        """Act for the seats that are asked."""
        self.progress.begin_acting(self.first_t + t)
        self._acted, seats, samples, asked = None, self.columns, self.samples, self.columns.asked
        if not asked:
            return
        if self._who:
            self.progress.at_env(self._who)
        chosen: Any = np.array(asked)
        row: Any = [seats.rows[column] for column in asked]
        at = chosen
        if len(asked) == 1:  # numpy takes longer for arrays of one index
            (row,), at = row, slice(asked[0], asked[0] + 1)
        part = self._parts.get(len(asked)) or self._parts.setdefault(len(asked), _Part(self, len(asked)))
        if self._unchecked is None or not put_row(part.arrays, 0, [seats.observations[column] for column in asked]):
            part.observation[...] = samples.observation[row, at]
        self.agent.select(chosen)
        try:
            self._step_agent(part, self.prev_action[at], self.prev_reward[at])
        except ColumnError as error:
            raise seats.with_env_rank(asked[error.column], error) from None
        for target, source in zip(self._targets, part.leaves, strict=True):
            target[row, at] = source
        for target, source in zip(self._prev_leaves, part.leaves, strict=False):
            target[at] = source
        self._acted = row, at
        if self._on_step is not None:
            self._open.agent_info[at] = samples.agent_info[row, at]
            self.tracker.set_agent_info(self._open.agent_info)

    def _step_agent(self, part: _Part, prev_action: Any, prev_reward: Any) -> None:
        """What the agent returns for these columns is in `part` then."""
        if self._mask is not None:
            self._check_masks(self._mask, part.observation)
        step = self.agent.step(part.observation, prev_action, prev_reward)
        if step.__class__ is not AgentStep:
            step = as_agent_step(step, self.agent)
        action, agent_info = step
        if not put_row(part.actions, 0, action):
            write_action(part.actions[0], action)
        if self._has_agent_info or agent_info is not NO_AGENT_INFO:
            part.write_info(0, agent_info)

    def _check_masks(self, mask: ActionMask, observation: Any) -> None:
        """Raise `SpaceError` if a seat that is asked has no legal action; before the first decision, also if a mask has
        other numbers than 0 and 1."""
        if self._is_first:
            self._is_first = False
            if (others := mask.has_others(observation)).any():
                raise not_flags(self.columns, self.columns.asked[int(others.argmax())])
        if (none := mask.has_none(observation)).any():
            raise no_legal_action(self.columns, self.columns.asked[int(none.argmax())])

    def record_env_info(self, t: int) -> None:
        seats = self.columns
        for column in seats.closed if self._env_info is not None else ():
            if row := seats.rows[column]:
                try:
                    self._env_info.write_one(row - 1, column, seats.infos[column])  # type: ignore[union-attr]
                except ColumnError as error:
                    raise seats.with_env_rank(column, error) from None

    def record_extra(self, t: int, fields: Mapping[str, Any], owner: str) -> None:
        """Of `fields`, each as `[B, ...]`, the decisions of round t get their parts."""
        super().record_extra(0, fields, owner)
        if self._acted is not None:
            row, at = self._acted
            for name in fields:
                self.samples.extra[name][row, at] = self._extra_row[name][0, at]

    def _record_each(self, t: int, ends: Sequence[Any], going: list[int]) -> None:
        for column, observation, reward, terminated, truncated in ends:
            row = self.columns.rows[column] - 1
            self._at(column)
            if row < 0:  # a random step
                self.samples.action[0, column], self.samples.episode_start[column] = self.prev_action[column], True
                self.columns.check_final(column, observation)
                self.tracker.drop(column)
            else:
                if self.agent.recurrent:
                    self.agent.select(None)  # the value of a truncation is computed with the state of all columns
                self._ends_at[row, column] = t
                self._ends.record(row, column, observation, reward, terminated, truncated)
                if self._on_step is not None and not self.tracker.on_episode_end(self.first_t + t, column, observation):
                    going.append(column)
            self.prev_action[column] = 0

    def _record_cut(self, t: int, column: int) -> None:
        """The open decision is lost, and its row is that of the next one."""
        samples, row = self.samples, max(self.columns.rows[column], 0)
        self.tracker.cut(column, self._ends.cut(row, column), row - 1)
        self._ends.done[row, column], samples.valid[row, column] = False, True
        samples.observation[row, column], samples.action[row + 1, column], self._beside()[row, column] = 0, 0, 0
        if row == 0:
            samples.episode_start[column] = True

    def write_step(self, t: int) -> None:
        """Last part of round t: write the rewards of the decisions that are closed, and what those see who are
        asked."""
        seats, cells, prev_reward = self.columns, self._rewards, self._prev_reward
        for column in seats.closed:
            row, reward = seats.rows[column], seats.rewards[column]
            if not -_MOST <= reward <= _MOST:
                self._require_float32(column, reward)
            cells[row, column] = prev_reward[column] = reward
            if row == 0 and column not in (self._changed or ()):  # a random step: the next row continues its episode
                self.samples.action[0, column] = self.prev_action[column]
                self.tracker.preload(column, [*self._random[column], reward])
        for column in self._changed or ():
            prev_reward[column] = 0.0
        self._changed = None
        self._write_asked(seats.asked)

    def _require_float32(self, column: int, reward: float) -> None:
        try:
            with np.errstate(over="raise"):
                np.array([0.0], np.float32)[0] = reward
        except (FloatingPointError, OverflowError):
            rank = self.columns.env_ranks[column]
            raise SpaceError(
                f"the reward of env_rank {rank} must be a number that float32 can hold, got {brief(reward)}"
            ) from None

    def end_batch(self, n_rows: int, n_valid: int | None = None) -> int:
        """The batch is complete. Keep what is open, compute the missing values, and send the finished trajectories."""
        samples, seats, first = self.samples, self.columns, self._first_row
        columns, n, is_open = np.arange(len(seats)), np.maximum(seats.rows, 0), self._is_open()
        samples.valid[...] = np.arange(self.batch_T)[:, None] < n
        samples.mark_starts()
        # Of the first row that is no decision, only the observation is kept. It is also that after the last row.
        self._write_asked(seats.held)
        is_next = is_open.copy()
        is_next[seats.asked + seats.held] = True
        samples.observation[-1, is_next] = samples.observation[n[is_next], columns[is_next]]
        open_rows = n[is_open], columns[is_open]
        self._open[is_open] = self._beside()[open_rows]
        self._beside()[open_rows] = 0
        samples.action[n[is_open] + 1, is_open] = 0
        # What the next batch begins with.
        starts = np.where(n > 0, samples.done[n - 1, columns], samples.episode_start)
        samples.end_batch(first)
        first.action[...], first.reward[...] = samples.action[n, columns], samples.reward[n, columns]
        first.episode_start[...] = starts
        if self._who:
            self.progress.at_env(self._who)
        self.progress.enter(Phase.ACTING)
        self.agent.select(None)
        self._write_turn_values(is_open, is_next)
        if self._ends.pending:
            self._ends.write_values()
        self.progress.enter(Phase.SENDING)
        return self.tracker.end_rows(samples.reward[1:], samples.done, self.first_t, samples.valid, self._ends_at)

    def _write_turn_values(self, is_open: Any, is_next: Any) -> None:
        """The value after the last row: of the observation that is asked, or of the open decision."""
        samples, values = self.samples, self.samples.bootstrap_value
        if values is None:
            return
        first, is_start = self._first_row, self._first_row.episode_start
        action, reward = map_leaves(np.copy, first.action), np.where(is_start, np.float32(0), first.reward)
        action[is_start] = 0
        found = np.array(self.agent.value(samples.observation_rows[-1], action, reward), np.float32)
        if "value" in samples.agent_info:  # as it was when the agent decided: a state has gone on since
            found[is_open] = self._open.agent_info.value[is_open]
        values[...] = np.where(is_next, found, 0)

    # ---- before the first row --------------------------------------------------------------

    def start_afresh(self) -> None:
        super().start_afresh()
        self._first_row.observation[...] = 0
        self.separate_first_row()

    def rejoin(self, joined: Sequence[int]) -> None:
        super().rejoin(joined)
        self._first_row.observation[joined], self._first_row.episode_start[joined] = 0, True

    def draw(self, rng: np.random.Generator, columns: Sequence[int]) -> None:
        """A random action for the seat that is asked."""
        asked = [column for column in columns if column in self.columns.asked]
        super().draw(rng, asked)
        for column in asked:
            self.columns.rows[column] = -1

    def close_random(self, rewards: Mapping[int, list[float]]) -> None:
        """Random steps are closed: add their `rewards` by column."""
        first, seats = self._first_row, self.columns
        for column in seats.closed:
            rewards[column].append(seats.rewards[column])
            first.action[column], first.reward[column] = self.prev_action[column], seats.rewards[column]

    def end_random_steps(self, column: int, rewards: Sequence[float]) -> None:
        super().end_random_steps(column, rewards)
        if self.columns.is_open[column]:
            self._random[column], self._first_row.episode_start[column] = list(rewards), False


class TurnLoop(Collector):
    """What differs for a collector, since a batch has as many rounds as it takes, and a round is no row."""

    columns: TurnColumns
    recorders: Sequence[TurnRecorder]  # type: ignore[assignment]
    games: BatchTracker
    recorder_cls = TurnRecorder

    def begin_batch(self, itr: int) -> None:
        self.columns.begin_rows(goes_on=self.recorders[0].first_t > 0)
        # The rounds and the environments in which games have ended, or have failed.
        self._ends, self._cuts = list[tuple[int, int]](), list[tuple[int, int]]()
        super().begin_batch(itr)

    def _record_games(self, t: int, events: Events, games: Any) -> None:
        self._count_late(events.late)
        self._ends += [(t, e) for e in events.over if e not in events.cut]
        self._cuts += [(t, e) for e in events.cut]
        for e in events.cut:
            games.cut(e, max((end + 1 for end, own in self._ends if own == e), default=0), t)
            for recorder, columns in zip(self.recorders, self.columns.columns_of(e), strict=True):
                for column in columns:  # also of who had ended: a trajectory may go on (`TrajInfo.traj_done`)
                    recorder.tracker.cut(column, 1, 0)

    def _count_late(self, late: Sequence[tuple[int, float]]) -> None:
        if late and self._is_timed:
            self.progress.add_late_rewards(len(late))

    def end_batch(self) -> None:
        late, self.columns.late = self.columns.late, []
        self._count_late(late)  # those of the games that have begun in the last round
        self._n_parked = self.batch_T * len(self.columns.envs) - sum(self.columns.plies)
        super().end_batch()

    def end_rows(self, n_rows: int, n_valid: int | None = None) -> int:
        columns, first_t = self.columns, self.recorders[0].first_t
        n_sent = sum(recorder.end_batch(n_rows) for recorder in self.recorders)
        shape = columns.n_rounds, len(columns.envs)
        rewards, over = np.zeros(shape, np.float32), np.zeros(shape, np.bool_)
        for t, e, reward in columns.sums:
            rewards[t, e] = reward
        for t, e in self._ends:
            over[t, e] = True
        n, gaps = np.array(columns.plies), [*self._cuts, *((t, e) for t, e, _ in columns.unasked)]
        for _, e in gaps:
            n[e] += 1
        valid = np.arange(columns.n_rounds)[:, None] < n
        for t, e in gaps:
            valid[t, e] = False
        n_sent += self.games.end_rows(rewards, over, first_t, valid)
        return n_sent + self.games.end_unasked([(first_t + t - 1, e, reward) for t, e, reward in columns.unasked])

    def _make_random_step(
        self,
        e: int,
        own: Sequence[Sequence[int]],
        rng: np.random.Generator,
        rewards: Sequence[dict[int, list[float]]],
        totals: list[float],
    ) -> None:
        self.progress.begin_random_step(self.columns.env_ranks[e])
        for recorder, columns in zip(self.recorders, own, strict=True):
            recorder.draw(rng, columns)
        events = self.columns.step(self._actions, None, e)
        totals.append(sum(reward for *_, reward in self.columns.sums))
        self.columns.sums = []
        for recorder, kept in zip(self.recorders, rewards, strict=True):
            recorder.close_random(kept)
        if events is not None:
            self._settle_random_step(events, rewards, totals)


def in_turns(cls: Any) -> Any:
    """This class of collectors, for games in turns: its own methods come first, then those of `TurnLoop`."""
    return type(cls.__name__, (cls, TurnLoop), {"__module__": cls.__module__, "__doc__": cls.__doc__})
