"""The order of calls: where a sampler is in its life, and what it says to a call that comes at the wrong time."""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.errors import SamplerBrokenError, SamplerClosedError, SamplerStateError

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

    def __init__(self) -> None:
        self.state = SamplerState.CREATED
        self._running: str | None = None
        self._lock = threading.Lock()
        self._error: SamplerBrokenError | None = None

    @contextmanager
    def expecting(self, name: str, *expected: SamplerState) -> Iterator[None]:
        """Around the call `name`, which is in order in the states `expected`.

        Raises `SamplerStateError` naming the call that is in order, or the error that broke the sampler.
        """
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
