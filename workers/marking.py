"""Marks the programs that environments start, so that they end with the main process.

A program has the environment variables of the process that starts it, and /proc shows them. So the main process sets a
variable while it builds or runs environments, and workers always have it. When the main process has ended, for
whatever reason, a shell kills every program that has the variable, also in other sessions. The shell reads from a pipe
whose other end the main process holds, so it notices this end.

As long as the main process lives, the shell kills nothing. A program may serve all environments of a process, not only
the one that started it.
"""

from __future__ import annotations

import os
import subprocess
import threading
from contextlib import suppress

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

MARK_PREFIX = "PENSTOCK_PROCESS_"  # of the variables that mark programs
# With these variables, libraries would believe that a worker is an MPI process.
_MPI_PREFIXES = ("OMPI_", "PMI_")


class _Marking:
    """Sets the variable as long as some thread is inside of this context."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._threads: list[int] = []  # those inside, more than once if contexts are nested
        self._name, self._pipe, self._key = "", -1, b""

    def variable(self) -> str:
        """The name of the variable. This starts the shell."""
        if self._pipe < 0:
            # A new name for each process: a program that uses penstock itself has several of these variables.
            self._name = f"{MARK_PREFIX}{os.getpid()}_{os.urandom(8).hex()}"
            self._key = self._name.encode()
            reader, self._pipe = os.pipe()
            try:
                with suppress(OSError, subprocess.TimeoutExpired):  # without a shell, nothing is killed
                    subprocess.run(
                        ["/bin/sh", "-c", _SCRIPT, "marked", f"{self._name}=1"],
                        stdin=reader,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        cwd="/",
                        env={"PATH": os.environ.get("PATH", os.defpath)},  # it must not be marked itself
                        start_new_session=True,  # Ctrl-C must not reach it
                        timeout=_START_SECONDS,
                        check=False,
                    )
            finally:
                os.close(reader)
        return self._name

    def __enter__(self) -> None:
        with self._lock:
            if self._pipe < 0:
                self.variable()
            self._threads.append(threading.get_ident())
            os.environb[self._key] = b"1"  # bytes need no encoding, which takes longer than the rest

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads.remove(threading.get_ident())
            if not self._threads:
                # Not deleted: this would move other variables, while C code of another thread may read them.
                os.environb[self._key] = b""

    def _abandon(self) -> None:
        """In a fork of the main process: the shell must see that the main process ends."""
        if self._pipe < 0:
            return
        os.close(self._pipe)
        self._lock, self._pipe = threading.RLock(), -1
        self._threads = [thread for thread in self._threads if thread == threading.get_ident()]
        if not self._threads:  # else an environment makes this fork
            os.environ[self._name] = ""


#: `with marked:` programs that this process starts meanwhile are marked.
marked = _Marking()
os.register_at_fork(after_in_child=marked._abandon)


def worker_environ() -> dict[str, str]:
    """The environment variables of a worker: those of this process now, and the one that marks its programs."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_MPI_PREFIXES)}
    return {**environ, marked.variable(): "1"}
