"""barrier_in and barrier_out: one gate per worker, opened and watched by the main process.

A gate is two counts in shared memory, each with one writer, and a wake-up in each direction:

    main process                                   worker
    open():   opened += 1, wake the worker   -->   wait_in(): until opened > arrived     (barrier_in)
    arrived:  arrived == opened              <--   arrive():  arrived += 1, wake main    (barrier_out)

With central inference, workers also send requests in the middle of a batch:

    inference server                               worker
    request: requested != replied            <--   request(): requested += 1, wake the server, wait for the reply
    replied = requested, then wake()         -->

If the inference server is a process, it has a gate too. Requests and arrivals wake it through that gate.

The counts are the truth. A wake-up only says "look again", so an extra one does no harm. There is no lock, so a process
that dies cannot block the other side. Opening number one is start-up: the worker arrives once when it is ready.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence

from penstock.buffers.descriptors import InheritedFd, InheritedFds
from penstock.buffers.ordering import fence
from penstock.workers.control import Command, ControlBlock
from penstock.workers.progress import Phase, Progress
from penstock.workers.spinning import spin

_POLL_MS = 1000


class MainProcessGone(Exception):
    """The main process has died, so the worker must exit."""


class WakeUp:
    """Wakes a process that polls `fileno()`: an eventfd, or a pipe where eventfd is missing or refused."""

    def __init__(self) -> None:
        try:
            self._read = self._write = InheritedFd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        except (AttributeError, OSError):
            read, write = os.pipe()
            os.set_blocking(read, False)
            os.set_blocking(write, False)
            self._read, self._write = InheritedFd(read), InheritedFd(write)

    def fileno(self) -> int:
        return self._read.fd

    def notify(self) -> None:
        """Wake the other side."""
        _notify(self._write.fd)

    def clear(self) -> None:
        """Forget the wake-ups that have arrived."""
        try:
            while len(os.read(self._read.fd, 4096)) == 4096:
                pass
        except BlockingIOError:
            pass  # none had arrived

    def close(self) -> None:
        self._read.close()
        self._write.close()


def _notify(fd: int) -> None:
    try:
        os.write(fd, b"\1\0\0\0\0\0\0\0")
    except BlockingIOError:
        pass  # a full pipe wakes the other side too


class Gate:
    """One worker's gate, as the module describes it. It can be pickled only to a worker that is being started."""

    def __init__(
        self, control: ControlBlock, worker_rank: int, *, spin_seconds: float, server: Gate | None = None
    ) -> None:
        """`server` is the gate of the inference server, if that is a process."""
        self._control, self._rank, self._spin_seconds = control, worker_rank, spin_seconds
        #: A pidfd of the main process. The worker sets it; None: only the watchdog thread watches the main process.
        self.main_process: InheritedFd | None = None
        self._go, self._done = WakeUp(), WakeUp()
        self._server_go = None if server is None else server._go
        self._poll: select.poll | None = None  # the worker makes it

    # ---- main process ----------------------------------------------------------------------

    def open(self, command: Command = Command()) -> None:  # noqa: B008 - immutable
        """Let the worker through barrier_in, to run `command`."""
        self._control.open(self._rank, command)
        self._go.notify()

    def fileno(self) -> int:
        """The main process polls it: readable when the worker may have arrived."""
        return self._done.fileno()

    def clear(self) -> None:
        """Main process: forget the worker's wake-ups, before looking whether it has arrived."""
        self._done.clear()

    def close(self) -> None:
        self._go.close()
        self._done.close()

    def wake(self) -> None:
        """Wake the worker: its request has a reply."""
        self._go.notify()

    # ---- worker ----------------------------------------------------------------------------

    def wait_in(self, progress: Progress) -> None:
        """Wait for the next opening. Raises `MainProcessGone` if `main_process` becomes readable."""
        began = time.monotonic()
        wanted = progress.arrived + 1
        self._wait(lambda: self._control.opened(self._rank) >= wanted)
        progress.add_waiting(time.monotonic() - began)

    def arrive(self, progress: Progress) -> None:
        """Complete the opening."""
        progress.arrived += 1
        self._done.notify()
        if self._server_go is not None:
            self._server_go.notify()

    def signal(self) -> None:
        """Wake the main process, though this worker has not arrived."""
        self._done.notify()

    def request(self, progress: Progress, kind: int) -> None:
        """Send a request of this kind to the inference server and wait for the reply. Raises as `wait_in` does, and
        `StopCollecting` once the sampler shuts down."""
        progress.request(kind)
        (self._server_go or self._done).notify()
        self._wait(lambda: progress.has_reply)
        progress.enter(Phase.ACTING)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        if not spin(is_done, self._spin_seconds):
            while not is_done():
                self.sleep()
        fence()

    def sleep(self, milliseconds: int = _POLL_MS) -> None:
        """Sleep until something wakes this worker, at most for `milliseconds`. Raises as `wait_in` does."""
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self._go.fileno(), select.POLLIN)
            if self.main_process is not None:
                self._poll.register(self.main_process.fileno(), select.POLLIN)
        for fd, _ in self._poll.poll(milliseconds):
            if fd != self._go.fileno():
                raise MainProcessGone
        self._go.clear()


class GateWakers:
    """Lets an inference server in its own process wake the workers. It holds only the descriptors that `wake` writes
    to."""

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._fds = InheritedFds([gate._go._write.fd for gate in gates])

    def wake(self, rank: int) -> None:
        """Wake this worker: its request has a reply."""
        _notify(self._fds.fds[rank])

    def close(self) -> None:
        """Main process: close the socket, after the server has been started."""
        self._fds.close()
