"""The order of calls: one call at a time, each in a state that allows it."""

from __future__ import annotations

import enum
import os
import sys
import threading
import time
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any, Generic, NamedTuple, TypeVar

from penstock.errors import SamplerBrokenError, SamplerClosedError, SamplerStateError
from penstock.workers import sigint
from penstock.workers.control import ControlBlock

_State = TypeVar("_State", bound=enum.Enum)

_CLOSE_SECONDS = 2.3  # how long `close` may wait for a call of another thread, with all that it does before
_CLOSE_POLL_SECONDS = 0.002


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
        self._is_closed = False
        self._noun, self._close_call = noun, close_call
        #: Texts that differ from the values of the states.
        self.expected: dict[_State, str] = {}
        self._pool: Any = None
        self._control: Any = None  # the control block of the pool that `start` will get
        self._pid = os.getpid() if owned_by_process else None
        # The running call, under the key 0. A dict and not a lock: `setdefault` is atomic, and a signal handler's
        # exception cannot come between the check and the entry.
        self._running: dict[int, _Call] = {}
        self._error: SamplerBrokenError | None = None

    def _note_error(self, name: str, error: BaseException) -> None:
        """The call `name` has raised `error`."""
        if isinstance(error, Exception):
            if self._is_closed and not isinstance(error, SamplerClosedError):
                raise SamplerClosedError(
                    f"{name} was interrupted by {self._close_call}: make a new {self._noun}"
                ) from error
            if isinstance(error, SamplerBrokenError):
                self._error, self.state = error, self._broken
                return
        # The error came while the workers got a command: it is unknown which of them have it.
        if self._pool is not None and self._pool.has_lost_command and not self._is_closed:
            self._error = SamplerBrokenError(
                f"{name} was interrupted by {type(error).__name__} while it gave a command to the workers, "
                f"so the workers have been closed: make a new {self._noun}"
            )
            self.state = self._broken

    def _take_over(self, call: _Call) -> None:
        """Take the place of the recorded call if it has ended. Raises `SamplerStateError` if it is still running.

        An exception of a signal handler may have ended it before it removed its record. So this looks for its frame on
        the stacks of all threads.
        """
        running = self._running[0]
        if _is_on_a_stack(running.frame):
            where = "" if running.thread == call.thread else " in another thread"
            raise SamplerStateError(
                f"{call.name} was called while {running.name} is running{where}: one call at a time"
            )
        self._running[0] = call

    def announce(self, control: ControlBlock) -> None:
        """A pool with this control block is being made: `close` sets its `quit` flag."""
        self._control = control
        self.check_open()

    def check_open(self) -> None:
        """Raise `SamplerClosedError` if another thread has closed the owner."""
        if self._is_closed:
            raise SamplerClosedError(f"{self._close_call} was called during start-up")

    def start(self, owner: object, pool: Any) -> None:
        """Wait until the workers of `pool` are ready. From now on the pool is closed with `owner`, and at exit."""
        # Runs when `owner` is garbage-collected, and at exit before multiprocessing joins children.
        self._finalizer = Finalize(owner, type(pool).close, (pool,), exitpriority=100)
        self._pool = pool
        try:
            self.check_open()  # after the line before: either `close` sees the pool, or this sees that it was called
            pool.wait("start-up")
        except BaseException:
            pool.close(broken=True)
            self._finalizer.cancel()
            self._pool = None
            raise

    def close(self) -> None:
        """Close the pool, unless this process is a fork of the owner. A broken owner stays broken.

        A call that another thread runs is interrupted. If it does not end soon, because user code runs, it closes the
        rest when it ends.
        """
        deadline = time.monotonic() + _CLOSE_SECONDS
        with sigint.deferred():
            if self.state is not self._broken:
                self._is_closed, self.state = True, self._closed
            if self._pid not in (None, os.getpid()):
                return
            if self._pool is not None:
                self._pool.close(await_call=lambda: self._await_call(deadline))
                self._finalizer.cancel()
            else:  # `initialize` may be running
                if self._control is not None:
                    self._control.quit = True
                self._await_call(deadline)

    def _await_call(self, deadline: float) -> bool:
        """Wait until the call that another thread runs has ended. Returns False if it has not at the deadline."""
        while (call := self._running.get(0)) and call.thread != threading.get_ident() and _is_on_a_stack(call.frame):
            if time.monotonic() > deadline:
                return False
            time.sleep(_CLOSE_POLL_SECONDS)
        return True

    def _refusal(self, name: str) -> SamplerStateError:
        if self._error is not None:  # the same error every time, with a new traceback
            error = type(self._error)(*self._error.args)
            error.__cause__ = self._error.__cause__
            if isinstance(error, SamplerBrokenError) and isinstance(self._error, SamplerBrokenError):
                error.episode = self._error.episode
            return error
        if self.state is self._closed:
            return SamplerClosedError(f"{name} was called after {self._close_call}: make a new {self._noun}")
        expected = self.expected.get(self.state, self.state.value)
        if name == "initialize":
            return SamplerStateError(
                f"initialize was called again, but the {self._noun} is already initialized: make a new {self._noun}, "
                f"or use this one. The call expected now is {expected}"
            )
        return SamplerStateError(f"{name} was called out of order: the call expected now is {expected}")


_new = tuple.__new__  # the class itself makes a named tuple in Python, not in C
_defer, _undefer = sigint.deferred.__enter__, sigint.deferred.__exit__


class GuardedCall(sigint.deferred):
    """The context in which the call `name` runs. It is allowed in the states `allowed`. Ctrl-C is deferred.

    Raises `SamplerStateError` naming the call that is expected. After a `SamplerBrokenError` every call raises that
    error. Whatever a call raises after `close` has interrupted it, the user gets a `SamplerClosedError`.

    It makes few calls: after other work, with cold caches, each is slow.
    """

    _call: _Call | None = None

    def __init__(self, guard: CallGuard[Any], name: str, *allowed: Any) -> None:
        self._guard, self._name, self._allowed = guard, name, allowed

    def __enter__(self) -> None:
        guard, name = self._guard, self._name
        if guard._pid is not None and guard._pid != os.getpid():
            raise SamplerStateError(
                f"{name} was called in process {os.getpid()}, a fork of process {guard._pid}, which owns the "
                f"{guard._noun} and its workers: make a {guard._noun} in this process"
            )
        try:
            _defer(self)
            # Frame 0 is this method, 1 is the method that the user has called.
            self._call = call = _new(_Call, (name, threading.get_ident(), sys._getframe(1)))
            if guard._running.setdefault(0, call) is not call:
                guard._take_over(call)
            if guard.state not in self._allowed:
                raise guard._refusal(name)
        except BaseException as error:
            self.__exit__(type(error), error)
            raise

    def __exit__(self, *exception: Any) -> None:
        call, guard = self._call, self._guard
        try:
            if call is not None:
                self._call = None
                try:
                    if exception[1] is not None:
                        guard._note_error(call.name, exception[1])
                finally:
                    if guard._running.get(0) is call:
                        del guard._running[0]
                        if guard._is_closed:  # `close` interrupted this call, which may have changed the state again
                            guard.state = guard._closed
                            if guard._pool is not None:
                                guard._pool.close()  # what `close` has left
        finally:
            _undefer(self)


def _is_on_a_stack(frame: FrameType) -> bool:
    """Whether a thread still runs this frame."""
    for top in sys._current_frames().values():
        current: FrameType | None = top
        while current is not None and current is not frame:
            current = current.f_back
        if current is not None:
            return True
    return False
