"""A worker's Python stack, which the interpreter's C code writes when the worker crashes or is asked."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time

from penstock.buffers.descriptors import InheritedFd, anonymous_file

# A real-time signal where the system has them: libraries and job schedulers use SIGUSR1 and SIGUSR2.
_ASK = int(signal.SIGRTMAX) - 3 if hasattr(signal, "SIGRTMAX") else int(signal.SIGUSR1)
_MAX_BYTES = 8 * 1024
_ANSWER_SECONDS = 0.5  # until the first line: a process may have to wait for a CPU
_QUIET_SECONDS = 0.15  # a stack that has not grown for so long is complete
_MOST_SECONDS = 1.0  # which the whole answer may take
_LOOK_SECONDS = 0.005
_LOOP = re.compile(r"workers[/\\]process\.py.* in _run_commands$", re.MULTILINE)  # below it, no frame is the user's


class StackFile:
    """An anonymous file that one worker's `faulthandler` writes to and the main process reads.

    Writing needs no interpreter lock, so it works in a crash, and while C code holds the lock.
    """

    def __init__(self, fd: int | None = None) -> None:
        """`fd`: the descriptor that this process was given of a file that another has made."""
        self.file = anonymous_file("penstock-stack") if fd is None else InheritedFd(fd)

    def install(self) -> None:
        """Worker: write here from now on, on a fatal signal or when the main process calls `ask`."""
        faulthandler.enable(self.file.fd, all_threads=True)
        faulthandler.register(_ASK, self.file.fd, all_threads=True, chain=False)

    def ask(self, pid: int) -> str:
        """Main process: the stack of the live worker `pid`, which has called `install`; empty if it does not answer."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _ASK)
            os.kill(pid, signal.SIGCONT)  # a stopped process cannot answer
        # A worker's stack is complete when it shows the worker's loop. In other processes, the only sign is that the
        # text stops growing. On a busy machine, a process may wait for a CPU in the middle of a line.
        began, size = time.monotonic(), 0
        until = began + _ANSWER_SECONDS
        while (now := time.monotonic()) < until:
            if len(text := self._text()) > size:
                until, size = min(now + _QUIET_SECONDS, began + _MOST_SECONDS), len(text)
                if _LOOP.search(text):
                    break
            time.sleep(_LOOK_SECONDS)
        return self.read()

    def read(self) -> str:
        """Main process: what the worker has written about the user's code and the collectors."""
        if not (text := self._text()):
            return ""
        threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", text.partition("\nExtension modules:")[0])
        return "\n".join(map(_shortened, threads)).strip()

    def _text(self) -> str:
        return os.pread(self.file.fd, _MAX_BYTES, 0).decode(errors="replace")

    def clear(self) -> None:
        """Main process: forget what a dead worker has written."""
        os.ftruncate(self.file.fd, 0)
        os.lseek(self.file.fd, 0, os.SEEK_SET)


def _shortened(stack: str) -> str:
    """Without the frames below the worker's loop; under fork there are many."""
    loop = _LOOP.search(stack)
    return stack[: loop.end()] if loop else stack.rstrip()
