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
from penstock.agents.agent import AgentStep, as_agent_step
from penstock.buffers.named import NamedArrays, map_leaves
from penstock.buffers.native import put_cell, put_row
from penstock.buffers.samples import BatchColumns
from penstock.collectors.acting import NO_AGENT_INFO, AgentInfoWriter, write_action
from penstock.collectors.lock_step import Desk, LockStepCollector
from penstock.collectors.tracking import BatchTracker
from penstock.columns.interface import no_legal_action, not_flags, snapshot
from penstock.columns.turn_columns import CLOSED, OPEN, RANDOM, TurnColumns, TurnGames
from penstock.envs.checks import check_row
from penstock.envs.rows import ColumnError, arrays_like, write_row
from penstock.errors import SpaceError, brief
from penstock.workers.control import Phase


class _Part:
    """Memory for one row of m decisions: what the agent gets, and what it returns."""

    def __init__(self, desk: TurnDesk, m: int) -> None:
        samples, space = desk.samples, desk.envs.observation_space

        def row(field: Any) -> Any:
            return map_leaves(lambda leaf: np.zeros((1, m, *leaf.shape[2:]), leaf.dtype), field)

        observation, action, agent_info = row(samples.observation), row(samples.action), row(samples.agent_info)
        self.arrays = arrays_like(space, observation)
        self.unchecked = None if desk.envs.checks else self.arrays
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


class TurnDesk(Desk):
    """Acts for the seats of one policy that are asked, and records their decisions."""

    envs: TurnColumns
    _targets: tuple[list[Any], list[Any], list[Any]]
    _actions: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        envs, samples = self.envs, self.samples
        envs.on_close, envs.on_reward = self._close, self._write_reward
        envs.closes_with_hook = self.on_step is not None or self._info_writer is not None
        envs.most_rows = self.batch_T
        self.ply_of: Callable[[int], int] = lambda column: 0  # of its environment
        self._parts: dict[int, _Part] = {}
        n = len(envs)
        # Of each column: its index as an array, and its previous action as a batch of one.
        self._alone = [(np.array([b]), self.prev_action[b : b + 1]) for b in range(n)]
        self._prev_actions = arrays_like(envs.action_space, self._prev_actions)
        self._ends_at = np.zeros((self.batch_T, len(envs)), np.int64)  # where a row ends an episode: after which ply
        self._random: list[list[float]] = [[] for _ in envs.env_ranks]  # the rewards of random steps
        self._is_in_batch = False
        self._acted_on: dict[int, Any] = {}  # for a hook: the observation and the action of open decisions
        # The decisions that are open between two batches, and the agent_info of all that are.
        self._open_observation = map_leaves(lambda leaf: np.zeros_like(leaf[0]), samples.observation)
        self._open_action = map_leaves(np.zeros_like, self.prev_action)
        self._open_info = map_leaves(lambda leaf: np.zeros_like(leaf[0]), samples.agent_info)

    def _writers(self, samples: BatchColumns) -> dict[str, Any]:
        fields = samples.observation, samples.agent_info, samples.action
        actions = arrays_like(self.envs.action_space, samples.action)
        return {**super()._writers(samples), "_targets": tuple(map(_leaves, fields)), "_actions": actions}

    # ---- a batch ---------------------------------------------------------------------------

    def begin_batch(self, itr: int, first_t: int = 0) -> None:
        samples, envs, self._first_t = self.samples, self.envs, first_t
        samples.begin_batch(None)
        samples.zero_rows()  # what is no decision stays so
        if samples.env_info is not None:
            samples.env_info[...] = 0
        samples.episode_start[...] = self._episode_start
        samples.action[0], samples.reward[0] = self._first_action, self._first_reward
        at = np.flatnonzero(np.equal(envs.stage, OPEN))
        samples.observation[0, at] = self._open_observation[at]
        samples.action[1, at], samples.agent_info[0, at] = self._open_action[at], self._open_info[at]
        envs.n, self._is_in_batch = [0] * len(envs), True
        envs.asked, envs.held = sorted(envs.asked + envs.held), []
        self._enter_mode(itr)

    def decide(self) -> None:
        """Act for the seats that are asked. Their environments find the actions in `envs.actions`."""
        envs, asked = self.envs, self.envs.asked
        if not asked:
            return
        m = len(asked)
        part = self._parts.get(m) or self._parts.setdefault(m, _Part(self, m))
        at: Any
        row: Any
        if m == 1:  # numpy takes longer for arrays of one index
            (at,) = asked
            (columns, prev_action), row, part.prev_reward[0] = self._alone[at], envs.n[at], envs.rewards[at]
        else:
            columns = at = np.array(asked)
            prev_action, row = self.prev_action[at], np.array([envs.n[column] for column in asked])
            part.prev_reward[:] = [envs.rewards[column] for column in asked]
        observations = [envs.observations[column] for column in asked]
        try:
            if not put_row(part.unchecked, 0, observations):
                self._write_observations(part, observations)
            self._step_agent(part, columns, prev_action)
        except ColumnError as error:
            raise envs.with_env_rank(asked[error.column], error) from None
        self._record(part, observations, row, at)
        envs.asked = []

    def _record(self, part: _Part, observations: Sequence[Any], row: Any, at: Any) -> None:
        """Write the decisions into the batch, each into the next row of its column: `row` and `at` are these cells."""
        envs, kept = self.envs, self._prev_actions
        has_observations = has_actions = True
        # Cell by cell, in C: that is faster than an index of several cells, as long as there are few.
        for i, (column, own) in enumerate(zip(envs.asked, envs.split_actions(part.action), strict=True)):
            t = envs.n[column]
            has_observations = put_cell(self._observations, t, column, observations[i]) and has_observations
            has_actions = put_cell(self._actions, t + 1, column, own) and has_actions
            has_actions = put_cell(kept, 0, column, own) and has_actions
            envs.actions[column], envs.stage[column] = own, OPEN  # type: ignore[index]
        recorded, infos, actions = self._targets
        for target, source in zip(infos, part.infos, strict=True):
            target[row, at] = source
        if not has_observations:
            for target, source in zip(recorded, part.recorded, strict=True):
                target[row, at] = source
        if not has_actions:
            self.prev_action[at] = part.action if len(envs.asked) > 1 else part.action[0]
            for target, source in zip(actions, part.given, strict=True):
                target[row + 1, at] = source
        if self.on_step is not None:
            for column, observation in zip(envs.asked, observations, strict=True):
                self._acted_on[column] = snapshot(observation), snapshot(envs.actions[column])
                self._open_info[column] = self.samples.agent_info[envs.n[column], column]

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
        """Write and check them. Raises `ColumnError`, whose column is an index in `envs.asked`."""
        write_row(part.arrays, 0, observations)
        check_row(self.envs.checks, self.envs.observation_space, part.arrays, 0, observations)

    def _check_masks(self, mask: ActionMask, observation: Any) -> None:
        """Raise `SpaceError` if a seat that is asked has no legal action; before the first decision, also if a mask has
        other numbers than 0 and 1."""
        if self._is_first_batch:
            self._is_first_batch = False
            if (others := mask.has_others(observation)).any():
                raise not_flags(self.envs, self.envs.asked[int(others.argmax())])
        if (none := mask.has_none(observation)).any():
            raise no_legal_action(self.envs, self.envs.asked[int(none.argmax())])

    # ---- what the games report -------------------------------------------------------------

    def _write_reward(self, column: int, reward: float) -> None:
        """The open decision of this column has this reward."""
        if self.envs.stage[column] == OPEN:
            try:
                with np.errstate(over="raise"):
                    self.samples.reward[self.envs.n[column] + 1, column] = reward
            except (FloatingPointError, OverflowError):
                raise SpaceError(
                    f"the reward of env_rank {self.envs.env_ranks[column]} must be a number that float32 can hold, got "
                    f"{brief(reward)}"
                ) from None

    def _close(
        self, column: int, observation: Any, reward: float, terminated: bool, truncated: bool, info: Mapping[str, Any]
    ) -> None:
        envs, ends = self.envs, terminated or truncated
        if ends and observation is None:
            if truncated and not terminated:
                raise SpaceError(
                    f"env_rank {envs.env_ranks[column]} was truncated, but env.last returned no observation for it"
                )
            observation = envs.zero
        if envs.stage[column] == RANDOM:
            self._close_random(column, observation, reward, ends=ends)
        else:
            n = envs.n[column]
            if self._info_writer is not None:
                try:
                    self._info_writer.write(self.samples.env_info[n, column : column + 1], [info])
                except ColumnError as error:
                    raise envs.with_env_rank(column, error) from None
            if self.on_step is not None:
                self.tracker.set_agent_info(self._open_info)
                seen, action = self._acted_on.pop(column)
                self.on_step(column, seen, action, reward, terminated, truncated, dict(info))
            if ends:
                self._record_end(n, column, observation, reward, terminated, truncated)
            envs.n[column] = n + 1
        if ends:
            if self._agent_has_state:
                self.agent.reset_one(column)
            self.prev_action[column], envs.rewards[column] = 0, 0.0

    def _record_end(
        self, n: int, column: int, observation: Any, reward: float, terminated: bool, truncated: bool
    ) -> None:
        if self.agent.recurrent:
            self.agent.select(None)  # the value of a truncation is computed with the state of all columns
        ply = self._ends_at[n, column] = self.ply_of(column)
        if self._who:
            self.progress.at_env(self._who | int(self.envs.env_ranks[column]))
        self._episode_ends.record(n, column, observation, reward, terminated, truncated)
        if self.on_step is not None:
            self.tracker.on_episode_end(self._first_t + int(ply), column, observation)

    def _close_random(self, column: int, observation: Any, reward: float, *, ends: bool) -> None:
        """A decision from before the first batch: it is no row, but the next decision continues its episode."""
        if ends:
            self.envs.check_final(column, observation)
            self._random[column] = []
            self.tracker.drop(column)
        else:
            self._random[column].append(reward)
            self.tracker.preload(column, self._random[column])
        self._episode_start[column] = ends
        self._first_action[column], self._first_reward[column] = self.prev_action[column], reward
        if self._is_in_batch:
            self.samples.episode_start[column] = ends
            self.samples.action[0, column], self.samples.reward[0, column] = self.prev_action[column], reward

    # ---- the end of a batch ----------------------------------------------------------------

    def finish(self, n_rows: int, first_t: int = 0) -> int:
        """The batch is complete. Keep what is open, compute the missing values, and send the finished trajectories."""
        samples, envs, columns = self.samples, self.envs, np.arange(len(self.envs))
        n = np.array(envs.n)
        is_open = np.equal(envs.stage, OPEN)
        samples.valid[...] = np.arange(self.batch_T)[:, None] < n
        samples.mark_starts()
        # What the next batch begins with.
        self._is_in_batch, at = False, columns[is_open]
        self._episode_start = np.where(n > 0, samples.done[n - 1, columns], self._episode_start)
        self._first_action, self._first_reward = samples.action[n, columns], samples.reward[n, columns]
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
        if self._episode_ends.pending:
            self._episode_ends.write_values()
        self.progress.enter(Phase.SENDING)
        return self.tracker.end_rows(samples.reward[1:], samples.done, first_t, samples.valid, self._ends_at)

    def _write_asked(self) -> None:
        """The observations of seats that are asked are those after the last row."""
        envs, last = self.envs, self.samples.batch_T
        for column in envs.asked + envs.held:
            envs._write_one(self._observations, last, column, envs.observations[column], "observation")

    def _write_turn_values(self, is_open: Any) -> None:
        """The value after the last row: of the observation that is asked, or of the open decision."""
        samples, values = self.samples, self.samples.bootstrap_value
        if values is None:
            return
        is_start = self._episode_start
        action, reward = map_leaves(np.copy, self._first_action), np.where(is_start, np.float32(0), self._first_reward)
        action[is_start] = 0
        found = np.array(self.agent.value(samples.observation_rows[-1], action, reward), np.float32)
        if "value" in samples.agent_info:  # as it was when the agent decided: a state has gone on since
            found[is_open] = self._open_info.value[is_open]
        is_open[self.envs.asked + self.envs.held] = True
        values[...] = np.where(is_open, found, 0)

    # ---- before the first row --------------------------------------------------------------

    def start_afresh(self) -> None:
        super().start_afresh()
        envs, n = self.envs, len(self.envs)
        envs.rewards, envs.asked, envs.held = [0.0] * n, [], []
        envs.stage, envs.n = [CLOSED] * n, [0] * n
        self._random, self._acted_on, self._is_in_batch = [[] for _ in range(n)], {}, False
        self._first_action, self._first_reward = map_leaves(np.copy, self.prev_action), self.prev_reward.copy()

    def draw_action(self, rng: np.random.Generator, column: int) -> None:
        """A random action for the seat that is asked."""
        actions = self.envs.actions
        self.envs.asked.remove(column)
        self.draw_actions(rng, [column])
        actions[column], self.envs.actions = self.envs.actions[column], actions  # type: ignore[index]
        self.envs.stage[column] = RANDOM


class TurnCollector(LockStepCollector):
    """Collects batches from the environments of one worker in which agents take turns."""

    games: TurnGames
    desks: Sequence[TurnDesk]
    tracker: BatchTracker

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        first, games = self.games.env_ranks[0], self.games
        for desk in self.desks:
            ranks = [int(rank) - first for rank in desk.envs.env_ranks]
            desk.ply_of = lambda column, ranks=ranks: games.plies[ranks[column]] - 1  # type: ignore[misc]

    def collect_rows(self, itr: int, n_rows: int, first_t: int = 0, must_stop: Callable[[], bool] | None = None) -> int:
        """Collect a batch. With `must_stop`, which is for evaluations: make up to `n_rows` decisions in each
        environment. Returns how many trajectories were sent. `rows` says how many rounds of decisions were made."""
        games, desks, progress = self.games, self.desks, self.progress
        games.begin_rows(goes_on=first_t > 0)
        for desk in desks:
            desk.begin_batch(itr, first_t)
        playing, self.rows = [e for e, place in enumerate(games.waits) if place is not None], 0
        acting, began = 0, time.monotonic_ns()
        while playing and (must_stop is None or (self.rows < n_rows and not must_stop())):
            acting -= progress.begin_row(self.rows)
            for desk in desks:
                desk.decide()
            acting += progress.enter(Phase.STEPPING)
            playing = [e for e in playing if games.play(e)]
            games.end_row()
            self.rows += 1
        if self._is_training:
            progress.add_batch(acting, time.monotonic_ns() - began - acting, sum(games.plies))
            progress.add_late_rewards(len(games.late))
        games.late = []
        return self._finish(self.batch_T, first_t)

    def _finish(self, n_rows: int, first_t: int) -> int:
        games = self.games
        n_sent, n = sum(desk.finish(n_rows, first_t) for desk in self.desks), max(games.plies)
        rewards, over = np.zeros((n, len(games.envs)), np.float32), np.zeros((n, len(games.envs)), np.bool_)
        for e, (sums, ends, plies) in enumerate(zip(games.sums, games.ends, games.plies, strict=True)):
            made = {ply - 1: reward for ply, reward in sums.items() if ply <= plies}
            rewards[list(made), e] = list(made.values())
            over[[ply - 1 for ply in ends], e] = True
        n_sent += self.tracker.end_rows(rewards, over, first_t, np.arange(n)[:, None] < games.plies)
        unasked, games.unasked = games.unasked, []
        return n_sent + self.tracker.end_unasked([(first_t + n - 1, e, reward) for e, n, reward in unasked])

    def start(self) -> None:
        self.games.streams, self.games.key = self.streams, (0, 0)
        super().start()

    def begin_evaluation(self, seeds: Sequence[int], key: int, is_used: Callable[[int], bool]) -> None:
        self.games.streams, self.games.key = self.streams, (1, key)
        super().begin_evaluation(seeds, key, is_used)

    def _make_random_steps(self, e: int, rng: np.random.Generator) -> None:
        games = self.games
        games.begin_rows()
        late = list(games.late)  # those of the reset
        games.counts_games = False  # a game that ends here is in no record
        for _ in range(int(rng.integers(0, self._max_steps + 1))):
            self.progress.begin_random_step(games.env_ranks[e])
            place = games.waits[e]
            assert place is not None
            columns, column = place
            next(desk for desk in self.desks if desk.envs is columns).draw_action(rng, column)
            games.play(e)
        games.counts_games, games.late = True, late
        first = games.ends[e][-1] if games.ends[e] else 0
        self.tracker.preload(e, [games.sums[e][ply] for ply in range(first + 1, games.plies[e] + 1)])
