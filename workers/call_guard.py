"""The order of calls: one call at a time, each in a state that allows it."""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.errors import SamplerBrokenError, SamplerClosedError, SamplerStateError
from penstock.workers import sigint

_State = TypeVar("_State", bound=enum.Enum)


@dataclass(frozen=True)
class StateTable(Generic[_State]):
    """The states that every owner of workers has, and its words in errors. A state's value names the calls that are
    expected in it."""

    first: _State
    broken: _State
    closed: _State
    noun: str  #: "sampler"
    close_call: str  #: the call that closes it


class CallGuard(Generic[_State]):
    """The state of one sampler or vector environment, and the call that runs on it."""

    def __init__(self, table: StateTable[_State], *, owned_by_process: bool) -> None:
        """`owned_by_process`: forks of this process must not make calls."""
        self._table, self.state = table, table.first
        self._pid = os.getpid() if owned_by_process else None
        self._running: str | None = None
        self._lock = threading.Lock()
        self._error: SamplerBrokenError | None = None

    @contextmanager
    def require(self, name: str, *allowed: _State) -> Iterator[None]:
        """Run the call `name`, which the states `allowed` allow. Ctrl-C is deferred.

        Raises `SamplerStateError` naming the call that is expected. After a `SamplerBrokenError` every call raises that
        error.
        """
        if self._pid is not None and self._pid != os.getpid():
            noun = self._table.noun
            raise SamplerStateError(
                f"{name} was called in process {os.getpid()}, a fork of process {self._pid}, which owns the {noun} and "
                f"its workers: make a {noun} in this process"
            )
        with sigint.deferred():
            if not self._lock.acquire(blocking=False):
                raise SamplerStateError(
                    f"{name} was called while {self._running} is running in another thread: one call at a time"
                )
            try:
                self._running = name
                if self.state not in allowed:
                    raise self._refusal(name)
                yield
            except SamplerBrokenError as error:
                self._error, self.state = error, self._table.broken
                raise
            finally:
                self._running = None
                self._lock.release()

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a fork of the owner."""
        return self._pid is not None and self._pid != os.getpid()

    @property
    def is_open(self) -> bool:
        """Whether it is neither broken nor closed."""
        return self.state not in (self._table.broken, self._table.closed)

    def close(self) -> None:
        """It has been closed; a broken one stays broken."""
        if self.state is not self._table.broken:
            self.state = self._table.closed

    def _refusal(self, name: str) -> SamplerStateError:
        if self._error is not None:  # the same error every time, with a new traceback
            error = type(self._error)(*self._error.args)
            error.__cause__ = self._error.__cause__
            return error
        if self.state is self._table.closed:
            return SamplerClosedError(
                f"{name} was called after {self._table.close_call}: make a new {self._table.noun}"
            )
        return SamplerStateError(f"{name} was called out of order: the call expected now is {self.state.value}")
