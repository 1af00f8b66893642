"""Some functions of replays are also in C, in `_native.c`. If this was compiled, the C ones run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

try:
    from penstock.learning import _native
except ImportError:  # no C compiler, or a checkout that was never built
    _native = None  # type: ignore[assignment]

COMPILED = _native is not None
PYTHON: dict[str, Callable[..., Any]] = {}  #: the functions that are used if nothing is compiled

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """Replace a function by the compiled one of the same name, if that part is compiled. This takes the same arguments,
    by position only."""
    PYTHON[function.__name__] = function
    chosen: _Function = function if _native is None else getattr(_native, function.__name__)
    return chosen
