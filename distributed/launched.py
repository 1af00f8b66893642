"""Starts workers: as threads of this process, or as processes that end with it."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cloudpickle
import psutil

from penstock.distributed.role import Worker
from penstock.distributed.statuses import Status
from penstock.errors import ConfigError
from penstock.workers.handle import StackFile

if TYPE_CHECKING:
    from penstock.distributed.keys import Connection

_log = logging.getLogger("penstock")

_CHILD = "from penstock.distributed.launched import run_child; run_child({})"
_LENGTHS = struct.Struct("!QQ")
_REAP_SECONDS = 5.0  # how long `kill` waits for the end


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
            self._error = f": {type(error).__name__}: {error}"
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
    """A worker in another process. It gets its code through a pipe, and ends when the pipe is closed. So it ends with
    this process, in whatever way that ends, which is the panel's unless `has_joined`. Nothing reserves `resources` for
    it."""

    def __init__(
        self,
        make: Callable[[], Worker],
        connection: Connection,
        name: str,
        resources: object = None,
        *,
        has_joined: bool = False,
    ) -> None:
        paths = json.dumps(sys.path).encode()
        code = cloudpickle.dumps((make, connection, name, not has_joined))
        self._stacks = StackFile()
        file = self._stacks.file.fileno()
        command = [sys.executable, *_warnings(), "-c", _CHILD.format(file)]
        self._lock = threading.Lock()  # the panel's watcher calls `ending` too
        # A new process group: Ctrl-C reaches this process only, and the worker can be killed with all that it started.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, pass_fds=[file])
        self.pid = self._process.pid
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(_LENGTHS.pack(len(paths), len(code)) + paths + code)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended already: `ending` says how

    def ending(self) -> str | None:
        """How it has ended, or None while it runs."""
        code = self._reap()
        if code is None:
            return None
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def wait(self, timeout: float) -> bool:
        """Wait until it has ended. Returns whether it has. Then nothing that it has started is left."""
        deadline = time.monotonic() + timeout
        while self._reap() is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, 0.01))
        return True

    def kill(self) -> None:
        """Kill it, with everything that it has started."""
        with self._lock:
            if self._process.returncode is None:
                os.killpg(self.pid, signal.SIGKILL)
        self.wait(_REAP_SECONDS)

    def _reap(self) -> int | None:
        """Its exit code, or None while it runs. When it has ended, this kills what is left of its process group first:
        its process id, which the group has too, cannot be used again before the exit code is collected."""
        with self._lock:
            if self._process.returncode is None:
                with contextlib.suppress(ChildProcessError):  # other code has collected the exit code
                    if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                        return None
                    os.killpg(self.pid, signal.SIGKILL)
                self._process.wait()
                self._stacks.file.close()
                assert self._process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # it ended before it had read everything
                    self._process.stdin.close()
            return self._process.returncode

    def stacks(self) -> str:
        """The stacks of its threads, which its interpreter writes also while C code holds the lock."""
        with self._lock, contextlib.suppress(psutil.Error):
            if self._process.returncode is not None:
                return "its process has ended"
            if psutil.Process(self.pid).status() == psutil.STATUS_STOPPED:
                return "its process was stopped by a signal"
            self._stacks.clear()
            return self._stacks.ask(self.pid)
        return ""


def run_child(stack_file: int) -> None:
    """The main function of a process that `LaunchedProcess` has started. It writes its stacks to this descriptor."""
    stacks = StackFile(stack_file)
    stacks.install()
    n_paths, n_code = _LENGTHS.unpack(_read(_LENGTHS.size))
    sys.path[:] = json.loads(_read(n_paths))
    code = _read(n_code)  # from the parent, which may run any code here: so it is safe to unpickle it
    threading.Thread(target=_end_with_pipe, name="watchdog", daemon=True).start()
    make, connection, name, ends_with_panel = cloudpickle.loads(code)
    status = make().run(connection, name, ends_with_panel=ends_with_panel)
    sys.exit(1 if status is Status.ERROR else 0)


def _read(length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = os.read(0, min(length - len(parts), 2**20))
        if not part:
            os._exit(1)  # the parent has ended
        parts += part
    return bytes(parts)


def _end_with_pipe() -> None:
    """In a thread: when the parent has closed the pipe, or has ended, kill this process and what it has started."""
    while os.read(0, 1024):
        pass
    os.killpg(0, signal.SIGKILL)


def _warnings() -> list[str]:
    return [f"-W{option}" for option in sys.warnoptions]


def load_worker(text: str) -> tuple[type[Worker], int]:
    """The class and the index in `MODULE:CLASS/INDEX`; the index is 0 if it is left out. Raises `ConfigError`."""
    path, _, index = text.partition("/")
    module, _, name = path.partition(":")
    if not module or not name.isidentifier() or not (index or "0").isdigit():
        raise ConfigError(f"a worker is named MODULE:CLASS or MODULE:CLASS/INDEX, got {text!r}")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot load {path}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Worker)):
        raise ConfigError(f"{path} is {cls!r}, not a subclass of penstock.distributed.Worker")
    return cls, int(index or 0)


def snake(cls: Any) -> str:
    """`my_worker` for the class `MyWorker`."""
    name = cls.__name__
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))
