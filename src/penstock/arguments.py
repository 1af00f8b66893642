"""Checks of numbers, choices and names that callers give; errors name the argument."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Annotated, Any, get_origin, get_type_hints

import numpy as np

from penstock.errors import ConfigError, brief

MOST_ENVS = 10**7  #: more environments in one process are a mistake
_MOST_LISTED = 20
_INT64 = 2**63 - 1
FINITE = float(np.finfo(np.float64).max)  #: the largest number that is finite
_INTEGERS = int, np.integer  # a tuple, since `int | np.integer` would be made at each call


def integer(name: str, value: Any, least: int | None = None, most: int | None = _INT64) -> int:
    """`value` as an int; raises `ConfigError` naming the argument unless it is an integer within the bounds.

    numpy's integers are fine. Arrays and tensors are refused, even with one element: they may be meant as lists.
    """
    is_integer = isinstance(value, _INTEGERS) and not isinstance(value, bool)
    if not is_integer or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise ConfigError(f"{name} must be an integer{bound}, got {brief(value)}")
    if most is not None and not (-most <= value <= most):
        bound = f"at most {most:,}" if value > most else f"at least {-most:,}"
        raise ConfigError(f"{name} must be {bound}, got {brief(value)}")
    return int(value)


def must_be(name: str, value: Any, fits: object, wanted: str) -> Any:
    """`value`; raises `ConfigError` naming the argument, and what is `wanted`, unless it `fits`."""
    if not fits:
        raise ConfigError(f"{name} must be {wanted}, got {brief(value)}")
    return value


def one_of(name: str, value: Any, choices: Sequence[str]) -> Any:
    """`value`; raises `ConfigError` naming the argument unless it is one of `choices`."""
    return must_be(name, value, value in choices, f"one of {', '.join(choices)}")


def true_or_false(name: str, value: object) -> bool:
    """`value` as a bool; raises `ConfigError` naming the argument unless it is True or False."""
    return bool(must_be(name, value, isinstance(value, bool | np.bool_), "True or False"))


def number(name: str, value: Any, most: float = FINITE) -> float:
    """`value` as a float; raises `ConfigError` naming the argument unless it is one number from 0 to `most`. A tensor
    with one element is a number."""
    try:
        as_float = np.nan if isinstance(value, str | bool) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a tensor of several numbers, for example
        as_float = np.nan
    wanted = "a finite number of at least 0" if most == FINITE else f"from 0 to {most:g}"
    must_be(name, value, 0 <= as_float <= most, wanted)
    return as_float


def seconds(name: str, value: Any, *, zero: bool = False) -> float:
    """`value` as a float; raises `ConfigError` naming the argument unless it is a positive number, or 0 with `zero`."""
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    wanted = "a number of seconds, 0 or more" if zero else "a positive number of seconds"
    must_be(name, value, is_number and (value > 0 or (zero and value == 0)), wanted)
    try:
        return float(value)
    except OverflowError:
        return float("inf")


#: What a table of arguments has for one of them: it is called with name and value, and returns the checked value.
Check = Callable[[str, Any], Any]


def between(least: int, most: int = _INT64) -> Check:
    """The check of an integer within these bounds."""
    return partial(integer, least=least, most=most)


def choice(*choices: str) -> Check:
    """The check of one of these words."""
    return partial(one_of, choices=choices)


def kind_of(wanted: str, *classes: type) -> Check:
    """The check of an instance of one of these classes; errors say what is `wanted`."""
    return lambda name, value: must_be(name, value, isinstance(value, classes), wanted)


def subclass_of(base: type) -> Check:
    """The check of a subclass."""
    wanted = f"a subclass of {base.__name__} (the class itself)"
    return lambda name, value: must_be(name, value, isinstance(value, type) and issubclass(value, base), wanted)


def optional(check: Check) -> Check:
    """The check of None, or of what `check` lets pass."""
    return lambda name, value: None if value is None else check(name, value)


@cache
def checks_of(table: type) -> Mapping[str, Check]:
    """The checks in the types of a table of arguments, a dataclass with fields such as `n: Annotated[int, between(1)]`,
    by name."""
    hints = get_type_hints(table, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if get_origin(hint) is Annotated}


def check_fields(arguments: Any) -> None:
    """Give each field of an object of such a class what its check returns."""
    table: Any = type(arguments)
    for name, check in checks_of(table).items():
        object.__setattr__(arguments, name, check(name, getattr(arguments, name)))


def unknown_argument(caller: str, name: str, known: Sequence[str], hints: Mapping[str, str]) -> ConfigError:
    """The error for an argument that the class `caller` does not have. It has the hint for this name, or the name of
    the nearest of the `known` arguments, or all of them if they are few."""
    near = next(iter(difflib.get_close_matches(name, known, 1)), None)
    hint = hints.get(name) or (f"did you mean {near!r}?" if near else None)
    listed = known if len(known) <= _MOST_LISTED else difflib.get_close_matches(name, known, 3, cutoff=0)
    others = f" and {n} others: see help({caller})" if (n := len(known) - len(listed)) else ""
    end = f": {hint}" if hint else f"; it has {', '.join(listed)}{others}"
    return ConfigError(f"{caller} has no argument {name!r}{end}")


def signature(called: Callable[..., Any]) -> inspect.Signature:
    """What `called` takes. Where that is not known, as of some functions that are written in C: anything.

    Python 3.14 evaluates annotations for this, so a name that only type checkers import would raise NameError.
    """
    try:
        if sys.version_info >= (3, 14):
            from annotationlib import Format

            return inspect.signature(called, annotation_format=Format.FORWARDREF)
        return inspect.signature(called)
    except (TypeError, ValueError, NameError):
        return inspect.signature(_takes_anything)


def _takes_anything(*arguments: Any, **named: Any) -> None: ...
