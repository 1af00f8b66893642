"""Intervals of 95 % for shares, means and paired differences, in closed form.

Each function takes one array of values for each task. The estimate is the mean of the tasks' means, whatever their
numbers of episodes; tasks without episodes do not count. Tasks are fixed, and only episodes are drawn. So what differs
between tasks does not make an interval wider. A value that is NaN makes all three numbers NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Strata = Sequence[Array]

_legendre = lru_cache(maxsize=1)(np.polynomial.legendre.leggauss)
_Z = 1.959963984540054  # the 97.5 % quantile of the normal distribution


class Interval(NamedTuple):
    """An estimate, and the ends of its interval of 95 %. They are NaN where there are too few episodes."""

    estimate: float
    lower: float
    upper: float


_UNKNOWN = Interval(math.nan, math.nan, math.nan)


def share(tasks: Strata) -> Interval:
    """The share of ones, with Wilson's interval."""
    if not (strata := _known(tasks)):
        return _UNKNOWN
    shares = np.array([[task.mean() for task in strata]])
    p, m = float(shares.mean()), _size(strata, shares)
    scale = 1 + _Z**2 / m
    half = _Z * math.sqrt(p * (1 - p) / m + _Z**2 / (4 * m * m)) / scale
    centre = (p + _Z**2 / (2 * m)) / scale
    return Interval(p, max(0.0, centre - half), min(1.0, centre + half))


def paired_share(tasks: Strata) -> Interval:
    """The mean of differences of outcomes, each 0 or 1, with the interval of Bonett and Price."""
    if not (strata := _known(tasks)):
        return _UNKNOWN
    shares = np.array([[(sign * task > 0).mean() for task in strata] for sign in (1, -1)])
    m = _size(strata, shares)
    (b, c), (p, q) = shares.mean(1).tolist(), ((shares.mean(1) * m + 1) / (m + 2)).tolist()
    half = _Z * math.sqrt(_variance(p, q) / (m + 2))
    return Interval(b - c, max(-1.0, p - q - half), min(1.0, p - q + half))


def mean(tasks: Strata) -> Interval:
    """The mean, with Student's interval. Each task has its own variance; the degrees of freedom follow Welch and
    Satterthwaite. If a task has only one episode, the means of the tasks are taken for draws of one distribution,
    which makes the interval wider."""
    if not (strata := _known(tasks)):
        return _UNKNOWN
    with np.errstate(invalid="ignore", over="ignore"):  # of infinite values
        means = np.array([task.mean() for task in strata])
        estimate = float(means.mean())
        if min(map(len, strata)) == 1:
            strata = [means]
        n = np.array([len(task) for task in strata])
        if n.min() == 1:
            return Interval(estimate, math.nan, math.nan)
        variances = np.array([task.var(ddof=1) for task in strata]) / n / len(n) ** 2  # what each adds to the mean's
        total = float(variances.sum())
        half = student(1 / float(((variances / total) ** 2 / (n - 1)).sum())) * math.sqrt(total) if total else 0.0
    return Interval(estimate, estimate - half, estimate + half)


def _known(tasks: Strata) -> list[Array]:
    """The tasks that have episodes; none if a value is NaN."""
    strata = [task for task in tasks if len(task)]
    return [] if any(np.isnan(task).any() for task in strata) else strata


def _size(strata: Strata, shares: Array) -> float:
    """How many episodes of a single task would give a mean as exact as that of these tasks: more than there are where
    the tasks differ, and fewer where one of them has few. `shares [1 or 2, tasks]`: of ones, and of minus ones."""
    n = np.array([len(task) for task in strata])
    more, total = min(len(n), 2), n.sum()  # all shares are smoothed, so that one task gives its number
    whole = _variance(*(shares.mean(1) * total + more) / (total + 2 * more))
    own = (_variance(*(shares * n + 1) / (n + 2)) / n).sum() / len(n) ** 2
    return max(len(n) * int(n.min()), float(whole / own))  # with p (1 - p) concave, it is never less than the first


def _variance(p: Any, q: Any = 0.0) -> Any:
    """Of a value that is 1 with probability `p`, -1 with probability `q`, and else 0."""
    return p + q - (p - q) ** 2


@lru_cache(maxsize=256)
def student(df: float) -> float:
    """The 97.5 % quantile of Student's distribution with `df` degrees of freedom, a real number from 1 on; NaN for NaN.

    The angle atan(t / sqrt(df)) has a density that is proportional to cos(angle) ** (df - 1).
    """
    nodes, weights = _legendre(64)
    whole = math.sqrt(math.pi) * math.exp(math.lgamma(df / 2) - math.lgamma((df + 1) / 2))
    angle = math.atan(_Z / math.sqrt(df))
    for _ in range(50):  # Newton's steps from below do not pass the quantile, since the density falls
        within = angle * float(weights @ np.cos(angle / 2 * (1 + nodes)) ** (df - 1))
        step = (0.95 * whole - within) / 2 / math.cos(angle) ** (df - 1)
        angle += step
        if not step > 1e-13 * angle:
            break
    return math.sqrt(df) * math.tan(angle)
