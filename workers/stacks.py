"""A worker's Python stack, written by the interpreter's C code: when it crashes, or when it is asked to."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time

from penstock.buffers.descriptors import anonymous_file

__all__ = ["StackFile"]

# A real-time signal where there are such: libraries and job schedulers use SIGUSR1 and SIGUSR2 themselves.
_ASK = int(signal.SIGRTMAX) - 3 if hasattr(signal, "SIGRTMAX") else int(signal.SIGUSR1)
_MAX_BYTES = 8 * 1024
_ANSWER_SECONDS = 0.15
_LOOK_SECONDS = 0.005


class StackFile:
    """An anonymous file that one worker's `faulthandler` writes to and the main process reads.

    No interpreter lock is needed to write it, so it works while C code holds that, and in a crash.
    """

    def __init__(self) -> None:
        self._file = anonymous_file("penstock-stack")

    def install(self) -> None:
        """Worker: write here from now on, on a fatal signal or when `ask`ed."""
        faulthandler.enable(self._file.fd, all_threads=True)
        faulthandler.register(_ASK, self._file.fd, all_threads=True, chain=False)

    def ask(self, pid: int) -> str:
        """Main process: the stack of the living worker `pid`, which must have installed this file; empty
        if it does not answer."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _ASK)
            os.kill(pid, signal.SIGCONT)  # a stopped process could not answer
        deadline = time.monotonic() + _ANSWER_SECONDS
        before = -1
        # It is complete when it has stopped growing: nothing else tells.
        while time.monotonic() < deadline and not before == (size := os.fstat(self._file.fd).st_size) > 0:
            before = size
            time.sleep(_LOOK_SECONDS)
        return self.read()

    def read(self) -> str:
        """Main process: what was written, as far as it concerns the user's code and the collectors."""
        text = os.pread(self._file.fd, _MAX_BYTES, 0).decode(errors="replace")
        threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", text.partition("\nExtension modules:")[0])
        return "\n".join(_shortened(part) for part in threads if "_watch_main_process" not in part).strip()

    def clear(self) -> None:
        """Main process: forget what a worker that is gone has written."""
        os.ftruncate(self._file.fd, 0)
        os.lseek(self._file.fd, 0, os.SEEK_SET)

    def close(self) -> None:
        self._file.close()


def _shortened(stack: str) -> str:
    """Without the frames below the worker's loop, of which there are many under fork."""
    lines = stack.rstrip().splitlines()
    for i, line in enumerate(lines):
        if re.search(r"workers[/\\]process\.py.* in _serve$", line):
            return "\n".join(lines[: i + 1])
    return "\n".join(lines)
