"""barrier_in and barrier_out, hub and spoke: one gate per worker, opened and watched by the main process.

A gate is two counts in shared memory, each with one writer, and a wake-up for each direction:

    main process                                   worker
    open():   opened += 1, wake the worker   -->   wait_in(): until opened > arrived     (barrier_in)
    arrived:  arrived == opened              <--   arrive():  arrived += 1, wake main    (barrier_out)

and, in between, where the inference server acts in the main process, at every step:

    question: asked != answered              <--   ask():     asked += 1, wake main, until answered
    answered = asked, then wake()            -->

Where the agent acts in a process of its own, that process is the one to wake for a question, and for an arrival too;
what wakes it is what wakes it for its own gate, which it has as all workers do.

The counts are the truth; a wake-up only says "look again", so a stray or doubled one does no harm, and
neither side can be wedged by the other's death: there is no lock to die with. Start-up is opening number
one, which no one waits for: the worker arrives once when it is ready.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import Any

from penstock.buffers.descriptors import InheritedFd
from penstock.workers.control import ControlBlock, Progress
from penstock.workers.spinning import spin

__all__ = ["Gate", "MainProcessGone", "WakeUp"]

_LOOK_AGAIN_MS = 1000


class MainProcessGone(Exception):
    """The main process has died; the worker has no reason to live."""


class WakeUp:
    """Wakes a process that polls `fileno()`: an eventfd, or a pipe where there is none."""

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self._read = self._write = InheritedFd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        else:
            read, write = os.pipe()
            os.set_blocking(read, False)
            os.set_blocking(write, False)
            self._read, self._write = InheritedFd(read), InheritedFd(write)

    def fileno(self) -> int:
        return self._read.fd

    def notify(self) -> None:
        """Wake the other side. Many at once are one."""
        try:
            os.write(self._write.fd, b"\1\0\0\0\0\0\0\0")
        except BlockingIOError:
            pass  # full: the other side has more than enough to wake it

    def clear(self) -> None:
        """Forget the wake-ups that have come."""
        try:
            while len(os.read(self._read.fd, 4096)) == 4096:
                pass
        except BlockingIOError:
            pass  # none had come

    def close(self) -> None:
        self._read.close()
        self._write.close()


class Gate:
    """One worker's gate; see the module's first lines. Pickles to that worker while it is started."""

    def __init__(
        self, control: ControlBlock, worker_rank: int, *, spin_seconds: float, server: Gate | None = None
    ) -> None:
        """`server` is the gate of the inference server, if that is a process of its own."""
        self._control, self._rank, self._spin_seconds = control, worker_rank, spin_seconds
        self._go, self._done = WakeUp(), WakeUp()
        self._server_go = None if server is None else server._go
        self._poll: Any = None  # the worker's, made there

    # ---- main process ----------------------------------------------------------------------

    def open(self) -> None:
        """Let the worker through barrier_in."""
        self._control.open(self._rank)
        self._go.notify()

    @property
    def arrived(self) -> bool:
        """The worker has answered the last opening: it stands at barrier_out."""
        return self._control.has_arrived(self._rank)

    def fileno(self) -> int:
        """Polled by the main process; readable when the worker may have arrived."""
        return self._done.fileno()

    def clear(self) -> None:
        """Main process: forget the worker's wake-ups, before looking at `arrived`."""
        self._done.clear()

    def close(self) -> None:
        self._go.close()
        self._done.close()

    # ---- inference server ---------------------------------------------------------------------

    def wake(self) -> None:
        """Wake the worker: its question has been answered."""
        self._go.notify()

    # ---- worker ----------------------------------------------------------------------------

    def wait_in(self, progress: Progress, main_process: Any) -> None:
        """Wait for the next opening. Raises `MainProcessGone` if `main_process` (a pidfd, or None where
        the watchdog alone looks after it) becomes readable."""
        began = time.monotonic()
        wanted = progress.arrived + 1
        self._wait(lambda: self._control.opened(self._rank) >= wanted, main_process)
        progress.add_waiting(time.monotonic() - began)

    def arrive(self, progress: Progress) -> None:
        """Answer the opening."""
        progress.arrived += 1
        self._done.notify()
        if self._server_go is not None:
            self._server_go.notify()

    def signal(self) -> None:
        """Have the main process look again, though this worker has not arrived."""
        self._done.notify()

    def ask(self, progress: Progress, question: int, main_process: Any) -> None:
        """Ask the inference server, in the middle of a batch, and wait for its answer. Raises as `wait_in` does,
        and `StopCollecting` once the sampler is shutting down."""
        progress.ask(question)
        (self._server_go or self._done).notify()
        self._wait(lambda: progress.is_answered, main_process)

    def _wait(self, has_come: Callable[[], bool], main_process: Any) -> None:
        if spin(has_come, self._spin_seconds):
            return
        while not has_come():
            self.sleep(main_process)

    def sleep(self, main_process: Any, milliseconds: int = _LOOK_AGAIN_MS) -> None:
        """Wait to be woken, so long at most; raises as `wait_in` does. What has come is for the caller to see."""
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self._go.fileno(), select.POLLIN)
            if main_process is not None:
                self._poll.register(main_process.fileno(), select.POLLIN)
        for fd, _ in self._poll.poll(milliseconds):
            if fd != self._go.fileno():
                raise MainProcessGone
        self._go.clear()
