"""Games in which agents take turns: each seat counts its own decisions.

Row t of a column is the seat's t-th decision. The reward in it is everything that the agent gets until it decides again
or ends. An environment stops when one of its seats is asked for decision `batch_T` + 1. The batch is complete when all
environments have stopped. A decision that is still *open* then, because its reward is not complete, is row 0 of the
next batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import numpy as np

from penstock.agents.action_masks import ActionMask
from penstock.agents.agent import AgentStep, as_agent_step
from penstock.agents.outputs import NO_AGENT_INFO, AgentInfoWriter, write_action
from penstock.buffers.named import NamedArrays, map_leaves
from penstock.buffers.native import put_cell, put_row
from penstock.collectors.recorder import Recorder
from penstock.collectors.recorder_group import RecorderGroup
from penstock.collectors.tracking import BatchTracker
from penstock.columns.interface import NO_LEGAL_ACTION, NOT_FLAGS, mask_error
from penstock.columns.turn_columns import TurnColumns, TurnSeats
from penstock.envs.rows import ColumnError, arrays_like
from penstock.errors import SpaceError, brief
from penstock.workers.control import Phase

_MOST = float(np.finfo(np.float32).max)


class _Part:
    """What the agent gets and returns for m columns. For a single one, `at` is a slice, and the memory is the column's
    own: numpy takes longer for arrays of one index."""

    def __init__(self, recorder: TurnRecorder, m: int, at: Any) -> None:
        samples, is_one = recorder.samples, m == 1
        observations, actions, infos = (
            map_leaves(lambda leaf: np.zeros((1, m, *leaf.shape[2:]), leaf.dtype), field)
            for field in (samples.observation, samples.action, samples.agent_info)
        )
        if is_one:
            self.prev_action, self.prev_reward = recorder.prev_action[at], recorder.prev_reward[at]
            actions = self.prev_action[np.newaxis]
        self.chosen = np.arange(len(recorder.columns))[at]
        self.observation, self.write_info = observations[0], AgentInfoWriter(infos).write
        self.arrays, self.actions = arrays_like(recorder.columns.observation_space, observations), actions
        # What is copied into the batch, and what from. The row of one decision is copied to one cell.
        targets = _leaves(samples.action[1:], samples.agent_info)
        sources = [leaf[(0, 0, ...) if is_one else 0] for leaf in _leaves(actions, infos)]
        self.copies = list(zip(targets, sources, strict=True))


def _leaves(*fields: Any) -> list[Any]:
    return [leaf for field in fields for _, leaf in NamedArrays(field=field).leaves()]


class TurnRecorder(Recorder):
    """Acts for the seats of one policy that are asked, and records each decision in the next row of its column."""

    columns: TurnSeats

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # By slot, then by the number of columns; for a single column, by ~column.
        self._parts_of: dict[int, dict[int, _Part]] = {}
        super().__init__(*args, **kwargs)
        self.columns.most_rows, n = self.batch_T, len(self.columns)
        # The newest decisions of this batch: their round, rows and columns.
        self._decisions: tuple[int, Any, Any] = (-1, [], [])
        self._failed: list[int] = []  # those of these columns whose game has failed in this round
        self._ends_at = np.zeros((self.batch_T, n), np.int64)  # the round in which a row's episode ends
        self._random: dict[int, list[float]] = {}  # the rewards before a random step that is open
        # What is recorded beside the observation and the action of the decisions that are open.
        self._open = self._beside().map(lambda leaf: np.zeros_like(leaf[0]))

    def use_slot(self, slot: int) -> None:
        super().use_slot(slot)
        self._parts = self._parts_of.setdefault(slot, {})
        # An item of a memoryview is written faster than one of an array.
        self._rewards: Any = memoryview(self.samples.reward)
        self._prev_reward: Any = memoryview(self.prev_reward)
        self._extra_row = self.samples.extra.map(lambda leaf: np.zeros_like(leaf[:1]))
        self._extra = self._extra_row.to_dict()

    def _beside(self) -> NamedArrays:
        return NamedArrays(agent_info=self.samples.agent_info, extra=self.samples.extra)

    # ---- a batch ---------------------------------------------------------------------------

    def begin_batch(self, itr: int) -> None:
        samples, seats, self._decisions = self.samples, self.columns, (-1, [], [])
        samples.zero_rows()  # what is no decision stays so
        if samples.env_info is not None:
            samples.env_info[...] = 0
        samples.begin_batch(self._first_row)
        at = np.flatnonzero(self._is_open())
        samples.action[1, at] = self.prev_action[at]
        self._beside()[0, at] = self._open[at]
        self._write_seen([*seats.asked, *at.tolist()])
        self._enter_mode(itr)

    def _is_open(self) -> Any:
        """Of each column, whether its next row has a decision that is open."""
        return np.array(self.columns.is_open) & np.greater_equal(self.columns.rows, 0)

    def _write_seen(self, columns: Sequence[int]) -> None:
        """Write what these columns see, or have seen when they decided, in their next rows."""
        seats, unchecked = self.columns, self._unchecked
        rows, observations = seats.rows, seats.observations
        for column in columns:
            if unchecked is None or not put_cell(unchecked, rows[column], column, observations[column]):
                seats._write_one(self._observations, rows[column], column, observations[column], "observation")

    def act(self, t: int) -> None:  # noqa: C901 - it is called for each round
        """Act for the seats that are asked."""
        seats, samples, asked = self.columns, self.samples, self.columns.asked
        if self._who:
            self.progress.at_env(self._who)
        at: Any
        row: Any
        if len(asked) == 1:
            (at,) = asked
            part, row = self._parts.get(~at) or self._part(~at, 1, slice(at, at + 1)), seats.rows[at]
            chosen, prev_action, prev_reward = part.chosen, part.prev_action, part.prev_reward
            observations = [seats.observations[at]]
        else:
            chosen = at = np.array(asked)
            part = self._parts.get(len(asked)) or self._part(len(asked), len(asked), at)
            prev_action, prev_reward = self.prev_action[at], self.prev_reward[at]
            row = np.array([seats.rows[column] for column in asked])
            observations = [seats.observations[column] for column in asked]
        if self._unchecked is None or not put_row(part.arrays, 0, observations):
            part.observation[...] = samples.observation[row, at]
        if self._mask is not None:
            self._check_masks(self._mask, part.observation)
        self.agent.select(chosen)
        step = self.agent.step(part.observation, prev_action, prev_reward)
        if step.__class__ is not AgentStep:
            step = as_agent_step(step, self.agent)
        action, agent_info = step
        try:
            if not put_row(part.actions, 0, action):
                write_action(part.actions[0], action)
            if self._has_agent_info or agent_info is not NO_AGENT_INFO:
                part.write_info(0, agent_info)
        except ColumnError as error:
            raise seats.with_env_rank(asked[error.column], error) from None
        for target, source in part.copies:
            target[row, at] = source
        if len(asked) > 1:
            self.prev_action[at] = part.actions[0]
        self._decisions, self._failed = (t, row, at), []
        if self._on_step is not None:
            self._open.agent_info[at] = samples.agent_info[row, at]
            self.tracker.set_agent_info(self._open.agent_info)

    def _part(self, key: int, m: int, at: Any) -> _Part:
        self._parts[key] = part = _Part(self, m, at)
        return part

    def _check_masks(self, mask: ActionMask, observation: Any) -> None:
        """Raise `SpaceError` if a seat that is asked has no legal action; before the first decision, also if a mask has
        other numbers than 0 and 1."""
        if self._is_first:
            self._is_first = False
            if (others := mask.has_others(observation)).any():
                raise mask_error(self.columns, self.columns.asked[int(others.argmax())], NOT_FLAGS)
        if (none := mask.has_none(observation)).any():
            raise mask_error(self.columns, self.columns.asked[int(none.argmax())], NO_LEGAL_ACTION)

    def record_env_info(self, t: int) -> None:
        seats = self.columns
        for column in seats.closed if self._env_info is not None else ():
            if row := seats.rows[column]:
                try:
                    self._env_info.write_one(row - 1, column, seats.infos[column])  # type: ignore[union-attr]
                except ColumnError as error:
                    raise seats.with_env_rank(column, error) from None

    def record_extra(self, t: int, fields: Mapping[str, Any], owner: str) -> None:
        """Write `fields`, each as `[B, ...]`, into the rows of the decisions of round t."""
        super().record_extra(0, fields, owner)
        last, row, at = self._decisions
        for name in fields if last == t else ():
            self._extra_row[name][0, self._failed] = 0  # their games have failed in this round
            self.samples.extra[name][row, at] = self._extra_row[name][0, at]

    def _record_ends(self, t: int, ends: Sequence[Any], going: list[int]) -> None:
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
        """The open decision is lost. The next decision is written into its row."""
        samples, row = self.samples, max(self.columns.rows[column], 0)
        self._failed.append(column)
        self.tracker.cut(column, self._ends.cut(row, column), row - 1)
        self._ends.done[row, column], samples.valid[row, column] = False, True
        samples.observation[row, column], samples.action[row + 1, column], self._beside()[row, column] = 0, 0, 0
        if row == 0:
            samples.episode_start[column] = True

    def write_step(self, t: int) -> None:
        """Last part of round t: write the rewards of the decisions that are closed, and the observations of the seats
        that are asked next."""
        seats, cells, prev_reward = self.columns, self._rewards, self._prev_reward
        rows, rewards = seats.rows, seats.rewards
        for column in seats.closed:
            row, reward = rows[column], rewards[column]
            if reward and _MOST < abs(reward) != inf:
                what = f"a number that float32 can hold, got {brief(reward)}"
                raise SpaceError(f"the reward of env_rank {seats.env_ranks[column]} must be {what}")
            cells[row, column] = prev_reward[column] = reward
            if row == 0 and column not in (self._changed or ()):  # a random step: the next row continues its episode
                self.samples.action[0, column] = self.prev_action[column]
                self.tracker.preload(column, [*self._random[column], reward])
        if self._changed is not None:
            for column in self._changed:
                prev_reward[column] = 0.0
            self._changed = None
        self._write_seen(seats.asked)

    def end_batch(self, n_rows: int) -> int:
        """The batch is complete. Keep what is open, compute the missing values, and send the finished trajectories."""
        samples, seats, first = self.samples, self.columns, self._first_row
        columns, n, is_open = np.arange(len(seats)), np.maximum(seats.rows, 0), self._is_open()
        samples.valid[...] = np.arange(self.batch_T)[:, None] < n
        samples.mark_starts()
        # The first row without a decision keeps only its observation: what the seat sees after its last decision.
        self._write_seen(seats.asked)
        is_next = is_open.copy()
        is_next[seats.asked] = True
        samples.observation[-1, is_next] = samples.observation[n[is_next], columns[is_next]]
        open_rows = n[is_open], columns[is_open]
        self._open[is_open] = self._beside()[open_rows]
        self._beside()[open_rows] = 0
        samples.action[n[is_open] + 1, is_open] = 0
        if "has_rnn_state" in samples.agent_info:  # recorded at each decision, since any may be the first of a batch
            samples.agent_info.has_rnn_state[1:], samples.agent_info.prev_rnn_state[1:] = False, 0
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
        value = np.array(self.agent.value(samples.observation_rows[-1], action, reward), np.float32)
        if "value" in samples.agent_info:  # as it was when the agent decided: a state has gone on since
            value[is_open] = self._open.agent_info.value[is_open]
        values[...] = np.where(is_next, value, 0)

    # ---- before the first row --------------------------------------------------------------

    def start_afresh(self) -> None:
        super().start_afresh()
        self.freeze_first_row()

    def draw(self, rng: np.random.Generator, columns: Sequence[int]) -> None:
        """A random action for the seat that is asked."""
        asked = [column for column in columns if column in self.columns.asked]
        super().draw(rng, asked)
        for column in asked:
            self.columns.rows[column] = -1

    def note_random(self, acted: Sequence[int], rewards: Mapping[int, list[float]]) -> Sequence[int]:
        seats, first = self.columns, self._first_row
        for column in seats.closed:
            rewards[column].append(seats.rewards[column])
            first.action[column], first.reward[column] = self.prev_action[column], seats.rewards[column]
        return seats.closed

    def end_random_steps(self, column: int, rewards: Sequence[float]) -> None:
        super().end_random_steps(column, rewards)
        if self.columns.is_open[column]:
            self._random[column], self._first_row.episode_start[column] = list(rewards), False


class TurnGroup(RecorderGroup):
    """The recorders of games in turns. A batch has as many rounds as it takes, and a round is no row."""

    _columns: TurnColumns
    _recorders: Sequence[TurnRecorder]
    _game_tracker: BatchTracker

    def begin_batch(self, itr: int) -> None:
        self._columns.begin_rows(goes_on=self._recorders[0].first_t > 0)
        super().begin_batch(itr)

    def act(self, t: int) -> None:
        self._progress.begin_acting(self._recorders[0].first_t + t)
        for recorder in self._recorders:
            if recorder.columns.asked:
                recorder.act(t)

    @property
    def n_steps(self) -> int:
        return sum(self._columns.plies)

    def end_batch(self, n_rows: int) -> int:
        columns, n, first_t = self._columns, self._columns.n_rounds, self._recorders[0].first_t
        columns.ask_all()
        self._count_late(columns.late)  # of the games that have begun in the last round
        columns.late = []
        n_sent = sum([recorder.end_batch(n_rows) for recorder in self._recorders])
        rewards, over = self._table(n, columns.sums, np.float32), self._table(n, self._over, np.bool_)
        is_empty = self._table(n, [(t, e) for t, e, _ in columns.empty_games], np.bool_)
        valid = (np.arange(n)[:, None] < columns.plies + is_empty.sum(0)) & ~is_empty
        n_sent += self._game_tracker.end_rows(rewards, over, first_t, valid)
        empty_games = [(first_t + t - 1, e, reward) for t, e, reward in columns.empty_games]
        return n_sent + self._game_tracker.send_empty_games(empty_games)
