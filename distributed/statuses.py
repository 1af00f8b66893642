"""The statuses of a worker, and which command is allowed in which of them."""

from __future__ import annotations

import enum
import threading

from penstock.errors import RequestError


class Status(str, enum.Enum):
    """The status of a worker. Only a control panel uses UNRESPONSIVE, LOST and UNKNOWN."""

    READY = "READY"  #: it runs, and waits for `configure` or `start`
    RUNNING = "RUNNING"  #: it polls
    PAUSING = "PAUSING"  #: it finishes its last poll
    PAUSED = "PAUSED"  #: it waits for `start`, and its figures are those of its last poll
    COMPLETED = "COMPLETED"  #: it has ended after `exit`
    INTERRUPTED = "INTERRUPTED"  #: it has ended after `interrupt`
    ERROR = "ERROR"  #: it has ended because one of its methods raised, or because the name table has gone
    UNRESPONSIVE = "UNRESPONSIVE"  #: its process lives, but does not answer
    LOST = "LOST"  #: it has ended without a report, or cannot be reached
    UNKNOWN = "UNKNOWN"  #: the panel has never seen a worker of this name


FINAL = frozenset({Status.COMPLETED, Status.INTERRUPTED, Status.ERROR})

_CHANGES = {  # command: in which statuses it is allowed, and the status after it
    "start": ((Status.READY, Status.PAUSED), Status.RUNNING),
    "pause": ((Status.RUNNING,), Status.PAUSED),
    "exit": ((Status.READY, Status.RUNNING, Status.PAUSED), Status.COMPLETED),
    "interrupt": ((Status.READY, Status.RUNNING, Status.PAUSED), Status.INTERRUPTED),
}


class StatusMachine:
    """The status of one worker. Any thread may call it. PAUSED includes PAUSING, which only `shown` tells apart."""

    def __init__(self) -> None:
        self.status, self.is_configured = Status.READY, False
        self._is_polling = False
        self._lock = threading.Lock()

    @property
    def shown(self) -> str:
        """The status, as others see it."""
        return (Status.PAUSING if self.status is Status.PAUSED and self._is_polling else self.status).value

    def begin_poll(self) -> bool:
        """Whether the worker polls now."""
        with self._lock:
            self._is_polling |= self.status is Status.RUNNING
            return self.status is Status.RUNNING

    def end_poll(self, *, has_new_figures: bool) -> None:
        """The worker has polled. It is PAUSED only after it has sent the figures that it has since it paused."""
        with self._lock:
            self._is_polling &= self.status is Status.PAUSED and not has_new_figures

    def apply(self, command: str) -> str:
        """Do `start`, `pause`, `exit` or `interrupt`. Returns the new status. Raises `RequestError` out of order."""
        allowed, after = _CHANGES[command]
        with self._lock:
            if self.status not in allowed:
                raise RequestError(f"{command}: the worker is {self.status.value}, not {_either(allowed)}")
            if command == "start" and not self.is_configured:
                raise RequestError("start: the worker is not configured: send configure first")
            self.status = after
            self._is_polling |= command == "pause"  # until its figures are those of the last poll
            return self.shown

    def check_configure(self) -> None:
        """Raise `RequestError` if the worker cannot be configured now."""
        if self.is_configured:
            raise RequestError("configure: the worker is configured already: send reconfigure")
        if self.status is not Status.READY:
            raise RequestError(f"configure: the worker is {self.status.value}, not READY")

    def fail(self) -> None:
        """The worker has failed: its status is ERROR from now on."""
        with self._lock:
            self.status = Status.ERROR


def _either(statuses: tuple[Status, ...]) -> str:
    return " or ".join(status.value for status in statuses)
