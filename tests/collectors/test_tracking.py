"""TrajInfo, and trackers: a run has the same trajectories as a plain loop, however batches and workers divide it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock import RandomAgent, SerialSampler
from penstock.buffers.native import COMPILED, PYTHON
from penstock.collectors import TrajInfo, tracking
from penstock.collectors.tracking import BatchTracker, ObjectTracker
from penstock.envs import CountingEnv
from penstock.errors import ConfigError

from ..scale import examples
from ..support import Diary

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


def batch_tracker(run: Run, times_of: str = "batch") -> list[tuple[Any, ...]]:
    """The same by a BatchTracker."""
    handed_over: list[Any] = []
    with sums(compiled=run.compiled):
        tracker = BatchTracker(range(FIRST_RANK, FIRST_RANK + run.reward.shape[1]), handed_over.append, run.discount)
        for column, rewards in enumerate(run.before):
            tracker.preload(column, rewards)
        found = []
        for batch, (start, stop) in enumerate(run.batches):
            rows = slice(start, stop)
            n = tracker.end_rows(run.reward[rows], run.done[rows], start if times_of == "run" else 0)
            assert n == sum(map(len, handed_over)) == run.done[rows].sum()
            found += [(batch, *record) for records in handed_over for record in records.tolist()]
            handed_over.clear()
    return sorted(found)


# ---- BatchTracker ------------------------------------------------------------------------------


@pytest.mark.parametrize("times_of", ["batch", "run"])
@quick
@given(runs())
def test_records_are_those_of_the_plain_loop_however_the_run_is_cut(times_of: str, run: Run) -> None:
    assert repr(batch_tracker(run, times_of)) == repr(plain_loop(run, times_of))


both_sums = pytest.mark.parametrize("compiled", [True, False])


@both_sums
def test_a_reward_that_is_not_finite_stays_in_its_own_trajectory(compiled: bool) -> None:
    run = Run(np.ones((8, 2), np.float32), np.zeros((8, 2), bool), [[], []], [0, 2, 6, 8], 0.5, compiled)
    run.done[[1, 3, 4, 7]] = True
    run.reward[1, 0], run.reward[4, 1] = np.inf, np.nan
    found = batch_tracker(run)
    assert repr(found) == repr(plain_loop(run, "batch"))
    assert sum(not np.isfinite(record[4]) for record in found) == 2


@pytest.mark.parametrize(
    ("call", "lengths", "returns"),
    [
        (lambda tracker: tracker.restart(), [1, 1, 1], [1, 1, 1]),
        (lambda tracker: tracker.drop(1), [3, 1, 3], [3, 1, 3]),
        (lambda tracker: tracker.preload(1, [5.0]), [3, 2, 3], [3, 6, 3]),
    ],
    ids=["restart", "drop", "preload"],
)
def test_what_is_running_is_dropped_everywhere_or_in_one_column(call: Any, lengths: Any, returns: Any) -> None:
    handed_over: list[Any] = []
    tracker = BatchTracker(range(3), handed_over.append)
    assert tracker.end_rows(np.ones((2, 3), np.float32), np.zeros((2, 3), bool)) == 0
    assert handed_over == []
    call(tracker)
    tracker.end_rows(np.ones((1, 3), np.float32), np.ones((1, 3), bool))
    (records,) = handed_over
    assert records["env_rank"].tolist() == [0, 1, 2]
    assert (records["Length"].tolist(), records["Return"].tolist()) == (lengths, returns)


def test_columns_of_other_environments_than_neighbours_are_named_right() -> None:
    handed_over: list[Any] = []
    tracker = BatchTracker(range(3, 9, 3), handed_over.append)
    tracker.end_rows(np.ones((1, 2), np.float32), np.ones((1, 2), np.bool_))
    tracker.end_rows(np.zeros((1, 2), np.float32), np.ones((1, 2), np.bool_))
    assert [records["env_rank"].tolist() for records in handed_over] == [[3, 6]] * 2
    assert [records["Return"].tolist() for records in handed_over] == [[1, 1], [0, 0]]  # each is its own


@both_sums
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


@pytest.mark.parametrize("forget", ["restart", "drop"])
def test_objects_begin_anew_after(forget: str) -> None:
    messages: list[Any] = []
    tracker = ObjectTracker(Diary, {}, range(2), messages.extend)
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


# ---- TrajInfo, stepped by hand, and of several episodes ----------------------------------------


REWARDS = st.lists(st.one_of(st.just(0.0), st.floats(-100, 100)), max_size=20)


def stepped(rewards: list[Any], **kwargs: Any) -> TrajInfo:
    info = TrajInfo(**kwargs)
    for reward in rewards:
        info.step(None, None, reward, False, False, None, {})
    return info


@given(REWARDS, st.sampled_from([1.0, 0.9, 0.0]))
def test_the_figures_are_those_of_the_rewards(rewards: list[float], discount: float) -> None:
    info = stepped(rewards, discount=discount)
    assert info.Length == len(rewards)
    assert info.Return == pytest.approx(sum(rewards))
    assert info.NonzeroRewards == sum(reward != 0 for reward in rewards)
    assert info.DiscountedReturn == pytest.approx(sum(discount**t * reward for t, reward in enumerate(rewards)))


@pytest.mark.parametrize(
    "number", [float, int, bool, np.float32, np.float64, np.int64, np.array], ids=lambda n: n.__name__
)
def test_figures_are_plain_numbers_whatever_kind_the_reward_is(number: Any) -> None:
    info = stepped([number(1), number(0), number(1)])
    assert json.loads(json.dumps(vars(info)))["NonzeroRewards"] == 2
    assert (type(info.Length), type(info.Return), type(info.DiscountedReturn)) == (int, float, float)


class Own(TrajInfo):
    """Adds a figure and a private attribute."""

    def __init__(self, factor: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.Scaled = 0.0
        self._factor = factor

    def step(self, observation: Any, action: Any, reward: float, *rest: Any) -> None:
        super().step(observation, action, reward, *rest)
        self.Scaled += self._factor * reward


def test_a_restored_object_has_the_class_and_attributes_and_steps_on() -> None:
    original = Own(factor=3.0, discount=0.5)
    original.step(None, None, 2.0, False, False, None, {})
    twin = Own.restore(pickle.loads(pickle.dumps(vars(original))))
    assert type(twin) is Own
    assert vars(twin) == vars(original)
    for info in (original, twin):
        info.step(None, None, 1.0, True, False, None, {})
    assert (twin.Scaled, twin.DiscountedReturn) == (9.0, 2.5) == (original.Scaled, original.DiscountedReturn)


def test_repr_shows_the_record_and_hides_what_is_private() -> None:
    assert repr(Own(2.0)) == "Own(Length=0, Return=0.0, NonzeroRewards=0, DiscountedReturn=0.0, Scaled=0.0)"


@pytest.mark.parametrize("discount", ["0.9", None])
def test_a_discount_that_is_no_number_is_refused(discount: Any) -> None:
    with pytest.raises(ConfigError, match="discount must be a number, got"):
        TrajInfo(discount)


class Three(TrajInfo):
    """One trajectory has three episodes."""

    def __init__(self) -> None:
        super().__init__()
        self.n_ends, self.finals = 0, list[Any]()

    def step(self, observation: Any, action: Any, reward: Any, terminated: bool, *rest: Any) -> None:
        super().step(observation, action, reward, terminated, *rest)
        self.n_ends += terminated

    def traj_done(self, terminated: bool, truncated: bool, env_info: Any) -> bool:
        return self.n_ends == 3

    def terminate(self, final_observation: Any) -> None:
        self.finals.append(final_observation.tolist())


def test_a_trajectory_of_three_episodes_is_told_of_its_last_end_only() -> None:
    sizes = {"batch_T": 15, "batch_B": 1, "max_decorrelation_steps": 0, "traj_info_cls": Three}
    with SerialSampler(partial(CountingEnv, length=4), **sizes) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        infos = [info for itr in range(4) for info in sampler.obtain_samples(itr)[1]]
    assert [(info.Length, info.Return, info.finals) for info in infos] == [
        (12, 30, [[episode, 4]]) for episode in (2, 5, 8, 11, 14)
    ]
