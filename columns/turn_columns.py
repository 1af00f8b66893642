"""LockStepColumns in which agents take turns: who decides next, and when the reward of a decision is complete."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from penstock.buffers.tree import snapshot
from penstock.columns.interface import Columns, Events, Start
from penstock.columns.seat_columns import LockStepColumns, SeatColumns
from penstock.envs.checks import episode_flags, require_info, require_number
from penstock.envs.seeding import Purpose, stream
from penstock.errors import ConfigError, SpaceError, brief
from penstock.workers.control import Progress

_MOST_ENDS = 100_000  # how many agents may end between two decisions
#: An *empty game* ends before any agent could act. How many there may be in a batch or an evaluation, beside one for
#: each decision.
MOST_EMPTY_GAMES = 1_000
_EMPTY_GAME: tuple[()] = ()  # in the place of who decides


class TurnSeats(SeatColumns):
    """The seats of one policy, in games that are played in turns. Each column counts its own rows: its decisions.

    A decision is *open* until its reward is complete: until the agent is asked again, or ends. Lists have an entry for
    each column.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        n = len(self)
        self.idle, self.is_open = [], [False] * n
        #: How many decisions of this batch are closed: the row of the next one. -1: a random step is open.
        self.rows, self.most_rows = [0] * n, sys.maxsize
        self.asked: list[int] = []  #: who decides next. Between two batches, also those who had all rows
        self._hook_actions: list[Any] = [None] * n  # copies of the actions
        self.closed: list[int] = []  #: whose decision this step has closed
        self.is_watched = bool(self.checks)

    def watched(self) -> None:
        super().watched()
        self.is_watched = self.on_step is not None or self.keep_info is not None or bool(self.checks)

    def note_action(self, column: int) -> None:
        """This column decides, and is watched."""
        if self.checks.debug:
            self.require_action(column, self.actions[column])
        self._hook_actions[column] = snapshot(self.actions[column])

    def close(
        self, column: int, observation: Any, reward: float, terminated: bool, truncated: bool, info: dict[str, Any]
    ) -> None:
        """A decision was closed, and the agent has ended or is watched."""
        self.check_finite(column, reward)
        self.note_info(column, info)
        if self.on_step is not None:
            seen = self.observations[column]
            self.on_step(column, seen, self._hook_actions[column], reward, terminated, truncated, dict(info))
        if terminated or truncated:
            if observation is None and not terminated:
                raise SpaceError(
                    f"env_rank {self.env_ranks[column]} was truncated, but env.last returned no observation for it"
                )
            last = self.zero if observation is None else snapshot(observation)
            self.ends.append((column, last, reward, terminated, truncated))


class TurnColumns(LockStepColumns):
    """One worker's environments that are played in turns. See `Columns` and `LockStepColumns`.

    A step is a *round*: each environment gets the decision that it waits for, unless the seat has all rows of the
    batch. An empty game is over in the next round.
    """

    policies: Sequence[TurnSeats]
    places: list[dict[Any, tuple[TurnSeats, int]]]  # type: ignore[assignment]
    n_rounds: int

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        n = len(self.envs)
        self._all_places: dict[tuple[int, Any], list[tuple[TurnSeats, int]]] = defaultdict(list)
        for policy in self.policies:
            for i, rank in enumerate(policy.env_ranks):
                self._all_places[int(rank), rank.agent_id].append((policy, i))
        #: Whose decision each environment waits for. None: it is over, or parked.
        self._waits: list[tuple[TurnSeats, int] | tuple[()] | None] = [None] * n
        #: Which of `policies` has the seat in this game: (agent, env_rank, game, rng). None: the only one.
        self.chooser: Callable[..., int] | None = None
        self.seed = 0  #: of the run, for `chooser`
        self.most_rounds = sys.maxsize  #: the most that a batch may have
        self._numbers, self._generations = [0] * n, [0] * n  # of the games, for `chooser`
        #: Of this batch: its rounds; how many decisions each environment was given; the rewards of all agents that are
        #: not zero, as (round, environment, reward); and the same for the empty games.
        self.n_rounds, self.plies = 0, [0] * n
        self.sums, self.empty_games = list[tuple[int, int, float]](), list[tuple[int, int, float]]()
        self._everyone = range(n)
        self._totals, self._n_empty = [0.0] * n, 0  # `_n_empty`: empty games, beyond one for each decision

    def columns_of(self, e: int) -> Sequence[Sequence[int]]:
        rank = int(self.env_ranks[e])
        places = [place for agent in self.places[e] for place in self._all_places[rank, agent]]
        return [[column for columns, column in places if columns is policy] for policy in self.policies]

    def rounds(self, n_rows: int) -> Iterator[int]:
        """The numbers of the rounds. They end when each environment is over, or waits for a seat that has all its rows
        of the batch."""
        for t in range(self.most_rounds):
            for policy in self.policies:
                if policy.asked:
                    break
            else:
                if _EMPTY_GAME not in self._waits:
                    return
            yield t

    def begin_rows(self, *, goes_on: bool) -> None:
        """A batch begins: rows are counted from here. `goes_on`: in the same evaluation as before."""
        self._n_empty = self._n_empty - sum(self.plies) if goes_on else 0
        self.n_rounds, self.plies, self.sums, self.empty_games = 0, [0] * len(self.envs), [], []
        for policy in self.policies:
            pairs = zip(policy.rows, policy.is_open, strict=True)
            policy.rows = [min(row, 0) if is_open else 0 for row, is_open in pairs]
        self.ask_all()

    def ask_all(self) -> None:
        """Ask every seat that decides next, also those that had all rows of the batch."""
        for policy in self.policies:
            policy.asked = [place[1] for place in self._waits if place and place[0] is policy]

    # ---- games -----------------------------------------------------------------------------

    def _continue(self, e: int, start: Start) -> bool:
        if start.state is not None or start.actions is not None:
            raise ConfigError("games in turns are not saved, and not repeated: give a seed")
        if start.generation is not None:
            self._numbers[e], self._generations[e] = 0, start.generation
        return super()._continue(e, start)

    def _enter(self, e: int, result: object) -> None:
        """Find who decides first. The game may be over already."""
        env_rank = self.env_ranks[e]
        if not self._bound[e][1].agents:
            raise SpaceError(f"env.reset of env_rank {env_rank} must leave at least one agent in env.agents")
        self.clear(e)
        if self.chooser is not None:
            self._choose(self.chooser, e)
        self._words[Progress.PHASE] = Progress.IS_STEPPING
        self._advance(e)
        if self._waits[e] is None:
            self._waits[e], self._n_empty = _EMPTY_GAME, self._n_empty + 1
            self.over.pop()
            if self._n_empty >= MOST_EMPTY_GAMES + sum(self.plies):
                raise SpaceError(
                    f"{MOST_EMPTY_GAMES:,} games have ended before any agent could act, the last one of env_rank "
                    f"{env_rank}: a game must ask an agent before it ends"
                )

    def _choose(self, chooser: Callable[..., int], e: int) -> None:
        """Who plays this game of environment e."""
        game, env_rank, places = self._numbers[e], int(self.env_ranks[e]), self.places[e]
        evaluation = (1, self.evaluation - 1) if self.evaluation else (0, 0)
        for seat, agent in enumerate(places):
            key = env_rank, seat, game, *evaluation, self._generations[e]
            rng = partial(stream, self.seed, Purpose.SEATING, *key)
            places[agent] = self._all_places[env_rank, agent][chooser(agent, env_rank, game, rng)]

    def clear(self, e: int) -> None:
        for columns, column in self.acting(e):
            columns.is_open[column], columns.rows[column] = False, max(columns.rows[column], 0)
        if (place := self._waits[e]) and place[1] in place[0].asked:
            place[0].asked.remove(place[1])
        self._waits[e], self._totals[e] = None, 0.0

    def acting(self, e: int) -> list[tuple[TurnSeats, int]]:  # type: ignore[override]
        """Whose decision is open in environment e."""
        return [(columns, column) for columns, column in self.places[e].values() if columns.is_open[column]]

    save = Columns.save  # games in turns are not saved

    # ---- rounds ----------------------------------------------------------------------------

    def step(  # noqa: C901 - it is called for each round
        self, actions: Sequence[Any], row: int | None = None, which: int | None = None
    ) -> Events | None:
        """Play one decision in each environment that waits for one. With `which`, it is no part of a batch."""
        waits, totals, bound = self._waits, self._totals, self._bound
        for policy, action_row in zip(self.policies, actions):  # noqa: B905 - `strict` takes time
            policy.actions, policy.closed = policy.split_actions(action_row), []
            policy.asked = [] if which is None else [b for b in policy.asked if (policy, b) != waits[which]]
        for e in self._everyone if which is None else (which,):
            if place := waits[e]:
                columns, column = place
                if columns.rows[column] >= columns.most_rows:
                    continue
                env, _, self._rank_word[-1], _, _, _ = bound[e]
                if columns.is_watched:
                    columns.note_action(column)
                columns.is_open[column] = True
                self.plies[e] += 1
                try:
                    env.step(columns.actions[column])
                    self._advance(e)
                except self.renewable as error:
                    self._cut_env(e, error)
                    continue
                if totals[e]:
                    self.sums.append((self.n_rounds, e, totals[e]))
                    totals[e] = 0.0
            elif place is _EMPTY_GAME:
                waits[e], self._has_events = None, True
                self.over.append(e)
                self.empty_games.append((self.n_rounds, e, totals[e]))
                totals[e] = 0.0
        self.n_rounds += 1
        if not self._has_events:
            return None
        for e in self.over if which is None else ():
            self._numbers[e] += e not in self.cut or not self.evaluation  # where it is played again
        late = [pair for pair in self.late if which in (None, pair[0])]
        events = Events(self.over, [policy.take() for policy in self.policies], self.cut, late)
        self.over, self.cut, self.late = [], [], [pair for pair in self.late if which not in (None, pair[0])]
        self._has_events = bool(self.late)
        return events

    def _advance(self, e: int) -> None:  # noqa: C901, PLR0912 - it is called for each decision
        """Read what the agents of environment e get, until one must decide or nobody is left."""
        env, raw, _, places, _, _ = self._bound[e]
        columns: Any
        place: Any
        n_ends = 0
        while raw.agents:
            agent = raw.agent_selection
            if agent not in places:
                self._require_known(e, [agent])
            columns, column = place = places[agent]
            if agent not in raw.agents:
                raise SpaceError(f"env_rank {columns.env_ranks[column]} is env.agent_selection, but not in env.agents")
            result = env.last()  # type: ignore[attr-defined]
            if result.__class__ is not tuple or len(result) != 5:
                what = f"(observation, reward, terminated, truncated, info), got {brief(result)}"
                raise SpaceError(f"env.last of env_rank {columns.env_ranks[column]} must return a tuple {what}")
            observation, reward, terminated, truncated, info = result
            ends = False
            if not (terminated is truncated is False and reward.__class__ in (int, float) and info.__class__ is dict):
                rank = columns.env_ranks[column]
                terminated, truncated = episode_flags(terminated, truncated, rank)
                reward, ends = require_number(reward, rank), terminated or truncated
                require_info(info, rank)
            if reward:
                self._totals[e] += reward
            if columns.is_open[column]:
                columns.is_open[column], columns.rewards[column] = False, reward
                columns.rows[column] += 1
                columns.closed.append(column)
                if ends or columns.is_watched:
                    self._has_events = self._has_events or ends
                    columns.close(column, observation, reward, terminated, truncated, info)
            else:  # the agent has not decided in this game yet
                self._meet(e, columns, column, reward, joins=not ends)
            if not ends:
                columns.observations[column] = snapshot(observation)
                if columns.rows[column] < columns.most_rows:
                    columns.asked.append(column)
                self._waits[e] = place
                break
            n_ends += 1
            if n_ends > _MOST_ENDS:
                rank = columns.env_ranks[column]
                raise SpaceError(f"env_rank {rank} has ended, but env.step(None) did not remove it from env.agents")
            env.step(None)  # type: ignore[arg-type]
        else:
            self._end_game(e)
        if env.take_late_rewards is not None:  # type: ignore[attr-defined]
            self._take_late(e)

    def _meet(self, e: int, columns: TurnSeats, column: int, reward: float, *, joins: bool) -> None:
        """An agent that has not decided in this game is asked, or has ended."""
        self._has_events = True
        if reward:
            columns.add_late(column, reward)
            self.late.append((e, reward))
        if joins:
            columns.joined.append(column)

    def _end_game(self, e: int) -> None:
        """Nobody is left in environment e."""
        for columns, column in self.acting(e):
            raise SpaceError(
                f"env_rank {columns.env_ranks[column]} is not in env.agents any more, but neither terminated nor "
                "truncated since its last decision"
            )
        self._waits[e], self._has_events = None, True
        self.over.append(e)

    def _take_late(self, e: int) -> None:
        """Count the rewards for agents that were not in the game of environment e."""
        for late in self.envs[e].take_late_rewards():
            number = require_number(late, self.env_ranks[e])
            self._totals[e] += number
            self.late.append((e, number))
            self._has_events = True
