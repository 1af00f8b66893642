"""The order of calls: one call at a time, each in a state that allows it."""

from __future__ import annotations

import enum
import os
import threading
import time
from copy import copy
from multiprocessing.util import Finalize
from typing import Any, Generic, TypeVar

from penstock.errors import SamplerBrokenError, SamplerClosedError, SamplerStateError
from penstock.workers import sigint
from penstock.workers.control import ControlBlock

_State = TypeVar("_State", bound=enum.Enum)

_CLOSE_SECONDS = 2.3  # how long `close` may wait for a call of another thread, with all that it does before


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
        self._pid: int | None = None
        if owned_by_process:
            self.own()
        self._lock = threading.Lock()  # a call holds it
        self._running: tuple[str, int] | None = None  # the name of this call, and its thread
        self._error: SamplerBrokenError | None = None

    def own(self) -> None:
        """From now on, the calls must come from this process."""
        self._pid = os.getpid()

    def _note_error(self, name: str, error: BaseException) -> None:
        """The call `name` has raised `error`."""
        pool = self._pool
        if self._is_closed:
            if isinstance(error, Exception) and not isinstance(error, SamplerClosedError):
                raise SamplerClosedError(
                    f"{name} was interrupted by {self._close_call}: make a new {self._noun}"
                ) from error
        elif isinstance(error, SamplerBrokenError):
            self._error, self.state = error, self._broken
        elif pool is None or sigint.was_allowed(error):
            pass
        elif pool.has_lost_command or not isinstance(error, Exception):  # of a signal handler
            self._error = SamplerBrokenError(
                f"{name} was interrupted by {type(error).__name__} in the middle. It is unknown what the workers have "
                f"done, so they have been closed: make a new {self._noun}"
            )
            self.state = self._broken
            pool.close(broken=True)

    def announce(self, control: ControlBlock) -> None:
        """A pool with this control block is being made: `close` sets its `quit` flag."""
        self._control = control
        self.check_open()

    def check_open(self) -> None:
        """Raise `SamplerClosedError` if another thread has closed the owner."""
        if self._is_closed:
            raise SamplerClosedError(f"{self._close_call} was called during start-up")

    def check_alive(self, name: str) -> None:
        """Raise the error of the call `name` if the owner is closed or broken, or belongs to another process."""
        self.check_own(name)
        if self.state in (self._broken, self._closed):
            raise self._refusal(name, is_busy=False)

    def check_own(self, name: str) -> None:
        """Raise `SamplerStateError` if the call `name` comes from a fork of the owner's process."""
        if self._pid is not None and self._pid != os.getpid():
            raise SamplerStateError(
                f"{name} was called in process {os.getpid()}, a fork of process {self._pid}, which owns the "
                f"{self._noun} and its workers: make a {self._noun} in this process"
            )

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
        running = self._running
        if running is None or running[1] != threading.get_ident():  # else this is a signal handler in the call
            if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                return False
            self._lock.release()
        return True

    def _refusal(self, name: str, *, is_busy: bool) -> SamplerStateError:
        if self._error is not None:  # the same error every time, with a new traceback
            error = copy(self._error)
            error.__cause__ = self._error.__cause__
            return error
        if self.state is self._closed:
            return SamplerClosedError(f"{name} was called after {self._close_call}: make a new {self._noun}")
        if is_busy:
            running, thread = self._running or ("another call", threading.get_ident())
            if thread != threading.get_ident():
                return SamplerStateError(
                    f"{name} was called while {running} is running in another thread: one call at a time"
                )
            return SamplerStateError(
                f"{name} was called while {running} is running: one call at a time. If an exception of a signal "
                f"handler has ended {running}, call {self._close_call} and make a new {self._noun}"
            )
        expected = self.expected.get(self.state, self.state.value)
        if name == "initialize":
            return SamplerStateError(
                f"initialize was called again, but the {self._noun} is already initialized: make a new {self._noun}, "
                f"or use this one. The call expected now is {expected}"
            )
        return SamplerStateError(f"{name} was called out of order: the call expected now is {expected}")


_defer, _undefer = sigint.deferred.__enter__, sigint.deferred.__exit__


class GuardedCall(sigint.deferred):
    """The context in which the call `name` of a user runs. It is allowed in the states `allowed`. Ctrl-C is deferred.

    Raises `SamplerStateError` naming the call that is expected. After a `SamplerBrokenError` every call raises that
    error. Whatever a call raises after `close` has interrupted it, the user gets a `SamplerClosedError`.

    It makes few calls: after other work, with cold caches, each is slow.
    """

    def __init__(self, guard: CallGuard[Any], name: str, *allowed: enum.Enum) -> None:
        self._guard, self._name, self._allowed = guard, name, allowed

    def __enter__(self) -> None:
        guard, name = self._guard, self._name
        if guard._pid is not None and guard._pid != os.getpid():
            guard.check_own(name)
        _defer(self)
        is_busy = not guard._lock.acquire(False)
        if not is_busy:
            if guard.state in self._allowed:
                guard._running = name, threading.get_ident()
                return
            guard._lock.release()
        _undefer(self)
        raise guard._refusal(name, is_busy=is_busy)

    def __exit__(self, *exception: Any) -> None:
        guard = self._guard
        try:
            if exception[1] is not None:
                guard._note_error(self._name, exception[1])
        finally:
            guard._running = None
            guard._lock.release()
            try:
                if guard._is_closed:  # `close` interrupted this call, which may have changed the state again
                    guard.state = guard._closed
                    if guard._pool is not None:
                        guard._pool.close()  # what `close` has left
            finally:
                _undefer(self)
