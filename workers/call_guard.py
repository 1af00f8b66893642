"""The order of calls: where something with workers is in its life, and what it says to a call at the wrong time."""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.errors import SamplerBrokenError, SamplerClosedError, SamplerStateError
from penstock.workers.interrupts import interrupts

__all__ = ["Calls", "Lifetime"]

_State = TypeVar("_State", bound=enum.Enum)


@dataclass(frozen=True)
class Lifetime(Generic[_State]):
    """The states that all who have workers know, and what errors call them. A state's value names the calls that
    are expected in it."""

    first: _State
    broken: _State
    closed: _State
    noun: str  #: "sampler"
    end: str  #: the call that ends it


class Calls(Generic[_State]):
    """One sampler's state (or a vector environment's), and the one call that is running on it."""

    def __init__(self, lifetime: Lifetime[_State], *, of_this_process: bool) -> None:
        """`of_this_process`: forks of it must not make calls."""
        self._lifetime, self.state = lifetime, lifetime.first
        self._pid = os.getpid() if of_this_process else None
        self._running: str | None = None
        self._lock = threading.Lock()
        self._error: SamplerBrokenError | None = None

    @contextmanager
    def expecting(self, name: str, *expected: _State) -> Iterator[None]:
        """Around the call `name`, which is in order in the states `expected`.

        Raises `SamplerStateError` naming the call that is in order, or the error that broke it. Ctrl-C is held back
        but where the call lets it pass.
        """
        if self.is_foreign:
            noun = self._lifetime.noun
            raise SamplerStateError(
                f"{name} was called in process {os.getpid()}, a fork of process {self._pid}, which the {noun} and its "
                f"workers belong to: make a {noun} of this process's own"
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
        """Whether this is a fork of the process that it belongs to."""
        return self._pid is not None and self._pid != os.getpid()

    def break_with(self, error: SamplerBrokenError) -> None:
        """A worker has failed: every call gives `error` from now on."""
        self._error = error
        self.state = self._lifetime.broken

    def close(self) -> None:
        """It has been ended; what is broken stays broken."""
        if self.state is not self._lifetime.broken:
            self.state = self._lifetime.closed

    def _check(self, name: str, expected: Sequence[_State]) -> None:
        if self.state in expected:
            return
        if self._error is not None:  # the same error as ever, with a traceback of its own
            raise type(self._error)(*self._error.args) from self._error.__cause__
        if self.state is self._lifetime.closed:
            noun, end = self._lifetime.noun, self._lifetime.end
            raise SamplerClosedError(f"{name} was called after {end}: make a new {noun}")
        raise SamplerStateError(f"{name} was called out of order: the call expected now is {self.state.value}")
