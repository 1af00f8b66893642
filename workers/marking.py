"""Marks the programs that environments start, so that they end with the main process, and a game with its object.

A program has the environment variables of the process that starts it, and /proc shows them. So the main process sets a
variable while it builds or runs environments, and workers always have it. When the main process has ended, for
whatever reason, a shell kills every program that has the variable, also in other sessions. The shell reads from a pipe
whose other end the main process holds, so it notices this end.

As long as the main process lives, the shell kills nothing. A program may serve all environments of a process, not only
the one that started it. A `MarkedProcess` has a second mark, by which whoever has started it finds and ends all that
belongs to it.

The shell is no supervisor, although this waits for the end of the main process too: a `SerialSampler` or a game in a
script has none, and an interpreter that only waits takes 10 MB.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil

from penstock import system
from penstock.workers.forks import leave_in_forks

# The argument is the variable's name. The part in braces runs in the background, so that it is no child of the
# main process. Programs may start others while they are killed, hence the second look.
_SCRIPT = f"""
exec 3<&0
{{
    read -r line <&3
    sleep 0.5
    for look in 1 2; do
{system.KILL_MARKED}
    done
}} &
"""
_START_SECONDS = 5.0
_KILL_SECONDS = 5.0  # until killed processes are gone
_SEARCH_SECONDS = 5.0  # between two searches for processes that are no children
_GRACE_SECONDS = 0.2  # for processes that a program leaves behind, such as its X server

MARK_PREFIX = "PENSTOCK_PROCESS_"  # of the variables that mark programs
# With these variables, libraries would believe that a worker is an MPI process.
_MPI_PREFIXES = ("OMPI_", "PMI_")


def new_mark() -> str:
    """A name for a variable. It is another one in each process: a program that uses penstock has several of them."""
    return f"{MARK_PREFIX}{os.getpid()}_{os.urandom(8).hex()}"


class _Marking:
    """Sets the variable as long as some thread is inside of this context."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._threads: list[int] = []  # those inside, more than once if contexts are nested
        self._name, self._pipe, self._key = "", -1, b""

    def variable(self) -> str:
        """The name of the variable. This starts the shell."""
        if self._pipe < 0:
            self._name = new_mark()
            self._key = self._name.encode()
            reader, self._pipe = os.pipe()
            try:
                with suppress(OSError, subprocess.TimeoutExpired):  # without a shell, nothing is killed
                    subprocess.run(
                        ["/bin/sh", "-c", _SCRIPT, "marked", self._name],
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


class MarkedProcess:
    """A program that this process starts, with everything that the program starts, in whatever session. They end with
    this process, however this ends. A fork of this process does not touch them. `how` goes to `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str] | None = None, **how: Any) -> None:
        self._mark, self.owner = new_mark(), os.getpid()
        environ = {**(os.environ if environ is None else environ), marked.variable(): "1", self._mark: "1"}
        # In a session of its own: Ctrl-C must not reach it.
        how = {"stdin": subprocess.DEVNULL, **how, "env": environ, "start_new_session": True}
        self._process = subprocess.Popen(command, **how)
        leave_in_forks(self)
        self.pid, self._found, self._search_at = self._process.pid, list[int](), 0.0
        # What is left of its group when it has ended: some of them may have no mark any more.
        self._rest: list[psutil.Process] | None = None

    def leave_to_parent(self, pid: int) -> None:
        """In a fork: `subprocess` must not warn there that the program runs."""
        self._process.returncode = 0

    def exit_text(self) -> str:
        """How it has ended, such as "exit code 3" or "SIGKILL"; empty while it runs."""
        if os.getpid() != self.owner:
            return "an unknown exit code"
        if (code := self._process.poll()) is None:
            return ""
        if self._rest is None:
            self._rest = _group(self.pid)
        with suppress(ValueError):  # no signal
            return signal.Signals(-code).name
        return f"exit code {code}" if code >= 0 else f"signal {-code}"

    def wait(self, seconds: float) -> bool:
        """Wait until it has ended, at most so long. Returns whether it has."""
        with suppress(subprocess.TimeoutExpired):
            if not self.exit_text():
                self._process.wait(seconds)
        return bool(self.exit_text())

    def members(self) -> list[int]:
        """The ids of all processes that belong to it."""
        found = {*system.marked_with(self._mark), *(each.pid for each in self._rest or () if is_alive(each))}
        return sorted(found if self.exit_text() else {*found, self.pid})  # it may have changed its variables

    def known(self) -> set[int]:
        """As `members`, but fast: it asks these processes for their children. Others, such as a child that has left its
        parent, count from the next search on, which comes after some seconds."""
        if (began := time.monotonic()) >= self._search_at:
            self._found = self.members()
            now = time.monotonic()
            self._search_at = now + max(_SEARCH_SECONDS, 100 * (now - began))  # a machine may have 10,000 processes
        return system.with_descendants([*self._found, *([] if self.exit_text() else [self.pid])])

    def kill(self) -> None:
        """Kill all of them at once. Any thread may call this."""
        self._signal_group(signal.SIGKILL)
        if os.getpid() != self.owner:
            return
        for pid in system.marked_with(self._mark):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for each in self._rest or ():
            with suppress(psutil.Error):  # it sees to it that no other process has the id now
                each.kill()

    def end(self, term_timeout: float = 0.0) -> list[int]:
        """End all of them, and wait for this: with SIGTERM, if they have `term_timeout` seconds to follow it, then with
        SIGKILL. Returns the ids of those that are still there after five seconds."""
        if os.getpid() != self.owner:
            return []
        if term_timeout > 0:
            self._signal_group(signal.SIGTERM)
            self.wait(term_timeout)
        began = time.monotonic()
        while (left := self.members()) and (passed := time.monotonic() - began) < _KILL_SECONDS:
            if passed >= min(_GRACE_SECONDS, term_timeout):  # the rest of its group has SIGTERM too
                self.kill()
            time.sleep(0.005)
        self.wait(_KILL_SECONDS)
        return left

    def _signal_group(self, number: int) -> None:
        if not self.exit_text():  # else another process may have its id
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)


def _group(number: int) -> list[psutil.Process]:
    """The processes of this group."""
    found = []
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error):  # it has just ended
            if os.getpgid(pid) == number:
                found.append(psutil.Process(pid))
    return found


def is_alive(process: psutil.Process) -> bool:
    """Whether this process exists, and has not ended."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False
