"""Games in which agents take turns: each seat counts its own decisions.

Row t of a column is the seat's t-th decision. The reward in it is everything that the agent gets until it decides again
or ends. An environment stops when one of its seats is asked for decision `batch_T` + 1. The batch is complete when all
environments have stopped. A decision that is still *open* then, because its reward is not complete, is row 0 of the
next batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.agents.action_masks import ActionMask
from penstock.agents.agent import Agent, AgentStep, as_agent_step
from penstock.agents.outputs import NO_AGENT_INFO, AgentInfoWriter, write_action
from penstock.buffers.named import NamedArrays, map_leaves
from penstock.buffers.native import put_cell, put_row
from penstock.buffers.samples import BatchColumns
from penstock.buffers.tree import snapshot
from penstock.collectors.collector import Collector, CollectorParts, ResetCollector
from penstock.collectors.evaluation import EvalCollector
from penstock.collectors.recorder import Recorder, Slot
from penstock.collectors.tracking import BatchTracker
from penstock.columns.interface import Events, Start, no_legal_action, not_flags
from penstock.columns.turn_columns import CLOSED, OPEN, RANDOM, TurnColumns, TurnSeats
from penstock.envs.checks import check_row
from penstock.envs.rows import ColumnError, arrays_like, write_row
from penstock.envs.seeding import ColumnStreams
from penstock.errors import SpaceError, brief
from penstock.workers.control import Phase


class _Part:
    """Memory for one row of m decisions: what the agent gets, and what it returns."""

    def __init__(self, recorder: TurnRecorder, m: int) -> None:
        samples, space = recorder.samples, recorder.columns.observation_space

        def row(field: Any) -> Any:
            return map_leaves(lambda leaf: np.zeros((1, m, *leaf.shape[2:]), leaf.dtype), field)

        observation, action, agent_info = row(samples.observation), row(samples.action), row(samples.agent_info)
        self.arrays = arrays_like(space, observation)
        self.unchecked = None if recorder.columns.checks else self.arrays
        self.observation, self.action, self.actions = observation[0], action[0], action
        self.prev_reward = np.zeros(m, np.float32)
        self.write_info = AgentInfoWriter(agent_info).write
        # What is copied into the batch. The row of a single decision is copied to one cell.
        at = (0, 0, ...) if m == 1 else 0
        self.recorded, self.infos, self.given = (
            [leaf[at] for leaf in _leaves(field)] for field in (observation, agent_info, action)
        )


def _leaves(field: Any) -> list[Any]:
    return [leaf for _, leaf in NamedArrays(field=field).leaves()]


class _TurnSlot(Slot):
    """What a recorder needs to write one slot, cell by cell."""

    def __init__(self, samples: BatchColumns, columns: TurnSeats, agent: Agent) -> None:
        super().__init__(samples, columns, agent)
        fields = samples.observation, samples.agent_info, samples.action
        self.targets, self.actions = tuple(map(_leaves, fields)), arrays_like(columns.action_space, samples.action)


class TurnRecorder(Recorder):
    """Acts for the seats of one policy that are asked, and records their decisions."""

    columns: TurnSeats
    _targets: tuple[list[Any], list[Any], list[Any]]
    _actions: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        seats, samples = self.columns, self.samples
        seats.on_close, seats.on_reward = self._close, self._write_reward
        seats.closes_with_hook = self._on_step is not None or self._env_info is not None
        seats.most_rows = self.batch_T
        self.ply_of: Callable[[int], int] = lambda column: 0  # of its environment
        self._parts: dict[int, _Part] = {}
        n = len(seats)
        # Of each column: its index as an array, and its previous action as a batch of one.
        self._alone = [(np.array([b]), self.prev_action[b : b + 1]) for b in range(n)]
        self._prev_actions = arrays_like(seats.action_space, self._prev_actions)
        self._ends_at = np.zeros((self.batch_T, len(seats)), np.int64)  # where a row ends an episode: after which ply
        self._random: list[list[float]] = [[] for _ in seats.env_ranks]  # the rewards of random steps
        self._is_in_batch = False
        self._acted_on: dict[int, Any] = {}  # for a hook: the observation and the action of open decisions
        # The decisions that are open between two batches, and the agent_info of all that are.
        self._open_observation = map_leaves(lambda leaf: np.zeros_like(leaf[0]), samples.observation)
        self._open_action = map_leaves(np.zeros_like, self.prev_action)
        self._open_info = map_leaves(lambda leaf: np.zeros_like(leaf[0]), samples.agent_info)

    def _make_slot(self, samples: BatchColumns) -> _TurnSlot:
        return _TurnSlot(samples, self.columns, self.agent)

    def use_slot(self, slot: int) -> None:
        super().use_slot(slot)
        own: Any = self._slots[slot]
        self._targets, self._actions = own.targets, own.actions

    # ---- a batch ---------------------------------------------------------------------------

    def begin_batch(self, itr: int) -> None:
        samples, seats = self.samples, self.columns
        samples.zero_rows()  # what is no decision stays so
        if samples.env_info is not None:
            samples.env_info[...] = 0
        samples.begin_batch(self._first_row)
        at = np.flatnonzero(np.equal(seats.stage, OPEN))
        samples.observation[0, at] = self._open_observation[at]
        samples.action[1, at], samples.agent_info[0, at] = self._open_action[at], self._open_info[at]
        seats.n, self._is_in_batch = [0] * len(seats), True
        seats.asked, seats.held = sorted(seats.asked + seats.held), []
        if not self._evaluates:
            self.agent.sample_mode(itr)
        elif self.first_t == 0:  # once in an evaluation
            self.agent.eval_mode(itr)

    def act(self, t: int) -> None:
        """Act for the seats that are asked. Their environments find the actions in `columns.actions`."""
        seats, asked = self.columns, self.columns.asked
        if not asked:
            return
        m = len(asked)
        part = self._parts.get(m) or self._parts.setdefault(m, _Part(self, m))
        at: Any
        row: Any
        if m == 1:  # numpy takes longer for arrays of one index
            (at,) = asked
            (columns, prev_action), row, part.prev_reward[0] = self._alone[at], seats.n[at], seats.rewards[at]
        else:
            columns = at = np.array(asked)
            prev_action, row = self.prev_action[at], np.array([seats.n[column] for column in asked])
            part.prev_reward[:] = [seats.rewards[column] for column in asked]
        observations = [seats.observations[column] for column in asked]
        try:
            if not put_row(part.unchecked, 0, observations):
                self._write_observations(part, observations)
            self._step_agent(part, columns, prev_action)
        except ColumnError as error:
            raise seats.with_env_rank(asked[error.column], error) from None
        self._record_decisions(part, observations, row, at)
        seats.asked = []

    def _record_decisions(self, part: _Part, observations: Sequence[Any], row: Any, at: Any) -> None:
        """Write the decisions into the batch, each into the next row of its column: `row` and `at` are these cells."""
        seats, kept = self.columns, self._prev_actions
        has_observations = has_actions = True
        # Cell by cell, in C: that is faster than an index of several cells, as long as there are few.
        for i, (column, own) in enumerate(zip(seats.asked, seats.split_actions(part.action), strict=True)):
            t = seats.n[column]
            has_observations = put_cell(self._observations, t, column, observations[i]) and has_observations
            has_actions = put_cell(self._actions, t + 1, column, own) and has_actions
            has_actions = put_cell(kept, 0, column, own) and has_actions
            seats.actions[column], seats.stage[column] = own, OPEN
        recorded, infos, actions = self._targets
        for target, source in zip(infos, part.infos, strict=True):
            target[row, at] = source
        if not has_observations:
            for target, source in zip(recorded, part.recorded, strict=True):
                target[row, at] = source
        if not has_actions:
            self.prev_action[at] = part.action if len(seats.asked) > 1 else part.action[0]
            for target, source in zip(actions, part.given, strict=True):
                target[row + 1, at] = source
        if self._on_step is not None:
            for column, observation in zip(seats.asked, observations, strict=True):
                self._acted_on[column] = snapshot(observation), snapshot(seats.actions[column])
                self._open_info[column] = self.samples.agent_info[seats.n[column], column]

    def _step_agent(self, part: _Part, columns: Any, prev_action: Any) -> None:
        """What the agent returns for these columns is in `part` then."""
        agent = self.agent
        if self._who:
            self.progress.at_env(self._who)
        if self._mask is not None:
            self._check_masks(self._mask, part.observation)
        agent.select(columns)
        step = agent.step(part.observation, prev_action, part.prev_reward)
        if step.__class__ is not AgentStep:
            step = as_agent_step(step, agent)
        action, agent_info = step
        if not put_row(part.actions, 0, action):
            write_action(part.action, action)
        if self._has_agent_info or agent_info is not NO_AGENT_INFO:
            part.write_info(0, agent_info)

    def _write_observations(self, part: _Part, observations: Sequence[Any]) -> None:
        """Write and check them. Raises `ColumnError`, whose column is an index in `seats.asked`."""
        write_row(part.arrays, 0, observations)
        check_row(self.columns.checks, self.columns.observation_space, part.arrays, 0, observations)

    def _check_masks(self, mask: ActionMask, observation: Any) -> None:
        """Raise `SpaceError` if a seat that is asked has no legal action; before the first decision, also if a mask has
        other numbers than 0 and 1."""
        if self._is_first:
            self._is_first = False
            if (others := mask.has_others(observation)).any():
                raise not_flags(self.columns, self.columns.asked[int(others.argmax())])
        if (none := mask.has_none(observation)).any():
            raise no_legal_action(self.columns, self.columns.asked[int(none.argmax())])

    # ---- what the games report -------------------------------------------------------------

    def _write_reward(self, column: int, reward: float) -> None:
        """The open decision of this column has this reward."""
        if self.columns.stage[column] == OPEN:
            try:
                with np.errstate(over="raise"):
                    self.samples.reward[self.columns.n[column] + 1, column] = reward
            except (FloatingPointError, OverflowError):
                rank = self.columns.env_ranks[column]
                raise SpaceError(
                    f"the reward of env_rank {rank} must be a number that float32 can hold, got {brief(reward)}"
                ) from None

    def _close(
        self, column: int, observation: Any, reward: float, terminated: bool, truncated: bool, info: Mapping[str, Any]
    ) -> None:
        seats, ends = self.columns, terminated or truncated
        if ends and observation is None:
            if truncated and not terminated:
                raise SpaceError(
                    f"env_rank {seats.env_ranks[column]} was truncated, but env.last returned no observation for it"
                )
            observation = seats.zero
        if self._on_step is not None:
            self.tracker.set_agent_info(self._open_info)
            seen, action = self._acted_on.pop(column)
            self._on_step(column, seen, action, reward, terminated, truncated, dict(info))
        if seats.stage[column] == RANDOM:
            self._close_random(column, observation, reward, ends=ends)
        else:
            n = seats.n[column]
            if self._env_info is not None:
                try:
                    self._env_info.write_one(n, column, self._env_info.kept(info))
                except ColumnError as error:
                    raise seats.with_env_rank(column, error) from None
            if ends:
                self._record_end(n, column, observation, reward, terminated, truncated)
            seats.n[column] = n + 1
        if ends:
            for agent in self.stateful:
                agent.reset_one(column)
            self.prev_action[column], seats.rewards[column] = 0, 0.0

    def _record_end(
        self, n: int, column: int, observation: Any, reward: float, terminated: bool, truncated: bool
    ) -> None:
        if self.agent.recurrent:
            self.agent.select(None)  # the value of a truncation is computed with the state of all columns
        ply = self._ends_at[n, column] = self.ply_of(column)
        if self._who:
            self.progress.at_env(self._who | int(self.columns.env_ranks[column]))
        self._ends.record(n, column, observation, reward, terminated, truncated)
        if self._on_step is not None:
            self.tracker.on_episode_end(self.first_t + int(ply), column, observation)

    def _close_random(self, column: int, observation: Any, reward: float, *, ends: bool) -> None:
        """A decision from before the first batch: it is no row, but the next decision continues its episode."""
        if ends:
            self.columns.check_final(column, observation)
            self._random[column] = []
            self.tracker.drop(column)
        else:
            self._random[column].append(reward)
            self.tracker.preload(column, self._random[column])
        first = self._first_row
        first.episode_start[column], first.action[column], first.reward[column] = ends, self.prev_action[column], reward
        if self._is_in_batch:
            self.samples.episode_start[column] = ends
            self.samples.action[0, column], self.samples.reward[0, column] = self.prev_action[column], reward

    # ---- the end of a batch ----------------------------------------------------------------

    def end_batch(self, n_rows: int) -> int:
        """The batch is complete. Keep what is open, compute the missing values, and send the finished trajectories."""
        samples, seats, columns = self.samples, self.columns, np.arange(len(self.columns))
        n = np.array(seats.n)
        is_open = np.equal(seats.stage, OPEN)
        samples.valid[...] = np.arange(self.batch_T)[:, None] < n
        samples.mark_starts()
        # What the next batch begins with.
        self._is_in_batch, at = False, columns[is_open]
        first = self._first_row
        first.episode_start[...] = np.where(n > 0, samples.done[n - 1, columns], first.episode_start)
        first.action[...], first.reward[...] = samples.action[n, columns], samples.reward[n, columns]
        self._open_observation[at] = samples.observation[n[at], at]
        self._open_action[at], self._open_info[at] = samples.action[n[at] + 1, at], samples.agent_info[n[at], at]
        # Of the first row that is no decision, only the observation is kept. It is also that after the last row.
        samples.action[n[at] + 1, at] = 0
        samples.agent_info[n[at], at] = 0
        samples.observation[-1, at] = self._open_observation[at]
        self._write_asked()
        if self._who:
            self.progress.at_env(self._who)
        self.progress.enter(Phase.ACTING)
        self.agent.select(None)
        self._write_turn_values(is_open)
        if self._ends.pending:
            self._ends.write_values()
        self.progress.enter(Phase.SENDING)
        return self.tracker.end_rows(samples.reward[1:], samples.done, self.first_t, samples.valid, self._ends_at)

    def _write_asked(self) -> None:
        """The observations of seats that are asked are those after the last row."""
        seats, last = self.columns, self.samples.batch_T
        for column in seats.asked + seats.held:
            seats._write_one(self._observations, last, column, seats.observations[column], "observation")

    def _write_turn_values(self, is_open: Any) -> None:
        """The value after the last row: of the observation that is asked, or of the open decision."""
        samples, values = self.samples, self.samples.bootstrap_value
        if values is None:
            return
        first, is_start = self._first_row, self._first_row.episode_start
        action, reward = map_leaves(np.copy, first.action), np.where(is_start, np.float32(0), first.reward)
        action[is_start] = 0
        found = np.array(self.agent.value(samples.observation_rows[-1], action, reward), np.float32)
        if "value" in samples.agent_info:  # as it was when the agent decided: a state has gone on since
            found[is_open] = self._open_info.value[is_open]
        is_open[self.columns.asked + self.columns.held] = True
        values[...] = np.where(is_open, found, 0)

    # ---- before the first row --------------------------------------------------------------

    def start_afresh(self) -> None:
        super().start_afresh()
        seats, n = self.columns, len(self.columns)
        seats.rewards, seats.asked, seats.held = [0.0] * n, [], []
        seats.stage, seats.n = [CLOSED] * n, [0] * n
        self._random, self._acted_on, self._is_in_batch = [[] for _ in range(n)], {}, False
        self._first_row.action[...], self._first_row.reward[...] = self.prev_action, self.prev_reward

    def draw_action(self, rng: np.random.Generator, column: int) -> None:
        """A random action for the seat that is asked."""
        columns = self.columns
        columns.asked.remove(column)
        self.draw(rng, [column])
        columns.actions[column] = columns.split_actions(self.prev_action[column : column + 1])[0]
        columns.stage[column] = RANDOM
        if self._on_step is not None:
            self._acted_on[column] = snapshot(columns.observations[column]), snapshot(columns.actions[column])
            self._open_info[column] = 0


class TurnLoop(Collector):
    """The loop over decisions, in place of that over time steps."""

    columns: TurnColumns
    recorders: Sequence[TurnRecorder]  # type: ignore[assignment]
    games: BatchTracker
    recorder_cls = TurnRecorder

    def __init__(self, parts: CollectorParts) -> None:
        super().__init__(parts)
        columns = self.columns
        columns.streams, first = parts.streams, columns.env_ranks[0]
        for recorder in self.recorders:
            ranks = [int(rank) - first for rank in recorder.columns.env_ranks]
            recorder.ply_of = lambda column, ranks=ranks: columns.plies[ranks[column]] - 1  # type: ignore[misc]
        self._playing, self._acting = list[int](), 0

    # ---- the loop --------------------------------------------------------------------------

    def collect_batch(self, itr: int) -> None:
        progress, columns, n, began = self.progress, self.columns, 0, time.monotonic_ns()
        self.begin_batch(itr)
        while self._playing:
            self.act(n)
            self.step_envs(n)
            n += 1
        progress.add_batch(self._acting, time.monotonic_ns() - began - self._acting, sum(columns.plies))
        progress.add_late_rewards(len(columns.late))
        progress.n_results = self.end_rows(self.batch_T)

    def begin_batch(self, itr: int) -> None:
        self.columns.begin_rows(goes_on=self.recorders[0].first_t > 0)
        for recorder in self.recorders:
            recorder.begin_batch(itr)
        self._playing, self._acting = [e for e, place in enumerate(self.columns.waits) if place is not None], 0

    def act(self, t: int) -> None:
        """First part of round t: every policy acts for its seats that are asked."""
        self._acting -= self.progress.begin_row(self.recorders[0].first_t + t)
        for recorder in self.recorders:
            recorder.act(t)
        self._acting += self.progress.enter(Phase.STEPPING)

    def step_envs(self, t: int) -> None:
        """Second part of round t: each environment gets its decision, and finds who decides next."""
        columns, playing = self.columns, []
        for e in self._playing:
            has_rows = columns.play(e)
            if columns.over:
                self._begin_games()
                has_rows = columns.has_rows(e)
            if has_rows:
                playing.append(e)
        self._playing = playing

    def _begin_games(self) -> None:
        """Games are over, and those that begin may be over before anybody is asked."""
        while over := self.columns.take_over():
            self.begin_episodes(Events(over, ()), ())

    def end_rows(self, n_rows: int, n_valid: int | None = None) -> int:
        columns = self.columns
        columns.late = []
        n_sent = sum(recorder.end_batch(self.batch_T) for recorder in self.recorders)
        n, first_t, n_envs = max(columns.plies), self.recorders[0].first_t, len(columns.envs)
        rewards, over = np.zeros((n, n_envs), np.float32), np.zeros((n, n_envs), np.bool_)
        for e, (sums, ends, plies) in enumerate(zip(columns.sums, columns.ends, columns.plies, strict=True)):
            made = {ply - 1: reward for ply, reward in sums.items() if ply <= plies}
            rewards[list(made), e] = list(made.values())
            over[[ply - 1 for ply in ends], e] = True
        n_sent += self.games.end_rows(rewards, over, first_t, np.arange(n)[:, None] < columns.plies)
        unasked, columns.unasked = columns.unasked, []
        return n_sent + self.games.end_unasked([(first_t + n - 1, e, reward) for e, n, reward in unasked])

    # ---- before the first row --------------------------------------------------------------

    def reset_envs(self, seeds: Sequence[int | None], used: Sequence[int] | None = None) -> None:
        columns, everyone = self.columns, range(len(self.columns.env_ranks))
        for recorder in self.recorders:
            recorder.start_afresh()
        self.games.restart()
        columns.start_afresh()
        columns.park(everyone)
        for e in everyone if used is None else used:
            columns.reset([e], [Start(seeds[e])])
            self._begin_games()

    def restart_envs(self, envs: Sequence[int], streams: ColumnStreams) -> None:
        """All of them: games in turns are not saved."""
        self.restart(streams)

    def _make_random_steps(self, e: int, rng: np.random.Generator) -> None:
        columns = self.columns
        columns.begin_rows()
        late = list(columns.late)  # those of the reset
        columns.counts_games = False
        for _ in range(int(rng.integers(0, self._max_decorrelation_steps + 1))):
            self.progress.begin_random_step(columns.env_ranks[e])
            place = columns.waits[e]
            assert place is not None
            seats, column = place
            next(recorder for recorder in self.recorders if recorder.columns is seats).draw_action(rng, column)
            columns.play(e)
            self._begin_games()
        columns.counts_games, columns.late = True, late
        first = columns.ends[e][-1] if columns.ends[e] else 0
        self.games.preload(e, [columns.sums[e][ply] for ply in range(first + 1, columns.plies[e] + 1)])


class TurnCollector(TurnLoop, ResetCollector):
    """Collects batches from the environments of one worker in which agents take turns."""


class TurnEvalCollector(TurnLoop, EvalCollector):
    """Evaluates in such environments."""

    def begin_evaluation(self) -> None:
        self.columns.key = 1, self._n_evaluations
        super().begin_evaluation()
