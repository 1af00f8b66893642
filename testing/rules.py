"""What a rule is: a function whose docstring states it, and what happens when it is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from penstock.buffers.named import NamedArrays

__all__ = ["ConformanceError", "Violation", "apply", "first_difference", "leaves"]


class ConformanceError(AssertionError):
    """A rule of penstock is broken. The message says which, what was seen and where, and what to do.

    `rule` is the rule's name.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule


class Violation(Exception):
    """Raised inside a rule: what was seen and where, and what to do about it."""

    def __init__(self, seen: str, remedy: str) -> None:
        super().__init__(seen)
        self.seen, self.remedy = seen, remedy


def apply(rule: Callable[..., None], subject: str, *args: Any) -> None:
    """Hold `args` against `rule`; `subject` is the name of the user's class. Raises `ConformanceError`."""
    try:
        rule(*args)
    except Violation as violation:
        statement = " ".join((rule.__doc__ or rule.__name__).split())
        raise ConformanceError(
            rule.__name__,
            f"{subject} breaks the rule {rule.__name__}\n"
            f"  rule: {statement}\n  seen: {violation.seen}\n  do:   {violation.remedy}",
        ) from None


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every array of `value`, which is a `NamedArrays` or a single array, with its dotted path."""
    if isinstance(value, NamedArrays):
        yield from value.leaves(f"{name}.")
    else:
        yield name, np.asarray(value)


def _differences(name: str, left: Any, right: Any, *, close: bool = False) -> Iterator[tuple[str, Any]]:
    """Leaf by leaf: path, and where it differs, as a boolean array; only leaves that differ anywhere.

    With `close`, floating-point numbers may differ by rounding.
    """
    for (path, a), (_, b) in zip(leaves(left, name), leaves(right, name), strict=True):
        if a.shape != b.shape:
            raise Violation(f"{path} has shape {list(a.shape)} here and {list(b.shape)} there", "keep shapes fixed")
        floating = a.dtype.kind in "fc" and b.dtype.kind in "fc"
        if floating and close:
            differs = ~np.isclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
        else:
            differs = (a != b) & ~(floating and (np.isnan(a) & np.isnan(b)))
        if np.any(differs):
            yield path, differs


def first_difference(pairs: Sequence[tuple[str, Any, Any]], *, close: bool = False) -> str | None:
    """The first cell `[t, B]` in which any of the named pairs of arrays differ, in words; None if all agree."""
    for name, left, right in pairs:
        for path, differs in _differences(name, left, right, close=close):
            where = np.argwhere(differs)[0]
            axes = ("t", "env_rank") if differs.ndim > 1 else ("env_rank",)
            cell = ", ".join(f"{axis}={index}" for axis, index in zip(axes, where, strict=False))
            values = [dict(leaves(side, name))[path][tuple(where)] for side in (left, right)]
            return f"{path} at {cell}: {values[0]} and {values[1]}"
    return None
