"""Seats in lock-step, without sampler and policies: who joins, who ends, who waits, and whose each reward is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.columns.interface import Start
from penstock.columns.seat_columns import LockStepColumns, SeatColumns
from penstock.envs.checks import Checks
from penstock.envs.seats import ParallelView, SeatRank
from penstock.envs.toy import ScriptedGame
from penstock.workers.control import ControlBlock, Progress

from ..scale import scaled
from ..toy_games import OPENING, STORY, Odd


class Table:
    """Steps games without a policy, and writes down what the columns are told."""

    def __init__(self, envs: list[Any], *, split: bool = False, debug: bool = False) -> None:
        """`split`: every second agent has columns of its own."""
        self.control = ControlBlock(1, 1, shared=False)
        progress = Progress(self.control, 0)
        views = [ParallelView(env) for env in envs]
        parts: list[list[tuple[int, Any]]] = [[], []]
        for e, view in enumerate(views):
            for i, agent in enumerate(view.possible_agents):
                parts[split and i % 2].append((e, agent))
        self.columns = []
        for own in filter(None, parts):
            e, agent = own[0]
            ranks = [SeatRank(10 + e, agent) for e, agent in own]
            columns = SeatColumns(ranks, views[e].spaces[agent], progress, Checks(debug=debug))
            self.columns.append(columns)
        self.games = LockStepColumns(views, self.columns, [10 + e for e in range(len(views))])
        self.log: list[Any] = []
        self.begin(range(len(views)), [5 + e for e in range(len(views))])

    def begin(self, envs: Any, seeds: Any = None) -> None:
        joined = self.games.reset(envs, None if seeds is None else [Start(seed) for seed in seeds])
        self._note_joined(joined)

    def _note_joined(self, joined: Any) -> None:
        for columns, own in zip(self.columns, joined, strict=True):
            self.log += [("join", str(columns.env_ranks[column])) for column in own]

    def seats(self) -> list[Any]:
        """(observation, reward) of each seat, and "-" for an idle one."""
        return [
            "-" if column in own.idle else (np.asarray(own.observations[column]).tolist(), own.rewards[column])
            for own in self.columns
            for column in range(len(own))
        ]

    def step(self, action: int = 0) -> list[Any]:
        """What happened, and how the seats are afterwards; the rewards of those who ended are in what happened."""
        self.log = []
        events = self.games.step([np.full(len(own), action) for own in self.columns])
        late, over = [], list[int]()
        if events is not None:
            late, over = list(events.late), list(events.over)
            for columns, own in zip(self.columns, events.policies, strict=True):
                for column, observation, *more in own.ends:
                    self.log.append(("end", str(columns.env_ranks[column]), observation.tolist(), *more))
            self._note_joined([own.joined for own in events.policies])
            self.begin(over)
        seats = self.seats()
        for own in self.columns:
            own.blank_idle(None)
        return [self.log, seats, late, over]

    def close(self) -> None:
        self.control.memory.close()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("debug", [False, True])
def test_the_story_of_a_game(split: bool, debug: bool) -> None:
    table = Table([ScriptedGame(3, STORY, OPENING)], split=split, debug=debug)
    assert table.log == [("join", "10, agent 'a0'"), ("join", "10, agent 'a1'")]

    def told(step: list[Any]) -> list[Any]:
        return [
            (what, who[-3:-1], *(each[:3] if isinstance(each, list) else each for each in rest))
            for what, who, *rest in step[0]
        ]

    def there(step: list[Any]) -> list[Any]:
        seats = step[1]
        order = [0, 2, 1] if split else [0, 1, 2]  # a0 and a2 have columns of their own
        return [seats[i] if seats[i] == "-" else (seats[i][0][:3], seats[i][1]) for i in order]

    step = table.step(1)
    assert told(step) == [("join", "a2")]
    assert there(step) == [([1, 1, 1], 2), ([2, 1, 1], 2), ([3, 1, 0], 0)]
    step = table.step(1)
    assert told(step) == [("end", "a0", [1, 2, 2], 3, True, False)]
    assert there(step) == ["-", ([2, 2, 2], 3), ([3, 2, 1], 3)]
    step = table.step(1)
    assert told(step) == []
    assert there(step) == ["-", ([2, 3, 3], 4), ([3, 3, 2], 4)]
    step = table.step(1)
    assert told(step) == [("end", "a1", [2, 4, 4], 5, False, True)]
    assert there(step) == ["-", "-", ([3, 4, 3], 5)]
    step = table.step(1)
    assert told(step) == [("end", "a2", [3, 5, 4], 6, False, True), ("join", "a0"), ("join", "a1")]
    assert step[3] == [0]
    assert [seat if seat == "-" else seat[0] for seat in there(step)] == [[1, 0, 0], [2, 0, 0], "-"]
    for own in table.columns:
        assert all(own.rewards[column] == 0 for column in own.idle)
        assert all(not own.observations[column].any() for column in own.idle)
    table.close()


@given(
    seed=st.integers(0, 2**20),
    ks=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    split=st.booleans(),
    odd=st.booleans(),
    shuffle=st.booleans(),
)
def test_ordinary_steps_are_as_careful_ones(seed: int, ks: list[int], split: bool, odd: bool, shuffle: bool) -> None:
    def games() -> list[Any]:
        return [Odd(k=k, shuffle=shuffle) if odd else ScriptedGame(k) for k in ks]

    fast, careful = Table(games(), split=split), Table(games(), split=split, debug=True)
    rng = np.random.default_rng(seed)
    for table in (fast, careful):
        table.begin(range(len(ks)), [seed + e for e in range(len(ks))])
    for _ in range(scaled(300, 40)):
        action = int(rng.integers(3))
        assert fast.step(action) == careful.step(action)
    fast.close()
    careful.close()


class Listing(ScriptedGame):
    """Lists agents as `lists` says for each step, and flags those in `ends`."""

    def __init__(self, lists: list[list[str]], ends: dict[int, str]) -> None:
        super().__init__(2, [{}] * (len(lists) + 1), ["a0"])
        self.lists, self.ends = lists, ends

    def step(self, actions: Any) -> Any:
        assert actions.keys() <= {"a0", "a1"}
        self.t += 1
        self.agents = self.lists[self.t - 1]
        seen = {agent: np.full(4, self.t, np.float32) for agent in self.possible_agents}
        return seen, {}, {self.ends[self.t]: True} if self.t in self.ends else {}, {}, {}


def test_who_is_flagged_when_it_is_listed_first_does_not_join_and_may_come_later() -> None:
    table = Table([Listing([["a0", "a1"], ["a0", "a1"], ["a0"], ["a0", "a1"]], {1: "a1"})])
    logs = [table.step()[0] for _ in range(4)]
    assert logs == [[], [], [], [("join", "10, agent 'a1'")]], "it joins when it was not listed in between"
    table.close()


def test_who_was_listed_after_its_end_can_come_back() -> None:
    lists = [["a0", "a1"], ["a0", "a1"], ["a0", "a1"], ["a0"], ["a0", "a1"]]
    table = Table([Listing(lists, {2: "a1"})])
    logs = [[(what, who) for what, who, *_ in table.step()[0]] for _ in lists]
    agent = "10, agent 'a1'"
    assert logs == [[("join", agent)], [("end", agent)], [], [], [("join", agent)]]
    table.close()
