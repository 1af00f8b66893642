"""Ctrl-C, deferred where it would leave something half done.

Inside `with deferred():` Ctrl-C takes effect at the end of the block, or in the first `with allowed():` inside. A
second Ctrl-C takes effect at once, since the block may hang. Blocks may be nested in any way.
"""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# `signal` tries to make an enum's member of every handler, which takes several microseconds and fails. The module that
# it wraps does not, and a vector environment changes the handler at every step.
try:
    _signal: Any = importlib.import_module("_signal")
except ImportError:  # a Python other than CPython
    _signal = signal


class _State(threading.local):
    handler: Callable[[int, FrameType | None], Any] | None = None  # the user's, while this module replaces it
    depth = 0
    is_pending = False


_state = _State()


def is_pending() -> bool:
    """Whether a Ctrl-C has come and is deferred."""
    return _state.is_pending


@contextmanager
def deferred() -> Iterator[None]:
    """Defer Ctrl-C. Outside the main thread this does nothing: Python runs signal handlers in the main thread only."""
    state = _state
    if state.handler is not None:  # changing a handler costs ten times as much as counting
        with nested():
            yield
        return
    is_main = threading.current_thread() is threading.main_thread()
    handler = _signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(handler):
        yield
        return
    state.handler, state.is_pending, state.depth = handler, False, 1
    try:
        _signal.signal(signal.SIGINT, _on_sigint)
        yield
    finally:
        state.handler, state.depth = None, 0
        _signal.signal(signal.SIGINT, handler)
        if state.is_pending:  # handled here and not deeper down, so that the traceback is short
            state.is_pending = False
            handler(signal.SIGINT, None)


class _Nested:
    """A class, because `contextmanager` costs several calls, and the inference server uses it at every time step."""

    def __enter__(self) -> None:
        _state.depth += 1

    def __exit__(self, *exception: object) -> None:
        _state.depth -= 1
        if not _state.depth:
            _handle_pending()


_nested = _Nested()


def nested() -> _Nested:
    """Defer Ctrl-C inside an `allowed()` block of a `deferred()` one. Cheap: nothing is installed."""
    return _nested


@contextmanager
def allowed() -> Iterator[None]:
    """Let Ctrl-C through: the work here can stop at any moment. One that is pending comes first."""
    depth, _state.depth = _state.depth, 0
    try:
        if _state.is_pending:
            _handle_pending()
        yield
    finally:
        _state.depth = depth


def _on_sigint(number: int, frame: FrameType | None) -> None:
    is_second, _state.is_pending = _state.is_pending, True
    if is_second or not _state.depth:
        _handle_pending(frame)


def _handle_pending(frame: FrameType | None = None) -> None:
    if _state.is_pending and _state.handler is not None:
        _state.is_pending = False
        _state.handler(signal.SIGINT, frame)
