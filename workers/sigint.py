"""Ctrl-C, deferred where it would leave something half done.

Inside `with deferred():` Ctrl-C takes effect at the end of the block, or in the first `with allowed():` inside. A
second Ctrl-C takes effect at once, since the block may hang. Blocks may be nested in any way.
"""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

# `signal` tries to make an enum's member of every handler, which takes several microseconds and fails. The module that
# it wraps does not, and a vector environment changes the handler at every step.
try:
    _signal: Any = importlib.import_module("_signal")
except ImportError:  # a Python other than CPython
    _signal = signal
_SIGINT, _getsignal, _set_signal = int(signal.SIGINT), _signal.getsignal, _signal.signal


class _State(threading.local):
    handler: Callable[[int, FrameType | None], Any] | None = None  # the user's, while this module replaces it
    depth = 0
    is_pending = False


_state = _State()


def is_pending() -> bool:
    """Whether a Ctrl-C has come and is deferred."""
    return _state.is_pending


class deferred:
    """Defer Ctrl-C inside the block. Outside the main thread this does nothing: Python runs signal handlers in the main
    thread only.

    A class, because `contextmanager` costs several calls, and every call on a sampler uses it.
    """

    _handler: Callable[[int, FrameType | None], Any] | None = None  # the user's, while this object replaces it
    _is_nested = False

    def __enter__(self) -> None:
        state = _state
        if state.handler is not None:  # changing a handler costs ten times as much as counting
            state.depth += 1
            self._is_nested = True
            return
        handler = _getsignal(_SIGINT)
        if not callable(handler):
            return
        state.is_pending, state.depth = False, 1
        self._handler = state.handler = handler
        try:
            _set_signal(_SIGINT, _on_sigint)
        except ValueError:  # this is not the main thread
            self._handler, state.handler, state.depth = None, None, 0
        except BaseException:  # of another signal handler
            self.__exit__()
            raise

    def __exit__(self, *exception: object) -> None:
        if self._is_nested:
            self._is_nested = False
            _state.depth -= 1
            if not _state.depth:
                _handle_pending()
        elif self._handler is not None:
            state, handler = _state, self._handler
            self._handler = state.handler = None
            state.depth = 0
            _set_signal(_SIGINT, handler)
            if state.is_pending:  # handled here and not deeper down, so that the traceback is short
                state.is_pending = False
                handler(_SIGINT, None)

    # The exception of another signal handler may come before the first line of `__exit__`.
    __del__ = __exit__


class _Nested:
    """A class: `contextmanager` takes longer, and the inference server enters it at every time step."""

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


class allowed:
    """Let Ctrl-C through: the work here can stop at any moment. One that is pending comes first.

    A class, because `contextmanager` takes longer.
    """

    _depth = 0

    def __enter__(self) -> None:
        self._depth, _state.depth = _state.depth, 0
        if _state.is_pending:
            try:
                _handle_pending()
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *exception: object) -> None:
        _state.depth = self._depth


def poll(poll: Any, milliseconds: float) -> list[tuple[int, int]]:
    """`poll.poll(milliseconds)` inside `allowed()`. A wait of every batch calls this: it is faster."""
    depth, _state.depth = _state.depth, 0
    try:
        if _state.is_pending:
            _handle_pending()
        return poll.poll(milliseconds)  # type: ignore[no-any-return]
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
