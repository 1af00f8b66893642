"""Ctrl-C held back for a moment, where it would leave something half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Interrupts"]


class Interrupts:
    """Within `with interrupts.watched():`, a block `with interrupts:` has Ctrl-C answered at its end.

    A second one is answered at once: the block may hang. The two are apart because changing a handler costs ten
    times as much as raising a flag, and the inner block is entered at every step. Blocks may be nested.
    """

    _handler: Callable[[int, FrameType | None], Any] | None = None
    _depth = 0
    has_come = False  #: one is being held back

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Be the one who answers SIGINT, for whoever does so otherwise."""
        # Python runs handlers in the main thread alone, so others have nothing to fear.
        is_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGINT) if is_main else None
        if not callable(handler):
            yield
            return
        self._handler, self.has_come, self._depth = handler, False, 0
        signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self.has_come and not self._depth:
            self._answer(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._depth and not self.has_come:
            self.has_come = True
        else:
            self._answer(number, frame)

    def _answer(self, number: int, frame: FrameType | None) -> None:
        self.has_come = False
        if self._handler is not None:
            self._handler(number, frame)
