"""Work that no signal handler interrupts: another thread does it, since Python runs signal handlers in the main thread.

The exception of a signal handler must not interrupt the start of a process. It would leave a process that the pool does
not know. Or it would end the fork server, which exits if a connection closes before it has received the descriptors.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_CHECK_SECONDS = 0.25
# How long an interrupted caller waits for the work, which may use what the caller will close. A start takes some
# milliseconds, unless the fork server is stopped or still imports; then it has the descriptors already.
_ABANDON_SECONDS = 5.0


class _Work(threading.Thread, Generic[T]):
    """Runs `work`. `abandon` undoes it, at once or when it has ended."""

    def __init__(self, work: Callable[[], T], undo: Callable[[T], Any]) -> None:
        super().__init__(name="penstock-start", daemon=True)
        self._work, self._undo, self._lock = work, undo, threading.Lock()
        self._has_begun = self._is_abandoned = self.is_settled = False
        self._deadline: float | None = None  # of the wait in `abandon`
        self.results: list[T] = []  #: one, when the work has succeeded
        self.error: BaseException | None = None
        # Not `join`: in some versions of Python, a thread counts as ended if an exception interrupts it.
        self.has_ended = threading.Event()

    def run(self) -> None:
        with self._lock:
            if self._is_abandoned:
                return
            self._has_begun = True
        try:
            result = self._work()
            with self._lock:
                self.results.append(result)
                is_wanted = not self._is_abandoned
            if not is_wanted:
                self._undo(result)
        except BaseException as error:  # the caller raises it
            self.error = error
        finally:
            self.has_ended.set()

    def abandon(self) -> None:
        """The caller does not want the result any more: undo the work. Work that has not begun never begins.

        An exception of a signal handler may end this anywhere. Then call it again, until `is_settled` is True.
        """
        with self._lock:
            if not self._has_begun:
                self._is_abandoned = self.is_settled = True
                return
            self._deadline = self._deadline or time.monotonic() + _ABANDON_SECONDS
        self.has_ended.wait(max(0.0, self._deadline - time.monotonic()))
        with self._lock:
            self._is_abandoned = True
        for result in self.results:
            self._undo(result)
        self.results.clear()
        self.is_settled = True

    def settle(self) -> None:
        """`abandon`, whatever signals come meanwhile. What a handler has raised is raised afterwards."""
        later: BaseException | None = None
        while not self.is_settled:
            try:
                self.abandon()
            except BaseException as error:
                later = error
        if later is not None:
            raise later


def uninterrupted(
    work: Callable[[], T], undo: Callable[[T], Any] = lambda _: None, check: Callable[[float], None] = lambda _: None
) -> T:
    """Run `work` in another thread, and return or raise as it does.

    If an exception interrupts the wait, `undo` gets the result, if need be later. `check` is called with the seconds so
    far whenever the work has not ended for a while; it may raise too.
    """
    thread, began = _Work(work, undo), time.monotonic()
    try:
        try:
            try:
                thread.start()
            except RuntimeError as error:  # the system allows no more threads
                raise BlockingIOError(errno.EAGAIN, str(error)) from error
            while not thread.has_ended.wait(_CHECK_SECONDS):
                check(time.monotonic() - began)
        except BaseException:
            thread.settle()
            raise
    except BaseException:
        thread.settle()  # again: another exception of a signal handler may have come just before the first time
        raise
    thread.join()
    if thread.error is not None:
        raise thread.error
    return thread.results[0]
