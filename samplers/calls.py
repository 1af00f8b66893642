"""The order of calls: where a sampler is in its life, and what it says to a call that comes at the wrong time."""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.errors import SamplerBrokenError, SamplerClosedError, SamplerStateError
from penstock.samplers.interrupts import interrupts

__all__ = ["Calls", "SamplerState"]


class SamplerState(enum.Enum):
    """Where a sampler is in its life. The value names the call that is expected next."""

    CREATED = "initialize"
    READY = "start_samples, obtain_samples or evaluate_agent"
    SAMPLING = "wait_samples, which gives the batch that has been started"
    BROKEN = "shutdown"
    CLOSED = "none"


class Calls:
    """One sampler's state, and the one call that is running on it."""

    def __init__(self, *, of_this_process: bool) -> None:
        """`of_this_process`: forks of it must not make calls."""
        self.state = SamplerState.CREATED
        self._pid = os.getpid() if of_this_process else None
        self._running: str | None = None
        self._lock = threading.Lock()
        self._error: SamplerBrokenError | None = None

    @contextmanager
    def expecting(self, name: str, *expected: SamplerState) -> Iterator[None]:
        """Around the call `name`, which is in order in the states `expected`.

        Raises `SamplerStateError` naming the call that is in order, or the error that broke the sampler. Ctrl-C is
        held back but where the call lets it pass.
        """
        if self.is_foreign:
            raise SamplerStateError(
                f"{name} was called in process {os.getpid()}, a fork of process {self._pid}, which the sampler and its "
                "workers belong to: make a sampler of this process's own"
            )
        with interrupts.held():
            if not self._lock.acquire(blocking=False):
                raise SamplerStateError(
                    f"{name} was called while {self._running} is running in another thread: one call at a time"
                )
            try:
                self._running = name
                self._check(name, expected)
                yield
            finally:
                self._running = None
                self._lock.release()

    @property
    def is_foreign(self) -> bool:
        """Whether this is a fork of the process that the sampler belongs to."""
        return self._pid is not None and self._pid != os.getpid()

    def break_with(self, error: SamplerBrokenError) -> None:
        """A worker has failed: every call gives `error` from now on."""
        self._error = error
        self.state = SamplerState.BROKEN

    def close(self) -> None:
        """The sampler has been shut down; a broken one stays broken."""
        if self.state is not SamplerState.BROKEN:
            self.state = SamplerState.CLOSED

    def _check(self, name: str, expected: Sequence[SamplerState]) -> None:
        if self.state in expected:
            return
        if self._error is not None:  # the same error as ever, with a traceback of its own
            raise type(self._error)(*self._error.args) from self._error.__cause__
        if self.state is SamplerState.CLOSED:
            raise SamplerClosedError(f"{name} was called after shutdown: make a new sampler")
        raise SamplerStateError(f"{name} was called out of order: the call expected now is {self.state.value}")
