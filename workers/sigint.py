"""Ctrl-C, deferred where it would leave something half done.

Inside `with deferred():` Ctrl-C takes effect at the end of the block, or in the first `with allowed():` inside. If it
has not after `_PATIENCE_SECONDS`, something may hang: then another one takes effect at once. Blocks may be nested in
any way. Outside the main thread they do nothing: Python runs signal handlers in the main thread only.
"""

from __future__ import annotations

# `signal` tries to make an enum's member of every handler, which takes several microseconds. A vector environment
# changes the handler at every step.
import _signal  # type: ignore[import-not-found]
import threading
import time
from typing import Any

_SIGINT, _getsignal, _set_signal = _signal.SIGINT, _signal.getsignal, _signal.signal
_PATIENCE_SECONDS = 3.0  # longer than `close` may take


class _State(threading.local):
    handler: Any = None  # the user's
    depth = 0  # of `deferred` blocks in the innermost `allowed` block
    pending_since: float | None = None  # when the Ctrl-C came that is deferred


_state = _State()


def is_pending() -> bool:
    """Whether a Ctrl-C has come and is deferred."""
    return _state.pending_since is not None


class deferred:
    """Defer Ctrl-C inside the block. A class, because `contextmanager` takes longer, and every call enters this."""

    _replaces = False  # whether this block has replaced the user's handler

    def __enter__(self) -> None:
        state, handler = _state, _getsignal(_SIGINT)
        self._depth = state.depth
        state.depth += 1
        if handler is not _on_sigint and callable(handler):
            state.handler, state.pending_since, self._depth, state.depth = handler, None, 0, 1
            try:
                _set_signal(_SIGINT, _on_sigint)
                self._replaces = True
            except ValueError:
                pass  # this is not the main thread

    def __exit__(self, *exception: object) -> None:
        if self._replaces:
            self._replaces = False
            _set_signal(_SIGINT, _state.handler)
        state = _state
        state.depth = self._depth
        if state.pending_since is not None and not self._depth:
            _handle_pending()


class allowed:
    """Let Ctrl-C through: the work here can stop at any moment. One that is pending comes first. An exception of a
    signal handler that ends this block does no harm: `was_allowed` tells it from others."""

    def __enter__(self) -> None:
        self._depth, _state.depth = _state.depth, 0
        if _state.pending_since is not None:
            _handle_pending()

    def __exit__(self, kind: object = None, error: BaseException | None = None, *_: object) -> None:
        _state.depth = self._depth
        if error is not None:
            vars(error)["_was_allowed"] = True


def was_allowed(error: BaseException) -> bool:
    """Whether `error` has ended an `allowed` block."""
    return "_was_allowed" in vars(error)


def _on_sigint(number: int, frame: object) -> None:
    now = time.monotonic()
    if _state.pending_since is None:
        _state.pending_since = now
    if not _state.depth or now - _state.pending_since > _PATIENCE_SECONDS:
        _handle_pending(frame)


def _handle_pending(frame: object = None) -> None:
    _state.pending_since = None
    try:
        _state.handler(_SIGINT, frame)
    except BaseException as error:
        if not _state.depth:  # also if `allowed` does not see it: before its first line, or in its last
            vars(error)["_was_allowed"], _state.depth = True, 1
        raise
