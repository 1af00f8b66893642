"""Whom the inference server serves and when: all at once, those who are ready, or halves in turn."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import AlternatingSampler, ConfigError, GpuSampler
from penstock.envs import CountingEnv
from penstock.samplers import readiness
from penstock.samplers.readiness import Alternating, FirstReady, LockStep, Readiness, columns_wanted
from penstock.samplers.stats import ServerTotals, WorkerStats


class WorkerPool:
    """Workers that ask in the order of their scripts, "s" for actions and "v" for values, and wait for each answer. Who
    comes back next is drawn, and with `is_late` whether the server looks at once or after another request."""

    def __init__(self, rule: Readiness, scripts: list[str], data: Any, is_late: bool = False) -> None:
        self.rule, self.left, self.data = rule, [list(script) for script in scripts], data
        self.looks = st.booleans() if is_late else st.just(True)
        self.working, self.asking, self.kept = set(range(len(scripts))), dict[int, str](), list[int]()
        self.served: list[tuple[str, list[int]]] = []

    def run(self) -> list[tuple[str, list[int]]]:
        while self.working:
            rank = self.data.draw(st.sampled_from(sorted(self.working)))
            self.working.discard(rank)
            if self.left[rank]:
                self.asking[rank] = self.left[rank].pop(0)
            while (self.data.draw(self.looks) or not self.working) and self.serve():
                self.check()
        assert not self.asking, "nobody waits for ever"
        assert not any(self.left)
        return self.served

    def serve(self) -> bool:
        working = sorted(self.working)
        if self.kept and self.rule.may_reply(working):
            self.working.update(self.kept)
            self.kept = []
            return True
        steps, values = ([r for r in sorted(self.asking) if self.asking[r] == kind] for kind in "sv")
        valued = self.rule.choose_values(values, working)
        chosen = list(valued or self.rule.choose(steps, working))
        if not chosen:
            return False
        self.served.append(("v" if valued else "s", chosen))
        for rank in chosen:
            del self.asking[rank]
        if valued or self.rule.may_reply(working):
            self.working.update(chosen)
        else:
            assert not self.kept
            self.kept = chosen
        return True

    def check(self) -> None:
        """For subclasses."""


@given(n=st.integers(1, 5), T=st.integers(1, 6), data=st.data())
def test_lock_step_serves_all_together(n: int, T: int, data: Any) -> None:
    assert WorkerPool(LockStep(), [T * "s"] * n, data).run() == [("s", list(range(n)))] * T


@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=5), T=st.integers(1, 6), data=st.data())
def test_first_ready_serves_whoever_waits_once_they_are_enough(sizes: list[int], T: int, data: Any) -> None:
    least = data.draw(st.integers(1, sum(sizes)))

    class Checked(WorkerPool):
        def check(self) -> None:
            assert not self.asking, "all who wait are served together, so nobody is served twice before another"
            (_, served), others = self.served[-1], self.working.difference(self.served[-1][1])
            assert sum(map(sizes.__getitem__, served)) >= least or not others, "enough, or there are no others"

    Checked(FirstReady(least, sizes.__getitem__), [T * "s"] * len(sizes), data).run()


@given(times=st.lists(st.tuples(st.floats(0, 2), st.integers(0, 4)), max_size=20), max_wait=st.floats(0.1, 3))
def test_nobody_waits_longer_than_max_wait(times: list[tuple[float, int]], max_wait: float) -> None:
    """Of five workers one never asks. The server looks after each pause, and when the rule says that it is due."""
    rule, now, asking = FirstReady(5, lambda rank: 1, max_wait), 0.0, dict[int, float]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readiness.time, "monotonic", lambda: now)

        def look() -> None:
            working = [rank for rank in range(5) if rank not in asking]
            chosen = rule.choose(sorted(asking), working)
            is_due = bool(asking) and now >= min(asking.values()) + max_wait
            assert sorted(chosen) == (sorted(asking) if is_due else [])
            if chosen:
                asking.clear()
            assert rule.due == (min(asking.values()) + max_wait if asking else math.inf)

        for pause, rank in times:
            then = now + pause
            while rule.due <= then:
                now = rule.due
                look()
            now = then
            if rank < 4:
                asking.setdefault(rank, now)
            look()


def test_without_others_nobody_waits() -> None:
    assert FirstReady(5, lambda rank: 1, 1.0).choose([0], []) == [0]


@pytest.mark.parametrize("overlap", [True, False])
@given(n=st.integers(2, 6), T=st.integers(1, 6), data=st.data())
def test_alternating_serves_whole_halves(overlap: bool, n: int, T: int, data: Any) -> None:
    middle = n - n // 2
    halves = set(range(middle)), set(range(middle, n))

    class Checked(WorkerPool):
        def check(self) -> None:
            assert set(self.served[-1][1]) in halves
            if not overlap:
                with_actions = {rank for rank in self.working if len(self.left[rank]) < T}
                assert not all(with_actions & half for half in halves), "one half at a time"

    assert len(Checked(Alternating(halves, overlap=overlap), [T * "s"] * n, data).run()) == 2 * T


def test_alternating_goes_on_with_what_is_left_of_a_half() -> None:
    """As when one of its workers has been replaced and is behind the others, who have ended."""
    policy = Alternating(((0, 1), (2, 3)), overlap=False)
    assert policy.choose([0], [1]) == ()
    assert policy.choose([0], []) == [0]
    assert policy.choose([0, 2, 3], []) == [2, 3], "the other half's turn"
    assert policy.choose([0], [2, 3]) == [0]


SCRIPTS = st.lists(st.text("sv", max_size=6), min_size=2, max_size=5)


@pytest.mark.slow
@given(scripts=SCRIPTS, data=st.data())
def test_values_are_served_for_the_same_workers_however_fast_each_is(scripts: list[str], data: Any) -> None:
    middle, ranks = len(scripts) // 2, range(len(scripts))
    halves = ranks[:middle], ranks[middle:]
    for make in (LockStep, lambda: Alternating(halves, overlap=True)):
        first, second = (WorkerPool(make(), scripts, data, is_late=True).run() for _ in range(2))
        for half in halves:  # which half comes first may differ, and does not matter
            mine, others = ([found for found in run if half[0] <= min(found[1]) <= half[-1]] for run in (first, second))
            assert mine == others


def test_all_environments_are_all_however_they_are_counted() -> None:
    for min_ready in (None, 8, 1.0):
        assert isinstance(readiness.readiness_maker(min_ready, None, 8)([]), LockStep)


# ---- arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("min_ready", "batch_B", "wanted"),
    [
        (1, 8, 1),
        (8, 8, 8),
        (np.int64(3), 8, 3),
        (np.uint8(3), 8, 3),
        (0.5, 8, 4),
        (0.5, 5, 3),  # at least the fraction
        (0.1, 30, 3),
        (1e-9, 8, 1),
        (1.0, 8, 8),
        (np.float32(0.25), 8, 2),
        (np.float64(0.3), 10, 3),
    ],
)
def test_numbers_and_fractions(min_ready: Any, batch_B: int, wanted: int) -> None:
    assert columns_wanted(min_ready, batch_B) == wanted


@given(fraction=st.floats(0, 1, exclude_min=True), batch_B=st.integers(1, 10_000))
def test_a_fraction_is_at_least_that_many(fraction: float, batch_B: int) -> None:
    wanted = columns_wanted(fraction, batch_B)
    assert 1 <= wanted <= batch_B
    assert fraction * batch_B - 1e-5 <= wanted <= fraction * batch_B + 1


BAD = {
    "min_ready": (0, -1, 9, 0.0, -0.5, 1.5, 2.0, True, False, np.True_, float("nan"), float("inf"), "2", [1], 1j),
    "max_wait": (0, -1, 0.0, float("nan"), True, "1", [1], 1j),
    "spin_seconds": (-1, -1e-9, float("nan"), float("inf"), True, np.True_, "0", [0], 1j),
    "overlap": (0, 1, None, "no", 0.5),
    "n_workers": (0, -1, 1.5, True, "2", float("nan")),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_odd_arguments_are_refused_in_one_line(name: str, value: Any) -> None:
    cls = AlternatingSampler if name == "overlap" else GpuSampler
    with pytest.raises(ConfigError, match=name) as caught:
        cls(CountingEnv, batch_T=2, batch_B=8, **{name: value})
    assert "\n" not in str(caught.value)
    assert repr(value) in str(caught.value)


def test_halves_need_two_of_everything() -> None:
    for kwargs, message in (
        ({"batch_B": 1}, "at least two environments"),
        ({"batch_B": 4, "n_workers": 1}, "at least two workers"),
        ({"batch_B": 4, "n_workers": np.int64(1)}, "at least two workers"),
        ({"batch_B": 4, "min_ready": 1}, "AlternatingSampler and min_ready or max_wait do not go together"),
        ({"batch_B": 4, "max_wait": 0.1}, "AlternatingSampler and min_ready or max_wait do not go together"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            AlternatingSampler(CountingEnv, batch_T=2, **kwargs)
        assert "\n" not in str(caught.value)


def test_numbers_of_every_kind_are_seconds() -> None:
    for spin_seconds in (0, 0.0, 1e-4, np.float32(1e-4), np.int64(0)):
        AlternatingSampler(CountingEnv, batch_T=2, batch_B=8, spin_seconds=spin_seconds, overlap=np.False_)


# ---- what the server says ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("acting", "stepping", "requesting", "idle", "bound_by", "remedy"),
    [
        (1.0, 8.0, 1.5, 0.5, "environments", "faster environments"),
        (6.0, 3.0, 7.0, 0.0, "inference", "compile_model"),
        (1.0, 3.0, 7.0, 0.0, "waiting", "max_wait"),
        (1.0, 3.0, 1.0, 6.0, "between batches", "AsyncSampler"),
    ],
)
def test_server_stats_say_where_the_time_went(
    acting: float, stepping: float, requesting: float, idle: float, bound_by: str, remedy: str
) -> None:
    totals = ServerTotals(4, shared=False)
    totals.add_seconds(acting=acting, waiting=2.0)
    for n in (4, 4, 1):
        totals.count_step(n)
    times = {"stepping": stepping - 0.5, "acting": requesting, "resetting": 0.5, "waiting": idle}
    workers = [
        WorkerStats(rank, range(2), (), 1, 1, **times, trajectories=0, restarts=0, lost_trajectories=0)
        for rank in (0, 1)
    ]
    stats = totals.with_workers(workers, None)
    assert stats.bound_by == bound_by
    assert sum(stats.shares.values()) == pytest.approx(1)
    assert remedy in repr(stats).splitlines()[2]
    assert "3 steps of the agent, for 3.0 environments on average" in repr(stats)
    assert f"inference {acting / (stepping + requesting + idle):.0%}" in repr(stats)
    assert totals.with_workers(workers, (stats, workers)).shares == stats.shares, "there is one batch only"
    totals.add_seconds(acting=1.0)
    more = [replace(own, batches=2, stepping=own.stepping + 1, acting=own.acting + 2) for own in workers]
    wanted = {"environments": 1 / 3, "inference": 1 / 3, "waiting": 1 / 3, "between batches": 0.0}
    assert totals.with_workers(more, (stats, workers)).shares == pytest.approx(wanted), "without the first batch"


def test_server_stats_before_the_first_step() -> None:
    assert repr(ServerTotals(4, shared=False).stats).startswith("0 steps of the agent, for 0.0 environments")
