"""The lookout: a thread that watches the workers while the main process runs the user's own code."""

from __future__ import annotations

import logging
import select
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.workers.gates import WakeUp, notify
from penstock.workers.handle import WorkerHandle
from penstock.workers.monitor import Monitor

_log = logging.getLogger("penstock")

_AGAIN_SECONDS = 0.02  # when to look again at a worker that has died while the main process waits
THREAD_NAME = "penstock lookout"


class Lookout:
    """Logs deaths of workers, notes their progress, and warns if one makes none. It changes nothing else: the next wait
    of the main process finds the same, and raises the error.

    Stop it before the descriptors of workers are closed, which it polls.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._handles: Sequence[WorkerHandle] = ()
        self._wake: WakeUp | None = None
        self._thread: threading.Thread | None = None
        self._must_end = False

    def start(self, handles: Sequence[WorkerHandle]) -> None:
        """Main process: watch these workers from now on."""
        self.stop()
        self._must_end, wake = False, WakeUp()
        self._handles, self._wake = handles, wake
        self._thread = threading.Thread(target=self._run, args=(handles, wake), name=THREAD_NAME, daemon=True)
        self._thread.start()
        _running.add(self)

    def stop(self) -> None:
        """Main process: end the thread. It may be called twice."""
        thread, wake = self._thread, self._wake
        if thread is None or wake is None:
            return
        self._must_end = True
        notify(wake.writer.fd)
        if thread is not threading.current_thread():  # the garbage collector may run a finalizer in any thread
            thread.join()
        self._thread = self._wake = None
        _running.discard(self)
        wake.close()

    def _run(self, handles: Sequence[WorkerHandle], wake: WakeUp) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread handles signals
        monitor, poll = self._monitor, select.poll()
        poll.register(wake.fileno(), select.POLLIN)
        watched = {handle.death_fd: handle for handle in handles}
        for fd in watched:
            poll.register(fd, select.POLLIN)
        while True:
            found = poll.poll(max(1, round(monitor.note_seconds * 1000)))
            if self._must_end:
                return
            dead = [fd for fd, _ in found if fd in watched]
            if dead and monitor.is_waiting:  # most likely, the running wait will report it
                time.sleep(_AGAIN_SECONDS)
                continue
            for fd in dead:
                poll.unregister(fd)
                self._report(watched.pop(fd))
            monitor.note_progress()

    def _report(self, handle: WorkerHandle) -> None:
        if not (self._monitor.is_closing or handle.is_reaped):
            status = self._monitor.status(handle)
            _log.warning("%s has ended while %s: the next call on the sampler will report it", status, status.doing)


_running: weakref.WeakSet[Lookout] = weakref.WeakSet()


@contextmanager
def all_stopped() -> Iterator[None]:
    """No lookout of this process runs inside this block: for a fork, which is not safe beside threads."""
    # In a fork of the process that started it, a lookout has no thread.
    stopped = [lookout for lookout in _running if lookout._thread is not None and lookout._thread.is_alive()]
    for lookout in stopped:
        lookout.stop()
    try:
        yield
    finally:
        for lookout in stopped:
            lookout.start(lookout._handles)
