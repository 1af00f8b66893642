"""The order of calls: one call at a time, each in a state that allows it."""

from __future__ import annotations

import enum
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any, Generic, NamedTuple, TypeVar

from penstock.errors import SamplerBrokenError, SamplerClosedError, SamplerStateError
from penstock.workers import sigint

_State = TypeVar("_State", bound=enum.Enum)


class _Call(NamedTuple):
    """A call that is running."""

    name: str
    thread: int
    frame: FrameType  #: of the method that the user has called


class CallGuard(Generic[_State]):
    """The state of one sampler or vector environment, its pool, and the call that runs on it.

    `states` begins with the first state and has BROKEN and CLOSED. The value of a state names the calls that it
    expects.
    """

    def __init__(self, states: type[_State], noun: str, close_call: str, *, owned_by_process: bool) -> None:
        """`noun` and `close_call` are for errors. `owned_by_process`: the calls must come from this process, not from a
        fork of it."""
        self.state, self._broken, self._closed = next(iter(states)), states["BROKEN"], states["CLOSED"]
        self._noun, self._close_call = noun, close_call
        self._pool: Any = None
        self._pid = os.getpid() if owned_by_process else None
        # The running call, under the key 0. A dict and not a lock: `setdefault` is atomic, and a signal handler's
        # exception cannot come between the check and the entry.
        self._running: dict[int, _Call] = {}
        self._error: SamplerBrokenError | None = None

    @contextmanager
    def require(self, name: str, *allowed: _State) -> Iterator[None]:
        """Run the call `name`. It is allowed in the states `allowed`. Ctrl-C is deferred.

        Raises `SamplerStateError` naming the call that is expected. After a `SamplerBrokenError` every call raises that
        error.
        """
        if self._pid is not None and self._pid != os.getpid():
            raise SamplerStateError(
                f"{name} was called in process {os.getpid()}, a fork of process {self._pid}, which owns the "
                f"{self._noun} and its workers: make a {self._noun} in this process"
            )
        with sigint.deferred():
            # Frame 0 is this generator, 1 is contextlib's `__enter__`, 2 is the method that the user has called.
            call = _Call(name, threading.get_ident(), sys._getframe(2))
            try:
                if self._running.setdefault(0, call) is not call:
                    self._take_over(call)
                if self.state not in allowed:
                    raise self._refusal(name)
                yield
            except SamplerBrokenError as error:
                self._error, self.state = error, self._broken
                raise
            except BaseException as error:
                if self._pool is not None and self._pool.has_lost_command and self.state is not self._closed:
                    self._error = SamplerBrokenError(
                        f"{name} was interrupted by {type(error).__name__} while it gave a command to the workers, "
                        f"so the workers have been closed: make a new {self._noun}"
                    )
                    self.state = self._broken
                raise
            finally:
                if 0 in self._running and self._running[0] is call:
                    del self._running[0]

    def _take_over(self, call: _Call) -> None:
        """Take the place of the recorded call if it has ended. Raises `SamplerStateError` if it is still running.

        An exception of a signal handler may have ended it before it removed its record. So this looks for its frame on
        the stacks of all threads.
        """
        running = self._running[0]
        for top in sys._current_frames().values():
            frame: FrameType | None = top
            while frame is not None and frame is not running.frame:
                frame = frame.f_back
            if frame is not None:
                where = "" if running.thread == call.thread else " in another thread"
                raise SamplerStateError(
                    f"{call.name} was called while {running.name} is running{where}: one call at a time"
                )
        self._running[0] = call

    def start(self, owner: Any, pool: Any) -> None:
        """Wait until the workers of `pool` are ready. From now on the pool is closed with `owner`, and at exit."""
        self._pool = pool
        # Runs when `owner` is garbage-collected, and at exit before multiprocessing joins children.
        self._finalizer = Finalize(owner, type(pool).close, (pool,), exitpriority=100)
        try:
            pool.wait("start-up")
        except BaseException:
            pool.close(broken=True)
            self._finalizer.cancel()
            raise

    def close(self) -> None:
        """Close the pool, unless this process is a fork of the owner. A broken owner stays broken."""
        with sigint.deferred():
            if self.state is not self._broken:
                self.state = self._closed
            if self._pool is not None and self._pid in (None, os.getpid()):
                self._pool.close()
                self._finalizer.cancel()

    def _refusal(self, name: str) -> SamplerStateError:
        if self._error is not None:  # the same error every time, with a new traceback
            error = type(self._error)(*self._error.args)
            error.__cause__ = self._error.__cause__
            return error
        if self.state is self._closed:
            return SamplerClosedError(f"{name} was called after {self._close_call}: make a new {self._noun}")
        return SamplerStateError(f"{name} was called out of order: the call expected now is {self.state.value}")
