"""What a game prints: in a file that the user names, or at the end of one without a name."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import tempfile
import threading
from typing import Any

from penstock import system
from penstock.errors import GameError
from penstock.workers.forks import HARMLESS_THREAD

_KEPT = 1 << 20  # bytes of a log without a name
_SECONDS = 0.25  # between two looks

_lock = threading.RLock()  # of what follows: a file that is cut must not be closed meanwhile
_cut: list[GameLog] = []  # the open logs without a name
_cutter: threading.Thread | None = None
_wake = threading.Event()


class GameLog:
    """The output of one start of a game. Raises `GameError` if the file cannot be written.

    Of a log without a name, only the newest MiB is kept, and what the game prints in a quarter of a second. A thread of
    this process sees to that, also while nobody asks the game anything. A file with a name is never cut.
    """

    def __init__(self, name: str | None) -> None:
        try:  # a temporary file has no name, so nothing stays
            self.file: Any = tempfile.TemporaryFile(buffering=0) if name is None else open(name, "a+b", 0)  # noqa: SIM115
        except OSError as error:
            advice = "Create its folder, or give another path"
            raise GameError(f"log_file={name!r} cannot be written: {error.strerror}. {advice}") from None
        # It appends, so that it goes on at the new end if the file is cut.
        fcntl.fcntl(self.file, fcntl.F_SETFL, fcntl.fcntl(self.file, fcntl.F_GETFL) | os.O_APPEND)
        self._start = os.fstat(self.file.fileno()).st_size  # what it had before
        if name is None:
            _keep_short(self)

    def end(self, n_bytes: int) -> str:
        """The last `n_bytes` of the output."""
        size = os.fstat(self.file.fileno()).st_size
        first = max(min(self._start, size), size - n_bytes)
        return os.pread(self.file.fileno(), size - first, first).decode(errors="replace")

    def cut(self) -> None:
        """Free the space of all but the newest MiB. The size stays, so that nothing is moved while the game prints."""
        fd = self.file.fileno()
        status = os.fstat(fd)
        if status.st_blocks * 512 <= 2 * _KEPT or status.st_size <= _KEPT:
            return
        if not system.punch(fd, status.st_size - _KEPT):
            kept = self.end(1 << 16).encode()  # no holes here: output that comes meanwhile may be lost
            os.truncate(fd, 0)
            os.write(fd, kept)

    def close(self) -> None:
        """Close the file. It may be called twice."""
        with _lock:
            if self in _cut:
                _cut.remove(self)
            self.file.close()
            if not _cut:
                _wake.set()


def _keep_short(log: GameLog) -> None:
    global _cutter  # noqa: PLW0603 - the one thread of this process
    with _lock:
        _cut.append(log)
        if _cutter is None:
            _wake.clear()
            _cutter = threading.Thread(target=_keep_all_short, name=HARMLESS_THREAD, daemon=True)
            _cutter.start()


def _keep_all_short() -> None:
    """In a thread, as long as there are logs without a name."""
    global _cutter  # noqa: PLW0603
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread handles signals
    while True:
        _wake.wait(_SECONDS)
        with _lock:
            for log in list(_cut):
                with contextlib.suppress(OSError, ValueError):  # it was closed in a finalizer
                    log.cut()
            if not _cut:
                _cutter = None
                return
            _wake.clear()


def _forget_in_fork() -> None:
    global _lock, _wake, _cutter
    _lock, _wake, _cutter = threading.RLock(), threading.Event(), None
    _cut.clear()


os.register_at_fork(after_in_child=_forget_in_fork)
