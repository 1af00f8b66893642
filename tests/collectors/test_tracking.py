"""Trackers: a run has the same trajectories as a plain loop, however batches and workers divide it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.buffers import NamedArrays
from penstock.buffers.native import COMPILED, PYTHON
from penstock.collectors import TrajInfo, make_tracker, tracking
from penstock.collectors.tracking import BatchTracker, ObjectTracker

from ..scale import examples, pairs, quick_first

quick = examples(20, 80)
FIRST_RANK = 40  # columns are not environments


@dataclass
class Run:
    """A made-up run: rewards and dones `[T, B]`, what was stepped before it, and where batches end."""

    reward: Any
    done: Any
    before: list[list[float]]
    bounds: list[int]
    discount: float
    compiled: bool = COMPILED  #: whether the compiled sums are used, where there are any

    @property
    def batches(self) -> list[tuple[int, int]]:
        return [*pairwise(self.bounds)]


@st.composite
def runs(draw: Any) -> Run:
    shape = draw(st.integers(1, 25)), draw(st.integers(1, 4))
    # Small whole numbers make zeros and exact sums; the others rounding.
    numbers = draw(st.sampled_from([st.integers(-2, 2).map(float), st.floats(-1000, 1000, width=32)]))
    done = draw(st.sampled_from([st.booleans(), st.integers(0, 7).map(lambda i: i == 0), st.just(True)]))
    cuts = draw(st.sets(st.integers(1, shape[0])))
    return Run(
        reward=draw(hnp.arrays(np.float32, shape, elements=numbers)),
        done=draw(hnp.arrays(np.bool_, shape, elements=done)),
        before=[draw(st.lists(numbers, max_size=4)) for _ in range(shape[1])],
        bounds=sorted({0, shape[0], *cuts}),
        discount=draw(st.sampled_from([1.0, 0.9])),
        compiled=draw(st.booleans()),
    )


def plain_loop(run: Run, times_of: str) -> list[tuple[Any, ...]]:
    """(batch, t, env_rank, four figures) of every finished trajectory, by stepping one TrajInfo after another."""
    found = []
    for column in range(run.reward.shape[1]):
        info = TrajInfo(run.discount)
        for reward in run.before[column]:
            info.step(None, None, reward, False, False, None, {})
        for batch, (start, stop) in enumerate(run.batches):
            for t in range(start, stop):
                info.step(None, None, float(run.reward[t, column]), False, False, None, {})
                if run.done[t, column]:
                    at = t - start if times_of == "batch" else t
                    figures = (info.Length, info.Return, info.NonzeroRewards, info.DiscountedReturn)
                    found.append((batch, at, FIRST_RANK + column, *figures))
                    info = TrajInfo(run.discount)
    return sorted(found)


@contextmanager
def sums(*, compiled: bool) -> Iterator[None]:
    """Trackers use the compiled sums, where there are any, or numpy's."""
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(tracking, "sum_episodes", PYTHON["sum_episodes"])
        yield


def batch_tracker(run: Run, columns: range, times_of: str = "batch") -> list[tuple[Any, ...]]:
    """The same of some columns by a BatchTracker."""
    handed_over: list[Any] = []
    ranks = range(FIRST_RANK + columns.start, FIRST_RANK + columns.stop)
    with sums(compiled=run.compiled):
        tracker = BatchTracker(ranks, handed_over.append, run.discount)
        for own, column in enumerate(columns):
            tracker.preload(own, run.before[column])
        found = []
        for batch, (start, stop) in enumerate(run.batches):
            rows = slice(start, stop), slice(columns.start, columns.stop)
            n = tracker.end_rows(run.reward[rows], run.done[rows], start if times_of == "run" else 0)
            assert n == sum(map(len, handed_over)) == run.done[rows].sum()
            found += [(batch, *record) for records in handed_over for record in records.tolist()]
            handed_over.clear()
    return sorted(found)


# ---- BatchTracker ------------------------------------------------------------------------------


@quick
@given(runs())
def test_records_are_those_of_the_plain_loop_however_the_run_is_cut(run: Run) -> None:
    assert repr(batch_tracker(run, range(run.reward.shape[1]))) == repr(plain_loop(run, times_of="batch"))


@quick
@given(runs())
def test_times_count_from_the_first_row_given(run: Run) -> None:
    assert repr(batch_tracker(run, range(run.reward.shape[1]), "run")) == repr(plain_loop(run, times_of="run"))


@quick
@given(runs(), st.data())
def test_records_are_the_same_bit_for_bit_however_the_columns_are_split(run: Run, data: Any) -> None:
    n = run.reward.shape[1]
    bounds = sorted({0, n, *data.draw(st.sets(st.integers(0, n)))})
    parts = [batch_tracker(run, range(a, b)) for a, b in pairwise(bounds)]
    assert sorted(record for part in parts for record in part) == batch_tracker(run, range(n))


@pytest.mark.parametrize(("width", "compiled"), quick_first(pairs([3, 1, 2, 7, 16], [True, False]), 2))
def test_long_runs_too_are_the_same_bit_for_bit_however_the_columns_are_split(width: int, compiled: bool) -> None:
    rng = np.random.default_rng(0)
    shape = 500, 16
    rewards, dones = rng.normal(size=shape).astype(np.float32), rng.random(shape) < 0.02
    run = Run(rewards, dones, [[]] * 16, [0, 123, 400, 500], 0.99, compiled)
    parts = [batch_tracker(run, range(a, min(16, a + width))) for a in range(0, 16, width)]
    whole = batch_tracker(run, range(16))
    assert sorted(record for part in parts for record in part) == whole
    assert repr(whole) == repr(plain_loop(run, "batch"))


def lengths_and_returns(records: list[Any]) -> list[tuple[int, int, float]]:
    return [(int(r["env_rank"]), int(r["Length"]), float(r["Return"])) for part in records for r in part]


def half_way(**options: Any) -> tuple[BatchTracker, list[Any]]:
    """A tracker of three columns that have made two steps of reward 1 each."""
    handed_over: list[Any] = []
    tracker = BatchTracker(range(3), handed_over.append, **options)
    assert tracker.end_rows(np.ones((2, 3), np.float32), np.zeros((2, 3), bool)) == 0
    return tracker, handed_over


def finish(tracker: Any) -> None:
    tracker.end_rows(np.ones((1, 3), np.float32), np.ones((1, 3), bool))


def test_nothing_is_handed_over_where_nothing_has_finished() -> None:
    assert half_way()[1] == []


def test_restart_drops_what_is_running_everywhere() -> None:
    tracker, handed_over = half_way()
    tracker.restart()
    finish(tracker)
    assert lengths_and_returns(handed_over) == [(0, 1, 1.0), (1, 1, 1.0), (2, 1, 1.0)]


def test_drop_drops_what_is_running_in_one_column() -> None:
    tracker, handed_over = half_way()
    tracker.drop(1)
    finish(tracker)
    assert lengths_and_returns(handed_over) == [(0, 3, 3.0), (1, 1, 1.0), (2, 3, 3.0)]


def test_a_preload_replaces_what_is_running_in_one_column() -> None:
    tracker, handed_over = half_way()
    tracker.preload(1, [5.0])
    finish(tracker)
    assert lengths_and_returns(handed_over) == [(0, 3, 3.0), (1, 2, 6.0), (2, 3, 3.0)]


@pytest.mark.parametrize("reward", [np.inf, np.nan], ids=str)
def test_a_reward_that_is_not_finite_stays_in_its_own_trajectory(reward: float) -> None:
    run = Run(np.ones((4, 2), np.float32), np.ones((4, 2), bool), [[], []], [0, 4], 0.9)
    run.reward[1, 0] = reward
    strange = [r for r in batch_tracker(run, range(2)) if not np.isfinite(r[4])]
    assert [r[1:3] for r in strange] == [(1, FIRST_RANK)]


@pytest.mark.parametrize("compiled", [True, False])
def test_nor_does_it_live_on_in_the_one_that_begins_with_the_next_batch(compiled: bool) -> None:
    run = Run(np.ones((4, 1), np.float32), np.zeros((4, 1), bool), [[]], [0, 2, 4], 0.5, compiled)
    run.reward[1], run.done[1], run.done[3] = np.inf, True, True
    _, second = batch_tracker(run, range(1))
    assert second[3:] == (2, 2.0, 2, 1.5)


def test_columns_of_other_environments_than_neighbours_are_named_right() -> None:
    handed_over: list[Any] = []
    tracker = BatchTracker(range(3, 9, 3), handed_over.append)
    tracker.end_rows(np.ones((1, 2), np.float32), np.ones((1, 2), np.bool_))
    tracker.end_rows(np.zeros((1, 2), np.float32), np.ones((1, 2), np.bool_))
    assert [records["env_rank"].tolist() for records in handed_over] == [[3, 6]] * 2
    assert [records["Return"].tolist() for records in handed_over] == [[1, 1], [0, 0]]  # each is its own


@pytest.mark.parametrize("compiled", [True, False])
def test_cells_that_are_not_valid_belong_to_no_trajectory(compiled: bool) -> None:
    rng, shape, handed_over = np.random.default_rng(0), (60, 3), list[Any]()
    reward, valid = rng.normal(size=shape).astype(np.float32), rng.random(shape) < 0.6
    done = valid & (rng.random(shape) < 0.2)
    with sums(compiled=compiled):
        BatchTracker(range(3), handed_over.append, 0.9).end_rows(reward, done, 0, valid)
    expected = []
    for column in range(3):
        info = TrajInfo(0.9)
        for t in np.flatnonzero(valid[:, column]):
            info.step(None, None, float(reward[t, column]), False, False, None, {})
            if done[t, column]:
                expected.append((t, column, info.Length, info.Return, info.NonzeroRewards, info.DiscountedReturn))
                info = TrajInfo(0.9)
    assert sorted(record for records in handed_over for record in records.tolist()) == sorted(expected)


# ---- ObjectTracker -----------------------------------------------------------------------------


class Full(TrajInfo):
    """Logs all arguments."""

    def __init__(self, discount: float = 1.0) -> None:
        super().__init__(discount)
        self.log: list[Any] = []
        self.final: Any = None

    def step(self, observation: Any, action: Any, reward: float, *rest: Any) -> None:
        super().step(observation, action, reward, *rest)
        self.log.append((observation, action, reward, *rest))

    def terminate(self, final_observation: Any) -> None:
        self.final = final_observation


def object_tracker(run: Run, cls: type[TrajInfo] = Full) -> list[tuple[Any, ...]]:
    """(batch, t, env_rank, attributes) of every finished trajectory by an ObjectTracker."""
    n = run.reward.shape[1]
    handed_over: list[Any] = []
    ranks = range(FIRST_RANK, FIRST_RANK + n)
    tracker = make_tracker(cls, {"discount": run.discount}, ranks, pytest.fail, handed_over.extend)
    for column, rewards in enumerate(run.before):
        for reward in rewards:
            tracker.set_agent_info(np.full(n, -1))
            tracker.on_step(column, None, None, reward, False, False, {})
        tracker.preload(column, rewards)
    found, agent_info = [], NamedArrays(value=np.zeros((n, 1)))  # as rows of a batch, it is written again
    for batch, (start, stop) in enumerate(run.batches):
        for t in range(start, stop):
            agent_info.value[:, 0] = np.arange(n) + 100 * t
            tracker.set_agent_info(agent_info)
            for column in range(n):
                done = bool(run.done[t, column])
                tracker.on_step(column, (t, column), t % 3, float(run.reward[t, column]), done, False, {"t": t})
                if done:
                    tracker.on_episode_end(t - start, column, f"end {t}")
        n_done = tracker.end_rows(run.reward[start:stop], run.done[start:stop])
        assert n_done == len(handed_over)
        found += [(batch, *message[1:]) for message in handed_over]
        handed_over.clear()
    return sorted(found, key=lambda message: message[:3])


@quick
@given(runs())
def test_objects_have_the_figures_of_the_plain_loop(run: Run) -> None:
    names = ("Length", "Return", "NonzeroRewards", "DiscountedReturn")
    found = [(*message[:3], *(message[3][name] for name in names)) for message in object_tracker(run)]
    assert repr(found) == repr(plain_loop(run, times_of="batch"))


@quick
@given(runs())
def test_objects_are_told_every_step_of_their_own_column_and_the_end(run: Run) -> None:
    run.before = [[] for _ in run.before]
    messages = object_tracker(run)
    for column in range(run.reward.shape[1]):
        own = [(run.bounds[batch] + t, info) for batch, t, rank, info in messages if rank == FIRST_RANK + column]
        assert [t for t, _ in own] == np.flatnonzero(run.done[:, column]).tolist()
        begin = 0
        for end, info in own:
            assert info["final"] == f"end {end}"
            for t, (observation, action, reward, terminated, truncated, agent_info, env_info) in zip(
                range(begin, end + 1), info["log"], strict=True
            ):
                assert (observation, action, reward) == ((t, column), t % 3, run.reward[t, column])
                assert (terminated, truncated, env_info) == (t == end, False, {"t": t})
                assert agent_info.value.tolist() == [column + 100 * t]
            begin = end + 1


@pytest.mark.parametrize("forget", ["restart", "drop"])
def test_objects_begin_anew_after(forget: str) -> None:
    messages: list[Any] = []
    tracker = ObjectTracker(Full, {}, range(2), messages.extend)
    tracker.set_agent_info(np.zeros(2))
    for column in range(2):
        tracker.on_step(column, None, None, 1.0, False, False, {})
    if forget == "restart":
        tracker.restart()
    else:
        tracker.drop(1)
    for column in range(2):
        tracker.on_episode_end(0, column, None)
    tracker.end_rows(np.zeros((1, 2)), np.ones((1, 2), bool))
    assert [info["Length"] for *_, info in messages] == ([0, 0] if forget == "restart" else [1, 0])


def test_an_object_is_handed_over_once() -> None:
    messages: list[Any] = []
    tracker = ObjectTracker(Full, {}, range(1), messages.extend)
    tracker.on_episode_end(0, 0, None)
    rows = np.zeros((1, 1)), np.ones((1, 1), bool)
    assert [tracker.end_rows(*rows), tracker.end_rows(*rows)] == [1, 0]
    assert len(messages) == 1


# ---- make_tracker ------------------------------------------------------------------------------


def test_the_stock_class_is_tracked_by_batch_with_its_keyword_arguments() -> None:
    records: list[Any] = []
    tracker = make_tracker(TrajInfo, {"discount": 0.5}, range(1), records.append, pytest.fail)
    assert tracker.on_step is None
    tracker.end_rows(np.ones((3, 1), np.float32), np.array([[False], [False], [True]]))
    assert records[0]["DiscountedReturn"].tolist() == [1.75]


@pytest.mark.parametrize("cls", [Full, type("Renamed", (TrajInfo,), {})])
def test_a_subclass_is_stepped_even_if_it_overrides_nothing(cls: type[TrajInfo]) -> None:
    messages: list[Any] = []
    tracker = make_tracker(cls, {"discount": 0.5}, range(1), pytest.fail, messages.extend)
    tracker.set_agent_info(np.zeros(1))
    for _ in range(3):
        tracker.on_step(0, None, None, 1.0, False, False, {})
    tracker.on_episode_end(2, 0, None)
    tracker.end_rows(np.ones((3, 1), np.float32), np.array([[False], [False], [True]]))
    ((_, t, env_rank, attributes),) = messages
    assert (t, env_rank, attributes["DiscountedReturn"]) == (2, 0, 1.75)
