"""barrier_in and barrier_out: one gate per worker, opened and watched by the main process.

A gate is two counts in shared memory, each with one writer, and a wake-up in each direction:

    main process                                   worker
    open:     opened += 1, wake the worker   -->   wait_in(): until opened > arrived     (barrier_in)
    arrived:  arrived == opened              <--   arrive():  arrived += 1, wake main    (barrier_out)

With central inference, workers also send requests in the middle of a batch:

    inference server                               worker
    request: requested != replied            <--   request(): requested += 1, wake the server, wait for the reply
    replied = requested, then wake()         -->

If the inference server is a process, it has a gate too. Requests and arrivals wake it through that gate.

The counts are the truth. A wake-up only says "look again", so an extra one does no harm. There is no lock, so a process
that dies cannot block the other side. Opening number one is start-up: the worker arrives once when it is ready.

Only a process that sleeps is woken. It writes into a shared word that it sleeps, and then looks at the counts once
more. The other side changes a count, and then reads this word. Both need a full fence in between (docs/protocol.md).
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

from penstock import system
from penstock.buffers.descriptors import InheritedFd
from penstock.buffers.ordering import HAS_FULL_FENCE, fence, full_fence
from penstock.workers.control import ASLEEP, AWAKE, FOR_ANY, HEARTBEAT, ControlBlock, Phase, Progress
from penstock.workers.spinning import SpinTime, must_wake, spin_for_word

_POLL_MS = 1000


class WakeUp:
    """Wakes a process that polls `reader`: an eventfd, or a pipe where the system has none."""

    def __init__(self) -> None:
        reader, writer = system.wake_up()
        self.reader = self.writer = InheritedFd(reader)
        if writer != reader:
            self.writer = InheritedFd(writer)

    def close(self) -> None:
        self.reader.close()
        self.writer.close()


def notify(fd: int) -> None:
    """Wake the process that polls the other end of this writer of a `WakeUp`."""
    try:
        os.write(fd, b"\1\0\0\0\0\0\0\0")
    except BlockingIOError:
        pass  # a full pipe wakes the other side too


def clear(fd: int) -> None:
    """Forget the wake-ups that have arrived at this reader of a `WakeUp`."""
    try:
        while len(os.read(fd, 4096)) == 4096:
            pass
    except BlockingIOError:
        pass  # none had arrived


class Gate:
    """One worker's gate, as the module describes it. It can be pickled only to a worker that is being started."""

    def __init__(
        self,
        control: ControlBlock,
        worker_rank: int,
        *,
        spin_seconds: float,
        yields: bool = True,
        server: Gate | None = None,
    ) -> None:
        """`spin_seconds`: the longest time that the worker spins before it sleeps. `yields`: whether it yields the CPU
        after each look at a word. `server` is the gate of the inference server, if that is a process."""
        self._control, self._rank, self._spin_seconds, self._yields = control, worker_rank, spin_seconds, yields
        #: They wake the worker, and the main process, which polls `done.reader`.
        self.go, self.done = WakeUp(), WakeUp()
        self._server_go = None if server is None else server.go
        self._server_rank = -1 if server is None else server._rank

    # ---- main process ----------------------------------------------------------------------

    def wake(self) -> None:
        """Wake the worker if it sleeps: its request has a reply."""
        if self._control.is_asleep(self._rank) or not HAS_FULL_FENCE:
            notify(self.go.writer.fd)

    # ---- worker ----------------------------------------------------------------------------

    def wait_in(self, progress: Progress) -> None:
        """Wait for the next opening. The worker has come to the gate at its last heartbeat."""
        came, side = progress.words[HEARTBEAT], self._side
        self._wait(side, side.opened, progress.arrived + 1, side.opening)
        progress.begin_record(came, time.monotonic_ns())

    def arrive(self, progress: Progress) -> None:
        """Complete the opening: the worker has reached barrier_out."""
        progress.arrived += 1
        self.wake_main()
        if self._server_go is not None:
            self._wake_server(self._server_go, progress.arrived)

    def wake_main(self) -> None:
        """Wake the main process, if it sleeps and waits for what this worker has just published."""
        if must_wake(*self._control.block, self._control.main_asleep) or not HAS_FULL_FENCE:
            notify(self.done.writer.fd)

    def wake_main_if(self, is_due: Callable[[], bool]) -> None:
        """Wake the main process if it sleeps, and `is_due()`: this worker has published something that it may wait for,
        and what it waits for is in shared memory."""
        full_fence()
        if not HAS_FULL_FENCE or (self._control.main_asleep[0] != AWAKE and is_due()):
            notify(self.done.writer.fd)

    def _wake_server(self, server_go: WakeUp, arrived: int | None = None) -> None:
        """Wake the inference server, if it sleeps and waits for what this worker has just published: a request, or
        that it has `arrived`."""
        side = self._side
        must = must_wake(*self._control.block, side.server_asleep) or not HAS_FULL_FENCE
        # With gates that are opened ahead, no worker is idle, but the command may be completed. The server has the rank
        # after the workers.
        if not must and arrived is not None and side.server_asleep[0] != AWAKE:
            must = self._control.have_completed(arrived, self._server_rank)
        if must:
            notify(server_go.writer.fd)

    def request(self, progress: Progress, kind: int) -> None:
        """Send a request of this kind to the inference server and wait for the reply. Raises `StopCollecting` once the
        sampler shuts down."""
        progress.request(kind)
        if self._server_go is None:
            self.wake_main()
        else:
            self._wake_server(self._server_go)
        side = self._side
        while not progress.has_reply:
            self._wait(side, side.replied, progress.n_requests, side.reply)
        progress.enter(Phase.ACTING)

    @cached_property
    def _side(self) -> _WorkerWords:
        return _WorkerWords(self._control, self._rank, self._server_rank, self._spin_seconds)

    def _wait(self, side: _WorkerWords, word: memoryview, value: int, spin_time: SpinTime) -> None:
        """Wait until `word[0]` reaches `value`, or until the sampler shuts down."""
        began, seconds, quits = time.monotonic(), spin_time.seconds, side.quits
        must_sleep = seconds == 0 or not spin_for_word(word, value, quits, seconds, self._yields)
        if must_sleep:
            while word[0] < value and not quits[0]:
                self.sleep(lambda: word[0] >= value or quits[0])
        fence()
        spin_time.note(time.monotonic() - began, must_sleep)

    def sleep(self, is_due: Callable[[], Any], milliseconds: float = _POLL_MS, wake_for: int = FOR_ANY) -> None:
        """Sleep until something wakes this worker, at most for `milliseconds`; not at all if `is_due()` is already
        True. `wake_for` says what must wake it (control.py)."""
        side = self._side
        if side.poll is None:
            side.poll = select.poll()
            side.poll.register(self.go.reader.fd, select.POLLIN)
        side.row[ASLEEP] = wake_for
        full_fence()
        ready = not is_due() and side.poll.poll(milliseconds)
        side.row[ASLEEP] = AWAKE
        if ready:
            clear(self.go.reader.fd)


class _WorkerWords:
    """What only the worker needs of its gate: the words that it looks at, and how long it spins."""

    def __init__(self, control: ControlBlock, rank: int, server_rank: int, spin_seconds: float) -> None:
        arrays = control.memory.arrays
        self.row, self.quits = memoryview(arrays.progress[rank]), control.quit_word
        self.opened, self.replied = memoryview(arrays.opened[rank : rank + 1]), memoryview(arrays.replied[rank])
        self.server_asleep = memoryview(arrays.progress[server_rank, ASLEEP:])
        # One for each kind of wait: how long a learner takes does not say how long a reply takes.
        self.opening, self.reply = SpinTime(spin_seconds), SpinTime(spin_seconds)
        self.poll: select.poll | None = None
