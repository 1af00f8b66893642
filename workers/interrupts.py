"""Ctrl-C, held back where it would leave something half done."""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# `signal` tries to make an enum's member of every handler that passes through it, which takes several microseconds and
# fails. What it wraps does not, and this is done at every step of a vector environment.
try:
    _bare: Any = importlib.import_module("_signal")
except ImportError:  # another Python than CPython
    _bare = signal

__all__ = ["Interrupts", "interrupts"]


class Interrupts(threading.local):
    """Within `with interrupts.held():` Ctrl-C is answered at the end, or in the first `with interrupts.passing():`
    inside. A second one is answered at once: the block may hang. Blocks may be nested in any way.

    `with interrupts:` holds it too, inside a `held()`: changing a handler costs ten times as much as counting, and
    this one is entered at every step.
    """

    _handler: Callable[[int, FrameType | None], Any] | None = None
    _depth = 0
    has_come = False  #: one is being held back

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold Ctrl-C back. Outside the main thread this does nothing, and need not: Python answers signals in the
        main thread alone."""
        is_main = threading.current_thread() is threading.main_thread()
        handler = _bare.getsignal(signal.SIGINT) if is_main and self._handler is None else None
        if not callable(handler):
            with self:
                yield
            return
        self._handler, self.has_come, self._depth = handler, False, 1
        try:
            _bare.signal(signal.SIGINT, self._note)
            yield
        finally:
            self._handler, self._depth = None, 0
            _bare.signal(signal.SIGINT, handler)
            if self.has_come:  # answered here and not deeper down, for the sake of a short traceback
                self.has_come = False
                handler(signal.SIGINT, None)

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Let Ctrl-C through here: what is done can be left at any moment. One that was held back comes first."""
        depth, self._depth = self._depth, 0
        try:
            self._answer_if_come()
            yield
        finally:
            self._depth = depth

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._answer_if_come()

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_second, self.has_come = self.has_come, True
        if is_second or not self._depth:
            self._answer_if_come(frame)

    def _answer_if_come(self, frame: FrameType | None = None) -> None:
        if self.has_come and self._handler is not None:
            self.has_come = False
            self._handler(signal.SIGINT, frame)


#: The process has one Ctrl-C, and so there is one of these.
interrupts = Interrupts()
