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


@given(df=st.integers(1, 5000))
def test_the_quantile_of_student(stats: Any, df: int) -> None:
    assert student(df) == pytest.approx(stats.t.ppf(0.975, df), abs=1e-6)


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
    assert mean([np.array([1.0]), np.array([2.0, 3.0])]) == mean([np.array([1.0, 2.0, 3.0])])


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
