"""Faults: the ways in which a worker can raise, exit, crash, hang or be slow, at a place that a test chooses."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from penstock.errors import ConfigError

_HOUR = 3600  # seconds of one sleep; the sleeps never end


class InjectedFault(Exception):
    """What "raise" raises: an ordinary exception, which can be pickled."""


class UnpicklableFault(InjectedFault):
    """What "unpicklable" raises: it has a message, but cannot be pickled."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("an UnpicklableFault cannot be pickled")


class UnprintableFault(InjectedFault):
    """What "unprintable" raises: its `__str__` and `__repr__` raise, and it has a megabyte of arguments."""

    def __init__(self, message: str) -> None:
        super().__init__(message * (1_000_000 // max(len(message), 1)))

    def __str__(self) -> NoReturn:
        raise RuntimeError("an UnprintableFault has no text")

    __repr__ = __str__


@dataclass(frozen=True)
class Fault:
    """How a worker fails, and at which call. Where it fails is chosen when the fault is injected.
    `how` is one of:

    - "raise", "unpicklable", "unprintable": an exception, see `InjectedFault`, `UnpicklableFault`, `UnprintableFault`;
    - "system exit": `SystemExit`; "exit": `os._exit(0)`;
    - "kill": SIGKILL to itself; "segfault": a real one; "stop": SIGSTOP, until another process sends SIGCONT;
    - "delay": sleeps for `seconds`, then continues;
    - "hang": sleeps without end; "spin": loops without end, in Python; "hold the gil": sleeps without end in C code
      that holds the interpreter lock, so that no other thread of the process runs.

    Raises `ConfigError` if a field has a wrong value.
    """

    how: str
    at: int = 1  #: at which call it happens, counted from 1
    seconds: float = 1.0  #: of "delay"
    #: The path of a file that does not exist yet. Only the process that creates it fails, so a restarted worker does
    #: not fail again. None: every process fails at its call `at`.
    marker: str | None = None
    #: The pid of a process that never fails: usually the main process, which builds an environment to read its spaces.
    spare_pid: int | None = None

    def __post_init__(self) -> None:
        if self.how not in HOWS:
            raise ConfigError(f"how must be one of {', '.join(map(repr, HOWS))}, got {self.how!r}")
        if not isinstance(self.at, int) or isinstance(self.at, bool) or self.at < 1:
            raise ConfigError(f"at counts calls from 1 and must be a positive int, got {self.at!r}")
        if not (isinstance(self.seconds, int | float) and math.isfinite(self.seconds) and self.seconds >= 0):
            raise ConfigError(f"seconds must be a finite number, 0 or more, got {self.seconds!r}")
        if self.marker is not None and not Path(self.marker).parent.is_dir():
            raise ConfigError(f"marker={self.marker!r} is in a folder that does not exist: create the folder first")

    def fire(self) -> None:
        """Fail now, unless this process is `spare_pid` or another process has created the marker."""
        if os.getpid() != self.spare_pid and self._take_marker():
            _EFFECTS[self.how](self)

    def _take_marker(self) -> bool:
        """Whether this process may fail: there is no marker, or this process has created it."""
        if self.marker is None:
            return True
        try:
            os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True


class Trigger:
    """Counts the calls of one place in one process. At call `fault.at` the fault happens."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.calls = fault, 0

    def call(self) -> None:
        """Count one call."""
        self.calls += 1
        if self.calls == self.fault.at:
            self.fault.fire()


def _raiser(kind: type[BaseException]) -> Callable[[Fault], NoReturn]:
    def effect(fault: Fault) -> NoReturn:
        raise kind(f"a fault was injected: {fault.how} at call {fault.at}")

    return effect


def _segfault(fault: Fault) -> None:
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # no core file
    ctypes.string_at(0)


def _hang(fault: Fault) -> NoReturn:
    while True:
        time.sleep(_HOUR)


def _spin(fault: Fault) -> NoReturn:
    while True:
        pass


def _hold_the_gil(fault: Fault) -> NoReturn:
    sleep: Any = ctypes.PyDLL(None).sleep  # a PyDLL holds the interpreter lock during its calls
    while True:
        sleep(_HOUR)


_EFFECTS: dict[str, Callable[[Fault], object]] = {
    "raise": _raiser(InjectedFault),
    "unpicklable": _raiser(UnpicklableFault),
    "unprintable": _raiser(UnprintableFault),
    "system exit": _raiser(SystemExit),
    "exit": lambda fault: os._exit(0),
    "kill": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": _segfault,
    "delay": lambda fault: time.sleep(fault.seconds),
    "hang": _hang,
    "spin": _spin,
    "hold the gil": _hold_the_gil,
    "stop": lambda fault: os.kill(os.getpid(), signal.SIGSTOP),
}

#: Every `how` of a `Fault`.
HOWS = tuple(_EFFECTS)
