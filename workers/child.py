"""A process that runs one function, and ends with this process."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import psutil

from penstock.buffers import pickling
from penstock.workers.handle import StackFile

_CHILD = "from penstock.workers.child import run_child; run_child({})"
_LENGTHS = struct.Struct("!QQ")
_REAP_SECONDS = 5.0  # how long `kill` waits for the end


class ChildProcess:
    """Runs `function` in another process, whose exit code is what it returns. The process gets the function through a
    pipe, and ends when the pipe is closed. So it ends with this process, in whatever way that ends. It inherits the
    descriptors `fds`, with the same numbers."""

    def __init__(self, function: Callable[[], int], fds: Sequence[int] = ()) -> None:
        paths = json.dumps(sys.path).encode()
        code = pickling.dumps(function)
        self._stacks = StackFile()
        file = self._stacks.file.fileno()
        command = [sys.executable, *_warnings(), "-c", _CHILD.format(file)]
        self._lock = threading.Lock()  # several threads may call `ending`
        # A new process group: Ctrl-C reaches this process only, and the other can be killed with all that it started.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, pass_fds=[file, *fds])
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
    """The main function of a process that `ChildProcess` has started. It writes its stacks to this descriptor."""
    stacks = StackFile(stack_file)
    stacks.install()
    n_paths, n_code = _LENGTHS.unpack(_read(_LENGTHS.size))
    sys.path[:] = json.loads(_read(n_paths))
    code = _read(n_code)  # from the parent, which may run any code here: so it is safe to unpickle it
    threading.Thread(target=_end_with_pipe, name="watchdog", daemon=True).start()
    sys.exit(pickle.loads(code)())


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
