"""Rules: functions whose docstrings state the rule. Also the error for a class that breaks one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.buffers.tree import tree_leaves


class ConformanceError(AssertionError):
    """A class breaks a rule. The message gives the rule, what was seen and where, and what to do.

    `rule` is the rule's name.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule


class Violation(Exception):
    """Raised by a rule: what was seen and where, and what to do about it."""

    def __init__(self, seen: str, remedy: str) -> None:
        super().__init__(seen)
        self.seen, self.remedy = seen, remedy


def apply(rule: Callable[..., None], subject: str, *args: object) -> None:
    """Call `rule(*args)`. Raises `ConformanceError` if it is broken; `subject` names the user's class."""
    try:
        rule(*args)
    except Violation as violation:
        statement = " ".join((rule.__doc__ or rule.__name__).split())
        raise ConformanceError(
            rule.__name__,
            f"{subject} breaks the rule {rule.__name__}\n"
            f"  rule: {statement}\n  seen: {violation.seen}\n  do:   {violation.remedy}",
        ) from None


def first_difference(
    pairs: Sequence[tuple[str, Any, Any]], *, axes: Sequence[str] = ("t", "env_rank"), close: bool = False
) -> str | None:
    """Describe the first cell in which two arrays of a pair (name, left, right) differ; None if all are equal.

    `axes` names the leading dimensions. An array with fewer dimensions has the last of these. With `close`,
    floating-point numbers may differ by rounding. Raises `Violation` if shapes differ.
    """
    for name, left, right in pairs:
        for path, a, b in tree_leaves(left, name, right):
            if a.shape != b.shape:
                raise Violation(f"{path} has the shapes {list(a.shape)} and {list(b.shape)}", "keep shapes fixed")
            differs = differ(a, b, close=close)
            if np.any(differs):
                where = tuple(np.argwhere(differs)[0])
                cell = ", ".join(f"{axis}={i}" for axis, i in zip(axes[-differs.ndim :], where, strict=False))
                return f"{path} at {cell}: {a[where]} and {b[where]}"
    return None


def differ(a: Any, b: Any, *, close: bool = False) -> Any:
    """Where two arrays of one shape differ. NaN is equal to NaN."""
    floating = a.dtype.kind in "fc" and b.dtype.kind in "fc"
    if floating and close:
        return ~np.isclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
    return (a != b) & ~(floating and (np.isnan(a) & np.isnan(b)))
