"""Marks the programs that environments start, so that they end with the main process.

A program has the environment variables of the process that starts it, and /proc shows them. So the main process sets a
variable while it builds or resets an environment, and workers always have it. When the main process has ended, for
whatever reason, a shell kills every program that has the variable, also in other sessions. The shell reads from a pipe
whose other end the main process holds, so it notices this end.

As long as the main process lives, the shell kills nothing. A program may serve all environments of a process, not only
the one that started it.
"""

from __future__ import annotations

import os
import subprocess
import threading
from contextlib import AbstractContextManager, nullcontext, suppress

from penstock.workers.forks import abandon_in_forks

# The argument is the variable with its value. The part in braces runs in the background, so that it is no child of the
# main process. Programs may start others while they are killed, hence the second look.
_SCRIPT = """
exec 3<&0
{
    read -r line <&3
    sleep 0.5
    for look in 1 2; do
        for file in $(grep -lszxF -- "$1" /proc/[0-9]*/environ); do
            pid=${file#/proc/}
            kill -s KILL "${pid%/environ}"
        done
    done
} &
"""
_START_SECONDS = 5.0


class _Marking:
    """Sets the variable as long as some thread is inside of this context."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._threads: list[int] = []  # those inside, more than once if contexts are nested
        self._name, self._pipe = "", -1
        self.is_worker = False

    def variable(self) -> str:
        """The name of the variable. This starts the shell."""
        if self._pipe < 0:
            # A new name for each process: a program that uses penstock itself has several of these variables.
            self._name = f"PENSTOCK_PROCESS_{os.getpid()}_{os.urandom(8).hex()}"
            reader, self._pipe = os.pipe()
            abandon_in_forks(self)
            try:
                with suppress(OSError, subprocess.TimeoutExpired):  # without a shell, nothing is killed
                    subprocess.run(
                        ["/bin/sh", "-c", _SCRIPT, "marked", f"{self._name}=1"],
                        stdin=reader,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        cwd="/",
                        env=path_alone(),
                        start_new_session=True,  # Ctrl-C must not reach it
                        timeout=_START_SECONDS,
                        check=False,
                    )
            finally:
                os.close(reader)
        return self._name

    def __enter__(self) -> None:
        with self._lock:
            name = self.variable()
            self._threads.append(threading.get_ident())
            os.environ[name] = "1"

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads.remove(threading.get_ident())
            if not self._threads:
                # Not deleted: this would move other variables, while C code of another thread may read them.
                os.environ[self._name] = ""

    def abandon(self) -> None:
        """In a fork of the main process: the shell must see that the main process ends."""
        os.close(self._pipe)
        self._lock, self._pipe = threading.RLock(), -1
        self._threads = [thread for thread in self._threads if thread == threading.get_ident()]
        if not self._threads:  # else an environment makes this fork
            os.environ[self._name] = ""


_marking = _Marking()
_nothing = nullcontext()


def marked() -> AbstractContextManager[None]:
    """While this context lasts, programs that this process starts are marked."""
    return _nothing if _marking.is_worker else _marking


def worker_variables() -> dict[str, str]:
    """The variables that mark all programs of a worker."""
    return {} if _marking.is_worker else {_marking.variable(): "1"}


def note_worker() -> None:
    """This process is a worker: its variables mark all its programs."""
    _marking.is_worker = True


def path_alone() -> dict[str, str]:
    """The variables of a shell that watches: it must not be marked."""
    return {"PATH": os.environ.get("PATH", os.defpath)}
