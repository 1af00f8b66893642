"""Intervals of 95 % for shares, means and paired differences, in closed form.

Each function takes one array of values for each task. Tasks are fixed, and only episodes are drawn. So what differs
between tasks does not make an interval wider.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Strata = Sequence[npt.NDArray[Any]]

_Z = 1.959963984540054  # the 97.5 % quantile of the normal distribution
_EXACT = 200  # up to so many degrees of freedom, the distribution of Student is summed


class Interval(NamedTuple):
    """An estimate, and the ends of its interval of 95 %. They are NaN where there are too few episodes."""

    estimate: float
    lower: float
    upper: float


def share(tasks: Strata) -> Interval:
    """The share of ones, with Wilson's interval. Where tasks differ, the episodes count as more than there are."""
    values = np.concatenate(tasks)
    if not len(values):
        return Interval(math.nan, math.nan, math.nan)
    more = min(len(tasks), 2)  # both estimates of the variance are smoothed; with one task they must be equal
    n, p, smooth = len(values), float(values.mean()), (values.sum() + more) / (len(values) + 2 * more)
    inner = sum(len(task) * (q := (task.sum() + 1) / (len(task) + 2)) * (1 - q) for task in tasks) / n
    m = n * max(1.0, float(smooth * (1 - smooth) / inner))
    scale = 1 + _Z**2 / m
    half = _Z * math.sqrt(p * (1 - p) / m + _Z**2 / (4 * m * m)) / scale
    centre = (p + _Z**2 / (2 * m)) / scale
    return Interval(p, max(0.0, centre - half), min(1.0, centre + half))


def mean(tasks: Strata) -> Interval:
    """The mean, with Student's interval. It is stratified if each task has two episodes or more."""
    strata = list(tasks) if all(len(task) > 1 for task in tasks) else [np.concatenate(tasks)]
    n = sum(map(len, strata))
    if n == 0:
        return Interval(math.nan, math.nan, math.nan)
    estimate, df = float(sum(stratum.sum() for stratum in strata) / n), n - len(strata)
    if df < 1:
        return Interval(estimate, math.nan, math.nan)
    half = student(df) * math.sqrt(sum(len(stratum) * float(stratum.var(ddof=1)) for stratum in strata)) / n
    return Interval(estimate, estimate - half, estimate + half)


def paired_share(tasks: Strata) -> Interval:
    """The mean of differences of outcomes, each 0 or 1, with the interval of Bonett and Price."""
    values = np.concatenate(tasks)
    if not len(values):
        return Interval(math.nan, math.nan, math.nan)
    n, b, c = len(values), int((values > 0).sum()), int((values < 0).sum())
    p, q = (b + 1) / (n + 2), (c + 1) / (n + 2)
    half = _Z * math.sqrt((p + q - (p - q) ** 2) / (n + 2))
    return Interval((b - c) / n, max(-1.0, p - q - half), min(1.0, p - q + half))


@lru_cache(maxsize=256)
def student(df: int) -> float:
    """The 97.5 % quantile of Student's distribution with `df` degrees of freedom, an integer."""
    if df > _EXACT:  # Abramowitz and Stegun 26.7.5
        z = _Z
        terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
        return float(z + sum(term / df**k for k, term in enumerate(terms, 1)))
    low, high = _Z, 13.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, df) < 0.95 else (low, middle)
    return low


def _within(t: float, df: int) -> float:
    """The probability of values between -t and t (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(df))
    first = 1 + df % 2  # the powers of the cosine begin with 0 or 1
    k = np.arange(first + 1, df - 1, 2)
    factors = np.concatenate([[math.cos(angle) ** (first - 1)], (k - 1) / k * math.cos(angle) ** 2])
    series = math.sin(angle) * float(np.cumprod(factors).sum()) if df > 1 else 0.0
    return 2 / math.pi * (angle + series) if df % 2 else series
