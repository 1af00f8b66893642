"""Intervals: as scipy has them, and over the true value in 95 % of simulations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.evaluation.intervals import Interval, mean, paired_share, share, student

from ..scale import scaled


@pytest.fixture(scope="module")
def stats() -> Any:
    """Imported here, by one process of several that collect this file."""
    return pytest.importorskip("scipy.stats")


@given(df=st.floats(1, 5000) | st.integers(1, 5000))
def test_the_quantile_of_student(stats: Any, df: float) -> None:
    assert student(df) == pytest.approx(stats.t.ppf(0.975, df), rel=1e-9)


def test_the_quantiles_of_student_in_tables() -> None:
    tables = {1: 12.706, 2: 4.303, 3: 3.182, 5: 2.571, 10: 2.228, 30: 2.042, 120: 1.980, 1e7: 1.960}
    assert {df: round(student(df), 3) for df in tables} == tables


@given(n=st.integers(1, 300), data=st.data())
def test_a_share_of_one_task_is_wilsons(stats: Any, n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    values = np.repeat([1.0, 0.0], [k, n - k])
    wilson = stats.binomtest(k, n).proportion_ci(method="wilson")
    assert share([values]) == pytest.approx(Interval(k / n, wilson.low, wilson.high), abs=1e-6)


@given(values=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=50).filter(lambda x: np.std(x) > 1e-3))
def test_a_mean_of_one_task_is_students(stats: Any, values: list[float]) -> None:
    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    assert mean([np.array(values)]) == pytest.approx((np.mean(values), low, high), rel=1e-6, abs=1e-6)


@given(data=st.data(), sizes=st.lists(st.integers(2, 30), min_size=2, max_size=12))
def test_a_mean_of_tasks_is_welchs(stats: Any, data: st.DataObject, sizes: list[int]) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    tasks = [rng.normal(rng.normal(), 10 ** rng.uniform(-3, 3), n) for n in sizes]
    own = [float(np.var(task, ddof=1)) / len(task) for task in tasks]
    df = sum(own) ** 2 / sum(part**2 / (n - 1) for part, n in zip(own, sizes, strict=True))
    centre = sum(float(np.mean(task)) for task in tasks) / len(tasks)
    half = stats.t.ppf(0.975, df) * math.sqrt(sum(own)) / len(tasks)
    assert mean(tasks) == pytest.approx((centre, centre - half, centre + half), rel=1e-6, abs=1e-9)


@given(data=st.data(), sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any))
def test_tasks_weigh_the_same_whatever_their_episodes(data: st.DataObject, sizes: list[int]) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    tasks = [rng.integers(-1, 2, n) * 1.0 for n in sizes]
    for interval, values in ((mean, tasks), (paired_share, tasks), (share, [abs(task) for task in tasks])):
        means = [sum(task) / len(task) for task in values if len(task)]
        estimate, lower, upper = interval(values)
        assert estimate == pytest.approx(sum(means) / len(means), abs=1e-12)
        assert sum(sizes) == 1 or lower - 1e-12 <= estimate <= upper + 1e-12
        bad = [np.where(rng.permutation(len(task)) == 0, math.nan, task) for task in values]
        assert all(map(math.isnan, interval(bad)))


def test_a_paired_share_is_that_of_bonett_and_price(stats: Any) -> None:
    # Their example: 26 and 7 of 100 pairs changed, each way.
    differences = np.repeat([1.0, -1.0, 0.0], [26, 7, 67])
    p, q, z = 27 / 102, 8 / 102, stats.norm.ppf(0.975)
    half = z * math.sqrt((p + q - (p - q) ** 2) / 102)
    assert paired_share([differences]) == pytest.approx((0.19, p - q - half, p - q + half))


def test_few_episodes() -> None:
    assert all(map(math.isnan, mean([np.zeros(0)])))
    assert all(map(math.isnan, share([np.zeros(0)])))
    assert all(map(math.isnan, paired_share([np.zeros(0)])))
    estimate, lower, upper = mean([np.array([3.0])])
    assert estimate == 3.0
    assert math.isnan(lower)
    assert math.isnan(upper)
    assert mean([np.array([1.0]), np.array([2.0, 3.0])]) == mean([np.array([1.0, 2.5])])
    assert mean([np.zeros(0), np.array([2.0, 3.0])]) == mean([np.array([2.0, 3.0])])
    assert mean([np.full(3, 4.0), np.full(2, 5.0)]) == (4.5, 4.5, 4.5)
    assert mean([np.array([np.inf, 1.0])])[0] == np.inf


@pytest.mark.parametrize(("n_tasks", "n"), [(1, 20), (1, 50), (1, 200), (4, 50), (10, 20), (50, 4)])
@pytest.mark.slow
def test_coverage(n_tasks: int, n: int) -> None:
    """Of 2,000 evaluations of two policies, whose outcomes depend on task and episode, 93 to 97 % must cover the truth
    at full scale. With fewer, the bounds are three standard errors wider."""
    rng, n_sims = np.random.default_rng(n_tasks * n), scaled(2000, 300)
    ease = np.linspace(-1.5, 2.0, n_tasks) if n_tasks > 1 else np.array([0.8])

    def rate(z: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-z))

    many = ease[:, None] + rng.normal(0, 1.0, (n_tasks, 400_000 // n_tasks))
    truths = rate(many).mean(), (rate(many + 0.4) - rate(many)).mean(), np.exp(0.5 * many).mean(), 0.3
    hits = np.zeros(4)
    for _ in range(n_sims):
        z = ease[:, None] + rng.normal(0, 1.0, (n_tasks, n))
        a, b = (rng.random(z.shape) < rate(shifted) for shifted in (z, z + 0.4))
        x, y = (np.exp(0.5 * z) + more + rng.normal(0, 0.5, z.shape) for more in (0.0, 0.3))
        found = share(list(a * 1.0)), paired_share(list(b * 1.0 - a)), mean(list(x)), mean(list(y - x))
        hits += [low <= truth <= high for (_, low, high), truth in zip(found, truths, strict=True)]
    slack = scaled(0.0, 3 * math.sqrt(0.05 * 0.95 / n_sims))
    assert ((hits / n_sims >= 0.93 - slack) & (hits / n_sims <= 0.97 + slack)).all(), hits / n_sims


DOMINATED, ATARI = [100.0] + [1.0] * 9, list(10 ** np.linspace(0, 4, 26))


@pytest.mark.parametrize(
    ("scales", "sizes"),
    [
        *[(DOMINATED, [n] * 10) for n in (2, 3, 5, 10, 20)],
        *[(ATARI, [n] * 26) for n in (3, 5, 10)],
        (DOMINATED, [5] + [20] * 9),
        (list(np.linspace(1, 5, 10)), list(range(3, 13))),
        (list(np.linspace(5, 1, 10)), list(range(3, 13))),
    ],
)
@pytest.mark.slow
def test_coverage_of_means_whose_tasks_have_different_scales(scales: list[float], sizes: list[int]) -> None:
    rng = np.random.default_rng(0)
    truths = rng.normal(size=len(scales))
    hits = 0
    for _ in range(2000):
        tasks = [rng.normal(*task) for task in zip(truths, scales, sizes, strict=True)]
        _, low, high = mean(tasks)
        hits += low <= truths.mean() <= high
    assert 0.93 <= hits / 2000 <= 0.97


@pytest.mark.parametrize(
    ("rates", "sizes"),
    [
        ([0.8] * 10, list(range(2, 22, 2))),
        (list(np.linspace(0.05, 0.99, 10)), list(range(2, 22, 2))),
        (list(np.linspace(0.99, 0.05, 10)), list(range(2, 22, 2))),
        ([0.6, 0.7, 0.8, 0.9], [10, 20, 40, 80]),
        ([0.9, 0.8, 0.7, 0.6], [10, 20, 40, 80]),
        (list(np.linspace(0.05, 0.99, 10)), [18, 20, 19, 20, 20, 17, 20, 20, 20, 5]),
        ([0.1, 0.9], [4, 20]),
    ],
)
@pytest.mark.slow
def test_coverage_of_shares_whose_tasks_have_different_numbers(rates: list[float], sizes: list[int]) -> None:
    """They may be wider than needed, but not by much: tasks with few episodes are smoothed."""
    rng, truth, gap = np.random.default_rng(0), float(np.mean(rates)), 0.04
    hits, widths, found = np.zeros(2), np.zeros(2), []
    for _ in range(2000):
        draws = [rng.random(n) for n in sizes]
        a, b = ([(u < p - less) * 1.0 for u, p in zip(draws, rates, strict=True)] for less in (0.0, gap))
        shifted = [
            np.where(rng.random(len(y)) < 0.5, y, rng.random(len(y)) < p - gap) for y, p in zip(b, rates, strict=True)
        ]
        ends = share(a), paired_share([x - y for x, y in zip(a, shifted, strict=True)])
        hits += [low <= centre <= high for (_, low, high), centre in zip(ends, (truth, gap), strict=True)]
        widths += [high - low for _, low, high in ends]
        found.append([estimate for estimate, _, _ in ends])
    assert (hits / 2000 >= 0.93).all(), hits / 2000
    assert (widths / 2000 <= 2 * 2 * 1.96 * np.std(found, axis=0)).all(), widths / 2000 / np.std(found, axis=0) / 3.92
