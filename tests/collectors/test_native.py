"""The innermost loops have the same results in C and in Python."""

import contextlib
import signal
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.buffers.native import COMPILED, sum_episodes
from penstock.buffers.object_pipe import RECORD
from penstock.columns.stepping import PYTHON, WATCH_ALL, WATCH_UNUSUAL, step_game, step_ordinary

from ..scale import scaled

needs_compiler = pytest.mark.skipif(not COMPILED, reason="was built without a C compiler")
STEPS = [pytest.param(PYTHON["step_ordinary"], id="python"), pytest.param(step_ordinary, id="as it is")]


class Info(dict[str, Any]):
    pass


class Five(tuple[Any, ...]):
    pass


ORDINARY = [("observation", 1.0, False, False, {}), (np.zeros(2), np.float32(2), False, False, {"a": 1})]
ENDS = [("last", 1.0, True, False, {}), ("last", 2.0, False, True, {"a": 1}), (np.zeros(2), 0.0, True, True, {})]
OTHERS = [
    (0, np.array(1.0), False, False, {}),
    (0, 1, True, False, {}),
    (0, np.float32(1), False, True, {}),
    (0, 1.0, True, False, Info()),
    (0, 1.0, np.False_, False, {}),
    (0, 1.0, False, 0, {}),
    (0, 1.0, False, False, None),
    (0, 1.0, False, False, Info()),
    Five((0, 1.0, False, False, {})),
    [0, 1.0, False, False, {}],
    (0, 1.0, False, {}),
    (0, 1.0, False, False, {}, 0),
    None,
]


def new_words() -> Any:
    return memoryview(np.zeros(3, np.int64))


class Row:
    """One row of environments that return given results. Those of `into` write their observations in place."""

    def __init__(
        self, results: list[Any], columns: list[int], n_columns: int, into: frozenset[int] = frozenset()
    ) -> None:
        self.words, self.seen = new_words(), []
        self.observations: list[Any] = [None] * n_columns
        self.rewards: list[Any] = [None] * n_columns
        self.outs: Any = [f"out {column}" for column in range(n_columns)]
        self.results = [
            type(result)(result[1:]) if i in into and isinstance(result, tuple) else result
            for i, result in enumerate(results)
        ]
        self.bound: list[Any] = [
            (column, 10 + column, *(None, self._step_of(i))[:: 1 if i in into else -1])
            for i, column in enumerate(columns)
        ]
        self.actions: list[Any] = [f"action {i}" for i in range(len(columns))]
        self.cells: tuple[Any, int] = None, 0

    def _step_of(self, i: int) -> Callable[..., Any]:
        def step(*arguments: Any) -> Any:
            self.seen.append((i, *arguments, self.words[2]))
            return self.results[i]

        return step

    def run(self, step: Any, watch: int = 0, ends: Any = None) -> list[tuple[int, Any]]:
        """What was returned, up to the end of the row."""
        unusual, first = [], 0
        lists = self.observations, self.rewards, ends
        while found := step(self.words, self.bound, self.actions, self.outs, first, watch, *lists, *self.cells):
            unusual.append(found)
            first = found[0] + 1
        return unusual


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[Any], list[int], int, frozenset[int]]:
    n_columns = draw(st.integers(1, 6))
    columns = sorted(draw(st.sets(st.integers(0, n_columns - 1))))
    kinds = st.sampled_from(range(len(ORDINARY) + len(ENDS) + len(OTHERS)))
    into = draw(st.frozensets(st.integers(0, max(0, len(columns) - 1))))
    return [[*ORDINARY, *ENDS, *OTHERS][draw(kinds)] for _ in columns], columns, n_columns, into


@pytest.mark.parametrize("step", STEPS)
@given(row=rows(), watch=st.sampled_from([0, WATCH_ALL, WATCH_UNUSUAL]), has_ends=st.booleans())
def test_every_environment_is_stepped_and_what_is_not_ordinary_is_returned(
    step: Any, row: tuple[list[Any], list[int], int, frozenset[int]], watch: int, has_ends: bool
) -> None:
    (results, columns, n_columns, into), ran = row, Row(*row)
    ran.words[0] = 7
    ends = list[Any]() if has_ends else None
    unusual = ran.run(step, watch, ends)
    is_plain = [result is not None and result[-1] == {} and isinstance(result[1], float) for result in results]
    assert ran.seen == [
        (i, *([f"out {column}"] if i in into else []), f"action {i}", 10 + column) for i, column in enumerate(columns)
    ]
    assert ran.words[0] == 7
    kinds = [
        None
        if watch == WATCH_ALL or (watch == WATCH_UNUSUAL and not plain)
        else "ordinary"
        if any(result is one for one in ORDINARY)
        else "end"
        if has_ends and any(result is one for one in ENDS)
        else None
        for result, plain in zip(results, is_plain, strict=True)
    ]
    assert [i for i, _ in unusual] == [i for i, kind in enumerate(kinds) if kind is None]
    assert all(found is ran.results[i] for i, found in unusual)
    expected_ends = []
    stored: dict[int, tuple[Any, Any]] = {}
    for i, (column, result, kind) in enumerate(zip(columns, results, kinds, strict=True)):
        observation = f"out {column}" if i in into else result and result[0]
        if kind == "end":
            expected_ends.append((column, repr(observation), *result[1:4]))
        if kind is not None:
            stored[column] = (observation, result[1])
    assert [(column, repr(last), *rest) for column, last, *rest in ends or []] == expected_ends
    for column in range(n_columns):
        observation, reward = stored.get(column, (None, None))
        assert repr(ran.observations[column]) == repr(observation)
        assert ran.observations[column] is not observation or not isinstance(observation, np.ndarray)
        assert ran.rewards[column] is reward


ONE = np.arange(6.0).reshape(2, 3)
HELD: Any = ({"a": np.arange(6.0)}, 1.0, False, False, {})  # nobody else refers to the array


def address(tree: Any) -> list[int]:
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple) else [tree]
    return [part.__array_interface__["data"][0] for part in parts]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("observe", "is_new"),
    [
        (lambda: np.arange(6.0), True),
        (lambda: np.arange(6.0).reshape(2, 3), True),  # a view of what nobody else has
        (lambda: {"a": np.zeros(2), "b": np.ones(3)}, True),
        (lambda: (np.zeros(2), np.ones(3)), True),
        (lambda: ONE, False),
        (lambda: ONE[0], False),
        (lambda: ONE.T, False),
        (lambda: np.frombuffer(bytearray(16), np.float64), False),
        (lambda: {"a": np.zeros(2), "b": ONE}, False),
        (lambda: (ONE, {"a": 1.0}), False),
    ],
)
def test_an_observation_that_somebody_else_could_change_is_copied(step: Any, observe: Any, is_new: bool) -> None:
    """The compiled function copies nothing that is new."""
    row, addresses = Row([None], [0], 1), list[int]()

    def act(action: Any) -> Any:
        observation = observe()
        addresses.extend(address(observation) if is_new else [])
        return observation, 1.0, False, False, {}

    row.bound, row.outs = [(0, 10, act, None)], None
    assert not row.run(step)
    (kept,) = row.observations
    assert repr(kept) == repr(observe())
    if is_new and step is not PYTHON["step_ordinary"]:
        assert address(kept) == addresses or not COMPILED
    if not is_new:
        parts = kept.values() if isinstance(kept, dict) else kept if isinstance(kept, tuple) else [kept]
        assert not any(np.shares_memory(part, ONE) for part in parts if isinstance(part, np.ndarray))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("observation", [[0.0, 1.0], {"a": {0}}, (1.0, [2.0]), {("a", 0): 1.0}, np.array([[]], object)])
def test_a_step_with_another_observation_is_not_ordinary(step: Any, observation: Any) -> None:
    row = Row([(observation, 1.0, False, False, {})], [0], 1)
    assert row.run(step) == [(0, row.results[0])]
    assert row.observations == [None]


@pytest.mark.parametrize("step", STEPS)
def test_an_observation_of_a_result_that_is_kept_is_copied(step: Any) -> None:
    row = Row([HELD], [0], 1)
    row.outs = None
    assert not row.run(step, ends=[])
    assert row.observations[0] == {"a": pytest.approx(HELD[0]["a"])}
    assert row.observations[0] is not HELD[0]
    assert not np.shares_memory(row.observations[0]["a"], HELD[0]["a"])


@needs_compiler
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("what", "is_end"), [("number", False), ("number", True), ("odd", False), ("odd", True)])
def test_an_observation_is_written_before_the_next_environment_steps(step: Any, what: str, is_end: bool) -> None:
    """Two environments share one array. One of them has none of the usual types."""
    shared, cells, ends = np.zeros(2), np.full((3, 2, 2), 7.0), list[Any]()

    def act(column: int, action: Any) -> Any:
        shared[...] = column
        observation = [1.0, 1.0] if what == "odd" and column else shared
        return observation, 1.0, is_end, False, {}

    row = Row([None, None], [0, 1], 2)
    row.bound, row.outs, row.cells = [(b, b, partial(act, b), None) for b in range(2)], None, (cells, 1)
    unusual = row.run(step, ends=ends)
    is_odd = what == "odd"
    assert [i for i, _ in unusual] == [1] * is_odd
    assert cells.tolist() == [[[7, 7]] * 2, [[0, 0], [7, 7] if is_odd else [1, 1]], [[7, 7]] * 2]
    assert row.observations == [None, None]
    assert row.rewards == [1.0, None if is_odd else 1.0]
    assert [(b, last.tolist(), *rest) for b, last, *rest in ends] == [
        (b, [b, b], 1.0, True, False) for b in range(2 - is_odd) if is_end
    ]


@pytest.mark.parametrize("step", STEPS)
def test_without_outs_step_is_called(step: Any) -> None:
    row = Row([ORDINARY[0]], [0], 1)
    row.bound = [(0, 10, row.bound[0][2], lambda *_: 1 / 0)]
    row.outs = None
    assert row.run(step) == []
    assert row.observations == ["observation"]


@pytest.mark.parametrize("step", STEPS)
def test_an_error_of_an_environment_comes_through_and_its_env_rank_is_noted(step: Any) -> None:
    def fail(action: Any) -> Any:
        raise KeyError("no such square")

    row = Row([ORDINARY[0]] * 3, [0, 1, 2], 3)
    row.bound[1] = (1, 11, fail, None)
    with pytest.raises(KeyError, match="no such square"):
        row.run(step)
    assert [i for i, *_ in row.seen] == [0]
    assert row.words[2] == 11


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("what", "error", "message"), [("actions", ValueError, "expected 3 actions, got 2"), ("outs", IndexError, ".")]
)
def test_there_is_an_action_and_an_out_for_each(step: Any, what: str, error: type[Exception], message: str) -> None:
    row = Row([ORDINARY[0]] * 3, [0, 1, 2], 3, frozenset({0, 1, 2}))
    del getattr(row, what)[2 if what == "actions" else 0 :]
    with pytest.raises(error, match=message):
        row.run(step)
    assert not row.seen


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("what", ["bound", "actions", "observations", "rewards"])
def test_a_list_that_is_emptied_meanwhile_is_an_error(step: Any, what: str) -> None:
    row = Row([ORDINARY[0]] * 3, [0, 1, 2], 3)

    def empty(action: Any) -> Any:
        getattr(row, what).clear()
        return ("observation", 1.0, False, False, {})

    row.bound[0] = (0, 10, empty, None)
    with pytest.raises(IndexError):
        row.run(step)
    assert not row.seen


class NoTruth:
    def __bool__(self) -> bool:
        raise RuntimeError("asked")


@needs_compiler
def test_nothing_is_held_on_to() -> None:
    """Whatever the step does, there are as many references afterwards as before."""
    row = Row([None] * 2, [0, 1], 2)
    observation, reward, info, action = np.zeros(2), float("1.5"), {}, object()
    nested, odd = {"a": (observation, {"b": observation})}, {"a": (observation, {"b": observation, "c": object()})}
    answers = [(seen, reward, done, False, info) for seen in (observation, nested, odd) for done in (False, True)]
    answers.append(None)
    into_answers = [(reward, False, False, info), (reward, True, False, info), None]
    row.outs = [observation] * 2
    held = [observation, nested, odd, reward, info, action, *answers, *into_answers]
    held += [row.words, row.bound, row.observations, row.outs]

    def counts() -> list[int]:
        row.observations[:] = row.rewards[:] = [None] * 2
        return [sys.getrefcount(thing) for thing in held]

    def run(step: Any, watch: Any = 0, ends: Any = None, step_into: Any = None) -> None:
        row.bound[:] = [(0, 10, step, step_into), (1, 11, step, step_into)]
        row.actions[:] = [action] * 2
        with contextlib.suppress(ZeroDivisionError, IndexError, TypeError, RuntimeError):
            row.run(step_ordinary, watch, ends)
        row.bound.clear()
        row.actions.clear()

    def once() -> None:
        for answer in answers:
            run(lambda action, answer=answer: answer)
            run(lambda action, answer=answer: answer, watch=WATCH_ALL)
            run(lambda action, answer=answer: answer, ends=[])
            run(lambda action, answer=answer: answer, ends=())
        for answer in into_answers:
            for ends in (None, [], ()):
                run(None, step_into=lambda out, action, answer=answer: answer, ends=ends)
        run(None, step_into=lambda out, action: 1 / 0)
        run(lambda action: 1 / 0)
        run(None)
        run(lambda action: answers[0], watch=NoTruth())

    once()
    before = counts()
    for _ in range(20):
        once()
    assert counts() == before


@pytest.mark.slow
@needs_compiler
def test_signals_are_looked_at_even_if_no_step_is_in_python() -> None:
    def handle(*_: Any) -> None:
        raise InterruptedError

    n = scaled(500_000, 200_000)
    bound = [(0, i, {0: ORDINARY[0]}.get, None) for i in range(n)]
    words, actions = new_words(), [0] * n
    before = signal.signal(signal.SIGALRM, handle)
    try:
        with pytest.raises(InterruptedError):
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            step_ordinary(words, bound, actions, None, 0, False, [None], [None], None, None, 0)
        assert words[2] < n - 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@needs_compiler
@pytest.mark.parametrize(
    ("i", "wrong", "error"),
    [
        (0, np.zeros(1, np.int32), "array of int64"),
        (0, np.zeros(1, "M8[s]"), "buffer"),
        (0, np.zeros(4, np.int64)[::2], "contiguous"),
        (0, np.frombuffer(bytes(8), np.int64), "read-only"),
        (0, None, "bytes-like"),
        (1, ((0, 0, print, None),), "must be lists"),
        (1, [0], "list of .column, env_rank, env.step, env.step_into."),
        (1, [(None, 0, print, None)], "NoneType"),
        (1, [(0, None, print, None)], "NoneType"),
        (1, [(0, 0, None, None)], "not callable"),
        (1, [(-1, 0, None, print)], "no entry for column -1"),
        (2, (0,), "must be lists"),
        (3, (None,), "must be lists"),
        (4, None, "NoneType"),
        (4, -1, "no environment -1"),
        (6, (None,), "must be lists"),
        (7, None, "must be lists"),
        (10, None, "NoneType"),
    ],
)
def test_arguments_that_cannot_be_used_are_an_error(i: int, wrong: Any, error: str) -> None:
    bound = [(0, 0, lambda action: ORDINARY[0], None)]
    arguments: list[Any] = [new_words(), bound, [0], [None], 0, False, [None], [None], None, None, 0]
    assert step_ordinary(*arguments) is None  # type: ignore[call-arg]
    arguments[i] = wrong
    with pytest.raises((TypeError, IndexError, ValueError), match=error):
        step_ordinary(*arguments)  # type: ignore[call-arg]


@needs_compiler
def test_sums_that_cannot_be_made_change_nothing() -> None:
    reward, done, running = np.ones((3, 2), np.float32), np.ones((3, 2), np.bool_), np.zeros((2, 5))
    room, ranks = np.zeros(6, RECORD).view(np.uint8)[np.newaxis], np.array([[0, 1]])
    valid = np.ones((3, 2), np.bool_)
    for arguments in (
        (reward.astype(np.float64), done, None, running, room, 0, ranks),
        (reward[0], done, None, running, room, 0, ranks),
        (reward, done[:2], None, running, room, 0, ranks),
        (reward, done, valid[:2], running, room, 0, ranks),
        (reward, done, None, running[:1], room, 0, ranks),
        (reward, done, None, running[:, :4], room, 0, ranks),
        (reward, done, None, np.zeros((5, 2)).T, room, 0, ranks),
        (reward, done, None, running, room[:, :-1], 0, ranks),
        (reward, done, None, running, room[0], 0, ranks),
        (reward, done, None, running, np.zeros(6 * RECORD.itemsize + 8, np.uint8)[np.newaxis, 4:], 0, ranks),
        (None, done, None, running, room, 0, ranks),
        (reward, done, None, running, room, 0, ranks[0]),
        (reward, done, None, running, room, 0, ranks.astype(np.int32)),
    ):
        assert sum_episodes(*arguments, 1.0) == -1
    assert sum_episodes(reward, done, valid, running, room, 0, ranks, 1.0) == 6


GAMES = [pytest.param(PYTHON["step_game"], id="python"), pytest.param(step_game, id="as it is")]
LIVING = ["a", "b"]
SEEN, GAINED, NO = {"a": "seen by a", "b": "seen by b"}, {"a": 1.0, "b": 2.0}, {"a": False, "b": False}


class Game:
    """A game whose step has a given result."""

    def __init__(self, changed: dict[str, Any]) -> None:
        step = {"observations": SEEN, "rewards": GAINED, "terminated": NO, "truncated": NO, "infos": {}} | changed
        self.agents = step.pop("listed", LIVING)
        self.result: Any = tuple(step.values())

    def step(self, given: Any) -> Any:
        assert given == "actions"
        return self.result


def play(step_game: Any, game: Game, observations: list[Any], rewards: list[Any], first: int) -> bool:
    """Step the game. Returns whether its result was stored."""
    is_stored, result = step_game(game.step, "actions", LIVING, game, observations, rewards, first)
    assert result is game.result
    return bool(is_stored)


@pytest.mark.parametrize("step_game", GAMES)
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"rewards": defaultdict(int, GAINED)},
        {"terminated": {"a": np.False_, "b": False}},
        {"listed": ["".join("a"), "b"]},
    ],
)
def test_a_game_that_goes_on_is_stored(step_game: Any, changed: dict[str, Any]) -> None:
    observations: list[Any] = [None] * 4
    rewards = [0.0] * 4
    assert play(step_game, Game(changed), observations, rewards, 1)
    assert observations == [None, "seen by a", "seen by b", None]
    assert rewards == [0.0, 1.0, 2.0, 0.0]
    for first in (-1, 3):
        with pytest.raises(IndexError, match="columns"):
            play(step_game, Game(changed), observations, rewards, first)


@pytest.mark.parametrize("step_game", GAMES)
@pytest.mark.parametrize(
    "changed",
    [
        {"observations": dict(reversed(SEEN.items()))},  # another order: each value belongs to another column
        {"observations": {"a": 0}},
        {"observations": {"a": 0, "b": [0]}},
        {"rewards": {**GAINED, "c": 3.0}},
        {"rewards": {**GAINED, "b": np.array(3.0)}},
        {"rewards": [1.0, 2.0]},
        {"terminated": {"a": False, "b": True}},
        {"terminated": {"a": False, "b": np.array([False])}},
        {"truncated": {"a": False, "b": np.True_}},
        {"truncated": {"a": False}},
        {"infos": None},
        {"listed": ["a"]},
        {"listed": ["a", "c"]},
        {"listed": ("a", "b")},
    ],
)
def test_any_other_step_of_a_game_is_left_to_the_caller(step_game: Any, changed: dict[str, Any]) -> None:
    game, observations, rewards = Game(changed), [None] * 4, [0.0] * 4
    assert not play(step_game, game, observations, rewards, 1)
    game.result = list(game.result)
    assert not play(step_game, game, observations, rewards, 1)
    assert (observations, rewards) == ([None] * 4, [0.0] * 4)


@pytest.mark.parametrize("step_game", GAMES)
def test_games_that_share_an_observation_get_their_own(step_game: Any) -> None:
    observations: list[Any] = [None] * 2
    assert play(step_game, Game({"observations": {"a": ONE, "b": {"view": ONE[0]}}}), observations, [0.0] * 2, 0)
    assert np.array_equal(observations[0], ONE)
    assert np.array_equal(observations[1]["view"], ONE[0])
    assert not any(np.shares_memory(own, ONE) for own in (observations[0], observations[1]["view"]))


@needs_compiler
def test_a_game_holds_on_to_nothing() -> None:
    seen, reward = np.zeros(2), float("1.5")
    observations: list[Any] = [None] * 2
    rewards: list[Any] = [None] * 2
    game, before = Game({"observations": {"a": seen, "b": seen}, "rewards": {"a": reward, "b": reward}}), None
    odd = Game({"observations": {"a": seen, "b": [seen]}})
    for _ in range(10):
        assert play(step_game, game, observations, rewards, 0)
        assert not play(step_game, odd, observations, rewards, 0)
        observations[:] = rewards[:] = [None, None]
        counts = [sys.getrefcount(each) for each in (seen, reward, game.result, odd.result)]
        assert counts == (before := before or counts)
