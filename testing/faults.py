"""Faults: the ways in which a worker can fail, delay or die, to be put where a test wants them."""

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

__all__ = ["HOWS", "Fault", "InjectedFault", "Trigger", "UnpicklableFault", "UnspeakableFault"]

_FOR_EVER = 3600  # seconds of one sleep among many


class InjectedFault(Exception):
    """What "raise" raises: an ordinary exception, which pickles."""


class UnpicklableFault(InjectedFault):
    """What "unpicklable" raises: it speaks, but it cannot be pickled."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("an UnpicklableFault cannot be pickled")


class UnspeakableFault(InjectedFault):
    """What "unspeakable" raises: its `__str__` and `__repr__` raise, and it weighs a megabyte."""

    def __init__(self, message: str) -> None:
        super().__init__(message * (1_000_000 // max(len(message), 1)))

    def __str__(self) -> NoReturn:
        raise RuntimeError("no words")

    __repr__ = __str__


@dataclass(frozen=True)
class Fault:
    """One way to fail, at one call of the place that it is put into.

    `how` is one of:

    - "raise", "unpicklable", "unspeakable": an exception (`InjectedFault`; one whose pickling fails; one
      whose `__str__` raises and that weighs a megabyte);
    - "system exit": `SystemExit`; "exit": `os._exit(0)`;
    - "kill": SIGKILL to itself; "segfault": a real one; "stop": SIGSTOP, until somebody sends SIGCONT;
    - "delay": sleeps `seconds`, then goes on;
    - "hang": sleeps for ever; "spin": busy for ever, in Python; "hold the gil": sleeps for ever in C code
      that keeps the interpreter lock, so that no other thread of the process runs.

    Raises `ConfigError` if a field is not what it must be.
    """

    how: str
    at: int = 1  #: the call, counted from 1, that it happens at
    seconds: float = 1.0  #: how long a delay lasts
    #: A path: only the process that creates this file fails, that is, one of all, and not again after a
    #: restart. None: it happens wherever call `at` is reached.
    marker: str | None = None
    #: A process that is never harmed: the main process, where an environment is built for its spaces alone.
    spare_pid: int | None = None

    def __post_init__(self) -> None:
        if self.how not in HOWS:
            raise ConfigError(f"how must be one of {', '.join(map(repr, HOWS))}, got {self.how!r}")
        if not isinstance(self.at, int) or isinstance(self.at, bool) or self.at < 1:
            raise ConfigError(f"at counts calls from 1 and must be a positive int, got {self.at!r}")
        if not (isinstance(self.seconds, int | float) and math.isfinite(self.seconds) and self.seconds >= 0):
            raise ConfigError(f"seconds must be a finite number, 0 or more, got {self.seconds!r}")
        if self.marker is not None and not Path(self.marker).parent.is_dir():
            raise ConfigError(f"marker={self.marker!r} lies in a folder that does not exist: make the folder first")

    def fire(self) -> None:
        """Let it happen here and now, unless this process is spared or another has taken the marker."""
        if os.getpid() == self.spare_pid or not self._take_marker():
            return
        _DEEDS[self.how](self)

    def _take_marker(self) -> bool:
        if self.marker is None:
            return True
        try:
            os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def _message(self) -> str:
        return f"a fault was injected: {self.how} at call {self.at}"


class Trigger:
    """Counts the calls of one place in one process, and fires at the one that the fault names."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.calls = fault, 0

    def call(self) -> None:
        """The place has been reached once more."""
        self.calls += 1
        if self.calls == self.fault.at:
            self.fault.fire()


# ---- the deeds -----------------------------------------------------------------------------


def _raiser(kind: type[BaseException]) -> Callable[[Fault], None]:
    def deed(fault: Fault) -> NoReturn:
        raise kind(fault._message())

    return deed


def _segfault(fault: Fault) -> None:
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # nobody wants a core file of it
    ctypes.string_at(0)


def _hang(fault: Fault) -> NoReturn:
    while True:
        time.sleep(_FOR_EVER)


def _spin(fault: Fault) -> NoReturn:
    while True:
        pass


def _hold_the_gil(fault: Fault) -> NoReturn:
    # A PyDLL keeps the interpreter lock during its calls; looked up before, for it is for ever.
    sleep: Any = ctypes.PyDLL(None).sleep
    while True:
        sleep(_FOR_EVER)


_DEEDS: dict[str, Callable[[Fault], object]] = {
    "raise": _raiser(InjectedFault),
    "unpicklable": _raiser(UnpicklableFault),
    "unspeakable": _raiser(UnspeakableFault),
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
HOWS = tuple(_DEEDS)
