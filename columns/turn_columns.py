"""LockStepColumns in which agents take turns: who decides next, and when the reward of a decision is complete."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from penstock.buffers.tree import snapshot
from penstock.columns.interface import Start
from penstock.columns.seat_columns import LockStepColumns, SeatColumns
from penstock.envs.checks import episode_flags, require_info, require_number
from penstock.envs.seeding import ColumnStreams, Purpose, stream
from penstock.errors import SpaceError, brief
from penstock.workers.control import Phase, Progress

# The state of a seat's last decision. CLOSED: its reward is complete. OPEN: it is not. RANDOM: it is not, and the
# action was a random step before the first batch.
CLOSED, OPEN, RANDOM = range(3)

_START = Start()
_MOST_ENDS = 100_000  # how many agents may end between two decisions
#: How many games may end before anybody was asked, in a batch or an evaluation, beside one for each decision.
MOST_UNASKED = 1_000


class TurnSeats(SeatColumns):
    """The seats of one policy, in games that are played in turns. Lists have an entry for each column."""

    actions: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        n = len(self.env_ranks)
        self.idle, self.actions = [], [None] * n
        self.n, self.stage = [0] * n, [CLOSED] * n  #: closed rows in this batch, and what the last decision is
        self.asked: list[int] = []  #: the columns that decide next
        self.held: list[int] = []  #: those that are asked, but have all rows of this batch
        self.most_rows = 0  #: of a batch
        #: Called for a decision of which more than its reward must be noted: (column, observation, reward, terminated,
        #: truncated, info).
        self.on_close: Callable[..., None] = lambda *closed: None
        self.on_reward: Callable[[int, float], None] = lambda column, reward: None  #: for one that is not zero
        self.closes_with_hook = False  #: whether `on_close` is called for each decision


class TurnColumns(LockStepColumns):
    """One worker's environments that are played in turns. See `Columns` and `LockStepColumns`.

    Each column counts its own rows, so collectors call `play` in place of `step`. `waits[e]`: whose decision
    environment e waits for. None: it is over, or parked.
    """

    envs: list[Any]
    policies: Sequence[TurnSeats]
    places: list[dict[Any, tuple[TurnSeats, int]]]  # type: ignore[assignment]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        n, (_, columns, _) = len(self.envs), args
        self._all_places: dict[tuple[int, Any], list[tuple[TurnSeats, int]]] = defaultdict(list)
        for own in columns:
            for i, rank in enumerate(own.env_ranks):
                self._all_places[int(rank), rank.agent_id].append((own, i))
        self.waits: list[tuple[TurnSeats, int] | None] = [None] * n
        #: Which of `columns` has the seat in this game: (agent, env_rank, game, rng). None: the only one.
        self.chooser: Callable[..., int] | None = None
        self.game_numbers = [0] * n  #: the number of the game of each environment
        self.streams, self.key = ColumnStreams(0, self.env_ranks), (0, 0)
        self.counts_games = True  # not in random steps: a game that ends there is in no record
        self.plies = [0] * n  #: how many decisions each environment was given
        self.sums: list[dict[int, float]] = [{}] * n  #: its rewards after each of them
        #: The games that ended before anybody was asked: (environment, its decisions before, late rewards).
        self.unasked: list[tuple[int, int, float]] = []
        self._n_unasked = 0  # beyond one for each decision
        self.begin_rows()

    def begin_rows(self, *, goes_on: bool = False) -> None:
        """Count from here. `goes_on`: in the same evaluation as before. `late` and `unasked` stay, since a reset before
        may have added to them."""
        self._n_unasked = self._n_unasked - sum(self.plies) if goes_on else len(self.unasked)
        # Rewards at the beginning of a game count with its first decision, which may come only now.
        self.sums = [
            defaultdict(float, {ply - n: reward for ply, reward in own.items() if ply > n})
            for n, own in zip(self.plies, self.sums, strict=True)
        ]
        self.plies = [0] * len(self.envs)
        self.ends: list[list[int]] = [[] for _ in self.envs]  #: the decisions after which its games have ended

    def start_afresh(self) -> None:
        """No game has begun: all environments are reset next."""
        self.late, self.unasked, self.over = [], [], []
        for e, sums in enumerate(self.sums):
            self.plies[e], self.ends[e], self.game_numbers[e] = 0, [], 0
            sums.clear()

    # ---- games -----------------------------------------------------------------------------

    def reset(self, envs: Sequence[int], starts: Sequence[Start] | None = None) -> Sequence[Sequence[int]]:
        """Begin games, and find who decides first in each. Then a game may be over already. Nobody joins here: an agent
        joins when it is asked."""
        for i, e in enumerate(envs):
            start = _START if starts is None else starts[i]
            self._begin(e, start.seed, start.options)
            self.advance(e)
            if self.envs[e].take_late_rewards is not None:
                self.take_late(e)
        self.waiting = [e for e in self.waiting if e not in envs]
        return [()] * len(self.policies)

    def clear(self, e: int) -> None:
        self.waits[e] = None

    def take_over(self) -> list[int]:
        """The environments in which nobody is left since the last call."""
        over, self.over = self.over, []
        return over

    def has_rows(self, e: int) -> bool:
        """Whether environment e waits for a seat that has a row left in the batch."""
        if (place := self.waits[e]) is None:
            return False
        columns, column = place
        return columns.n[column] < columns.most_rows

    def _begin(self, e: int, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        env, env_rank = self.envs[e], self.env_ranks[e]
        self.progress.at_env(env_rank)
        began = self.progress.enter(Phase.RESETTING)
        env.reset(seed=seed, options=options)
        self.progress.add_resetting_since(began)
        if not env.agents:
            raise SpaceError(f"env.reset of env_rank {env_rank} must leave at least one agent in env.agents")
        if self.chooser is not None:
            self._choose(self.chooser, e)
        self._words[Progress.PHASE] = Progress.IS_STEPPING

    def _choose(self, chooser: Callable[..., int], e: int) -> None:
        """Who plays this game of environment e."""
        game, env_rank, places = self.game_numbers[e], int(self.env_ranks[e]), self.places[e]
        for seat, agent in enumerate(places):
            key = env_rank, seat, game, *self.key, self.streams.generation
            rng = partial(stream, self.streams.seed, Purpose.SEATING, *key)
            places[agent] = self._all_places[env_rank, agent][chooser(agent, env_rank, game, rng)]

    def _end_game(self, e: int) -> None:
        """Nobody is left in environment e."""
        for columns, column in self.places[e].values():
            if columns.stage[column]:
                raise SpaceError(
                    f"env_rank {columns.env_ranks[column]} is not in env.agents any more, but neither terminated nor "
                    "truncated since its last decision"
                )
        self.take_late(e)
        if self._has_just_begun(e):
            self._end_unasked(e)
        else:
            self.ends[e].append(self.plies[e])
        self.game_numbers[e] += self.counts_games
        self.waits[e] = None
        self.over.append(e)

    def _end_unasked(self, e: int) -> None:
        """The game of environment e has ended before anybody was asked."""
        reward = self.sums[e].pop(self.plies[e] + 1, 0.0)
        if self.counts_games:
            self.unasked.append((e, self.plies[e], reward))
        self._n_unasked += 1
        if self._n_unasked >= MOST_UNASKED + sum(self.plies):
            raise SpaceError(
                f"{MOST_UNASKED:,} games have ended before any agent could act, the last one of env_rank "
                f"{self.env_ranks[e]}: a game must ask an agent before it ends"
            )

    def take_late(self, e: int) -> None:
        """Count the rewards for agents that were not in the game of environment e."""
        for reward in (self.envs[e].take_late_rewards or tuple)():
            number = require_number(reward, self.env_ranks[e])
            self.sums[e][self.plies[e] + self._has_just_begun(e)] += number
            self.late.append((e, number))

    def _has_just_begun(self, e: int) -> bool:
        """Whether no decision was made in this game of environment e."""
        return self.plies[e] == (self.ends[e][-1] if self.ends[e] else 0)

    # ---- turns -----------------------------------------------------------------------------

    def play(self, e: int) -> bool:
        """Give environment e the decision that it waits for, and find who decides next. Returns whether this seat has
        a row left in the batch: otherwise the environment has stopped, or is over."""
        place = self.waits[e]
        assert place is not None
        columns, column = place
        self._rank_word[-1] = self.env_ranks[e]
        if columns.checks.debug:
            columns.require_action(column, columns.actions[column])
        self.plies[e] += 1
        env: Any = self._bound[e][0]
        env.step(columns.actions[column])
        has_rows = self.advance(e)
        if env.take_late_rewards is not None:
            self.take_late(e)
        return has_rows

    def advance(self, e: int) -> bool:  # noqa: C901 - it is called for each decision
        """Close the decisions whose rewards are complete, until an agent must decide or environment e is over."""
        env, raw, _, places, *_ = self._bound[e]
        columns: Any
        n_ends = 0
        while True:
            if not raw.agents:
                self._end_game(e)
                return False
            agent = raw.agent_selection
            if agent not in places:
                self._require_known(e, [agent])
            columns, column = places[agent]
            if agent not in raw.agents:
                raise SpaceError(f"env_rank {columns.env_ranks[column]} is env.agent_selection, but not in env.agents")
            result = env.last()  # type: ignore[attr-defined]
            if result.__class__ is not tuple or len(result) != 5:
                raise _not_five(columns.env_ranks[column], result)
            observation, reward, terminated, truncated, info = result
            ends = False
            if not (terminated is truncated is False and reward.__class__ in (int, float) and info.__class__ is dict):
                rank = columns.env_ranks[column]
                terminated, truncated = episode_flags(terminated, truncated, rank)
                reward, ends = require_number(reward, rank), terminated or truncated
                require_info(info, rank)
            stage = columns.stage[column]
            if reward:
                self._note_reward(e, columns, column, reward)
            if stage:
                columns.rewards[column] = reward
                if ends or stage == RANDOM or columns.closes_with_hook:
                    columns.on_close(column, observation, reward, terminated, truncated, info)
                else:
                    columns.n[column] += 1
                columns.stage[column] = CLOSED
            if ends:
                n_ends = _count_end(n_ends, columns.env_ranks[column])
                env.step(None)  # type: ignore[arg-type]
                continue
            columns.observations[column] = snapshot(observation)
            self.waits[e] = columns, column
            has_rows = columns.n[column] < columns.most_rows
            (columns.asked if has_rows else columns.held).append(column)
            return has_rows  # type: ignore[no-any-return]

    def _note_reward(self, e: int, columns: Any, column: int, reward: float) -> None:
        self.sums[e][self.plies[e] + self._has_just_begun(e)] += reward
        if columns.stage[column]:
            columns.check_finite(column, reward)
            columns.on_reward(column, reward)
        else:  # the agent has not decided in this game yet
            columns.add_late(column, reward)
            columns.late.clear()
            self.late.append((e, reward))


def _not_five(rank: int, result: object) -> SpaceError:
    return SpaceError(
        f"env.last of env_rank {rank} must return a tuple (observation, reward, terminated, truncated, info), got "
        f"{brief(result)}"
    )


def _count_end(n: int, rank: int) -> int:
    """n + 1. Raises `SpaceError` if so many agents have ended since the last decision that they are not removed."""
    if n == _MOST_ENDS:
        raise SpaceError(f"env_rank {rank} has ended, but env.step(None) did not remove it from env.agents")
    return n + 1
