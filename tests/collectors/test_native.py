"""The innermost loops have the same results in C and in Python."""

import contextlib
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.buffers import native
from penstock.buffers.native import COMPILED, PYTHON, step_ordinary, sum_episodes
from penstock.buffers.results import RECORD

needs_compiler = pytest.mark.skipif(not COMPILED, reason="was built without a C compiler")
STEPS = [pytest.param(PYTHON["step_ordinary"], id="python"), pytest.param(step_ordinary, id="as it is")]


class Info(dict[str, Any]):
    pass


class Five(tuple[Any, ...]):
    pass


ORDINARY = [("observation", 1.0, False, False, {}), (np.zeros(2), np.float32(2), False, False, {"a": 1})]
OTHERS = [
    (0, 1.0, True, False, {}),
    (0, 1.0, False, True, {}),
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


def new_word() -> Any:
    return np.zeros(1, np.int64)


class Row:
    """One row of environments that return given results."""

    def __init__(self, results: list[Any], columns: list[int], n_columns: int) -> None:
        self.word, self.seen = new_word(), []
        self.observations: list[Any] = [None] * n_columns
        self.rewards: list[Any] = [None] * n_columns
        self._results = results
        self.bound = [(column, 10 + column, self._step_of(i)) for i, column in enumerate(columns)]
        self.actions: list[Any] = [f"action {i}" for i in range(len(columns))]

    def _step_of(self, i: int) -> Callable[[Any], Any]:
        def step(action: Any) -> Any:
            self.seen.append((i, action, self.word[0]))
            return self._results[i]

        return step

    def run(self, step: Any, is_watched: bool = False) -> list[tuple[int, Any]]:
        """What was handed back, up to the end of the row."""
        unusual, first = [], 0
        while found := step(self.word, self.bound, self.actions, first, is_watched, self.observations, self.rewards):
            unusual.append(found)
            first = found[0] + 1
        return unusual


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[Any], list[int], int]:
    n_columns = draw(st.integers(1, 6))
    columns = sorted(draw(st.sets(st.integers(0, n_columns - 1))))
    kinds = st.sampled_from(range(len(ORDINARY) + len(OTHERS)))
    return [[*ORDINARY, *OTHERS][draw(kinds)] for _ in columns], columns, n_columns


@pytest.mark.parametrize("step", STEPS)
@given(row=rows(), is_watched=st.booleans())
def test_every_environment_is_stepped_and_what_is_not_ordinary_handed_back(
    step: Any, row: tuple[list[Any], list[int], int], is_watched: bool
) -> None:
    results, columns, n_columns = row
    ran = Row(*row)
    unusual = ran.run(step, is_watched)
    assert ran.seen == [(i, f"action {i}", 10 + column) for i, column in enumerate(columns)]
    is_ordinary = [not is_watched and any(result is one for one in ORDINARY) for result in results]
    assert [i for i, _ in unusual] == [i for i, ordinary in enumerate(is_ordinary) if not ordinary]
    assert all(found is results[i] for i, found in unusual)
    stored = {
        column: result for column, result, ordinary in zip(columns, results, is_ordinary, strict=True) if ordinary
    }
    for column in range(n_columns):
        assert ran.observations[column] is (stored[column][0] if column in stored else None)
        assert ran.rewards[column] is (stored[column][1] if column in stored else None)


@pytest.mark.parametrize("step", STEPS)
def test_an_error_of_an_environment_comes_through_and_its_env_rank_is_noted(step: Any) -> None:
    def fail(action: Any) -> Any:
        raise KeyError("no such square")

    row = Row([ORDINARY[0]] * 3, [0, 1, 2], 3)
    row.bound[1] = (1, 11, fail)
    with pytest.raises(KeyError, match="no such square"):
        row.run(step)
    assert [i for i, *_ in row.seen] == [0]
    assert row.word[0] == 11


@pytest.mark.parametrize("step", STEPS)
def test_there_is_an_action_for_each(step: Any) -> None:
    row = Row([ORDINARY[0]] * 3, [0, 1, 2], 3)
    row.actions.pop()
    with pytest.raises(ValueError, match="expected 3 actions, got 2"):
        row.run(step)
    assert not row.seen


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("what", ["bound", "actions", "observations", "rewards"])
def test_a_list_that_is_emptied_meanwhile_is_an_error(step: Any, what: str) -> None:
    row = Row([ORDINARY[0]] * 3, [0, 1, 2], 3)

    def empty(action: Any) -> Any:
        getattr(row, what).clear()
        return ("observation", 1.0, False, False, {})

    row.bound[0] = (0, 10, empty)
    with pytest.raises(IndexError):
        row.run(step)
    assert not row.seen


@needs_compiler
def test_an_index_may_empty_the_lists() -> None:
    class Index:
        def __index__(self) -> int:
            row.bound.clear()
            row.actions.clear()
            return 0

    row = Row([ORDINARY[0]] * 2, [0, 1], 2)
    row.bound[0] = (Index(), 10, lambda action: (action, 1.0, False, False, {}))  # type: ignore[assignment]
    with pytest.raises(IndexError, match="shorter"):
        row.run(step_ordinary)
    assert row.observations[0] == "action 0"


class NoTruth:
    def __bool__(self) -> bool:
        raise RuntimeError("asked")


@needs_compiler
def test_nothing_is_held_on_to() -> None:
    """Whatever the step does, there are as many references afterwards as before."""
    row = Row([], [0, 1], 2)
    observation, reward, info, action = object(), float("1.5"), {}, object()
    answers = [(observation, reward, False, False, info), (observation, reward, True, False, info), None]
    held = [observation, reward, info, action, *answers, row.word, row.bound, row.observations]

    def counts() -> list[int]:
        row.observations[:] = row.rewards[:] = [None] * 2
        return [sys.getrefcount(thing) for thing in held]

    def run(step: Any, is_watched: Any = False) -> None:
        row.bound[:] = [(0, 10, step), (1, 11, step)]
        row.actions[:] = [action] * 2
        with contextlib.suppress(ZeroDivisionError, IndexError, TypeError, RuntimeError):
            row.run(step_ordinary, is_watched)
        row.bound.clear()
        row.actions.clear()

    def once() -> None:
        for answer in answers:
            run(lambda action, answer=answer: answer)
            run(lambda action, answer=answer: answer, is_watched=True)
        run(lambda action: 1 / 0)
        run(None)
        run(lambda action: answers[0], is_watched=NoTruth())

    once()
    before = counts()
    for _ in range(20):
        once()
    assert counts() == before


@needs_compiler
def test_signals_are_looked_at_even_if_no_step_is_in_python() -> None:
    def handle(*_: Any) -> None:
        raise InterruptedError

    n = 500_000
    bound = [(0, i, {0: ORDINARY[0]}.get) for i in range(n)]
    word, actions = new_word(), [0] * n
    before = signal.signal(signal.SIGALRM, handle)
    try:
        with pytest.raises(InterruptedError):
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            step_ordinary(word, bound, actions, 0, False, [None], [None])
        assert word[0] < n - 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@needs_compiler
@pytest.mark.parametrize(
    ("i", "wrong", "error"),
    [
        (0, np.zeros(1), "int64 array of one word"),
        (0, np.zeros(1, np.int32), "int64 array of one word"),
        (0, np.zeros((1, 2), np.int64), "int64 array of one word"),
        (0, np.zeros(0, np.int64), "int64 array of one word"),
        (0, np.frombuffer(bytes(8), np.int64), "int64 array of one word"),
        (0, memoryview(np.zeros(1, np.int64)), "int64 array of one word"),
        (0, None, "int64 array of one word"),
        (1, ((0, 0, print),), "must be lists"),
        (1, [0], "list of .column, env_rank, env.step."),
        (1, [(0, 0)], "list of .column, env_rank, env.step."),
        (1, [(None, 0, print)], "NoneType"),
        (1, [(0, None, print)], "NoneType"),
        (1, [(0, 0, None)], "not callable"),
        (2, (0,), "must be lists"),
        (3, None, "NoneType"),
        (3, -1, "no environment -1"),
        (5, (None,), "must be lists"),
        (6, None, "must be lists"),
    ],
)
def test_arguments_that_cannot_be_used_are_an_error(i: int, wrong: Any, error: str) -> None:
    arguments: list[Any] = [new_word(), [(0, 0, lambda action: ORDINARY[0])], [0], 0, False, [None], [None]]
    assert step_ordinary(*arguments) is None  # type: ignore[call-arg]
    arguments[i] = wrong
    with pytest.raises((TypeError, IndexError), match=error):
        step_ordinary(*arguments)  # type: ignore[call-arg]


@needs_compiler
@pytest.mark.parametrize("name", PYTHON)
def test_too_few_arguments_are_an_error(name: str) -> None:
    with pytest.raises(TypeError, match=r"expected . arguments, got 1"):
        getattr(native, name)(None)


@needs_compiler
def test_sums_that_cannot_be_made_change_nothing() -> None:
    reward, done, running = np.ones((3, 2), np.float32), np.ones((3, 2), np.bool_), np.zeros((2, 5))
    room = np.zeros(6, RECORD).view(np.uint8)[np.newaxis]
    for arguments in (
        (reward.astype(np.float64), done, running, room),
        (reward[0], done, running, room),
        (reward, done.astype(np.uint8), running, room),
        (reward, done[:2], running, room),
        (reward, done[:, :1], running, room),
        (reward, done, running[:1], room),
        (reward, done, running[:, :4], room),
        (reward, done, np.zeros((5, 2)).T, room),
        (reward, done, running, room[:, :-1]),
        (reward, done, running, room[0]),
        (reward, done, running, np.zeros(6 * RECORD.itemsize + 8, np.uint8)[np.newaxis, 4:]),
        (None, done, running, room),
        (reward, done, running, None),
    ):
        assert sum_episodes(*arguments, 0, 0, 1.0) == -1
    assert not running.any()
    assert sum_episodes(reward, done, running, room, 0, 0, 1.0) == 6
