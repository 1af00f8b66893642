"""Starts workers: as threads of this process, or as processes that end with it."""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.buffers import pickling
from penstock.buffers.unpicklable import not_picklable
from penstock.distributed.messages import describe
from penstock.distributed.role import Worker
from penstock.distributed.statuses import Status
from penstock.workers.failures import describe_exit
from penstock.workers.handle import StackFile, status_of
from penstock.workers.launcher import start_beside

if TYPE_CHECKING:
    from penstock.distributed.keys import Connection

_log = logging.getLogger("penstock")

_REAP_SECONDS = 5.0  # until a killed process has ended


class LaunchedThread:
    """A worker in a thread of this process. Nothing reserves `resources` for it."""

    def __init__(self, make: Callable[[], Worker], connection: Connection, name: str, resources: object = None) -> None:
        self.pid = os.getpid()
        self._error = ""
        self._thread = threading.Thread(target=self._run, args=(make, connection, name), name=name, daemon=True)
        self._thread.start()

    def _run(self, make: Callable[[], Worker], connection: Connection, name: str) -> None:
        try:
            make().run(connection, name)
        except Exception as error:  # it could not begin: `run` reports later errors itself
            self._error = f": {describe(error)}"
            _log.exception("worker %s could not be started", name)

    def ending(self) -> str | None:
        """How it has ended, or None while it runs."""
        return None if self._thread.is_alive() else f"its thread has ended{self._error}"

    def wait(self, timeout: float) -> bool:
        """Wait until it has ended. Returns whether it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def kill(self) -> None:
        """A thread cannot be killed: it ends with this process."""

    def stacks(self) -> str:
        """Its stack."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "its thread has ended" if frame is None else "".join(traceback.format_stack(frame))


class LaunchedProcess:
    """A worker in another process. It ends with this process, which is the panel's unless `has_joined`. Nothing
    reserves `resources` for it."""

    def __init__(
        self,
        make: Callable[[], Worker],
        connection: Connection,
        name: str,
        resources: object = None,
        *,
        has_joined: bool = False,
    ) -> None:
        """Raises `ConfigError` if `make` cannot be pickled."""
        try:
            work = pickling.dumps(partial(run_worker, make, connection, name, ends_with_panel=not has_joined))
        except Exception as error:  # pickling calls code of the user's
            raise not_picklable(f"what makes {name} cannot be pickled for its process", make, error) from error
        self._stacks, self._lock = StackFile(), threading.RLock()
        self._ending: str | None = None
        self._process = start_beside(f"worker {name}", _unpickled, work, self._stacks)
        self.pid = self._process.pid

    def ending(self) -> str | None:
        """How it has ended, or None while it runs. Then nothing of its process group is left."""
        with self._lock:
            if self._ending is None and (code := self._process.join(0)) is not None:
                self._ending = describe_exit(code)
                self._process.close()
                self._stacks.file.close()
            return self._ending

    def wait(self, timeout: float) -> bool:
        """Wait until it has ended. Returns whether it has."""
        deadline = time.monotonic() + timeout
        while self.ending() is None and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.01))  # other threads may ask meanwhile
        return self.ending() is not None

    def kill(self) -> None:
        """Kill its process group."""
        self._process.kill()
        self.wait(_REAP_SECONDS)

    def stacks(self) -> str:
        """The stacks of its threads, which its interpreter writes also while C code holds the lock."""
        with self._lock:
            if self.ending() is not None:
                return "its process has ended"
            if status_of(self.pid) == "stopped":
                return "its process was stopped by a signal"
            return self._stacks.ask(self.pid)


def _unpickled(work: bytes, stacks: StackFile) -> int:
    """In the process of a worker."""
    stacks.install()
    return pickle.loads(work)()  # type: ignore[no-any-return]


def run_worker(make: Callable[[], Worker], connection: Connection, name: str, *, ends_with_panel: bool) -> int:
    """What the process of a worker does. Returns its exit code."""
    worker = make()
    status = worker.run(connection, name, ends_with_panel=ends_with_panel)
    return int(status is Status.ERROR or bool(worker.configure_error))


def snake(cls: Any) -> str:
    """`my_worker` for the class `MyWorker`."""
    name = cls.__name__
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))
