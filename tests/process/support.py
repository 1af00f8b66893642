"""What the tests of this folder share: the two scales, the figures that are reported, killers, noted faults."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from penstock import TrajInfo
from penstock.envs import CountingEnv
from penstock.testing import Fault

from ..scale import FULL
from ..starter import Program
from ..support import BOUND, PROGRAMS

#: What a loaded machine may take of a promised time. The full scale is run on a quiet one.
SLACK = 1.0 if FULL else 2.0
#: From a worker's failure to the error in the main process.
ERROR_SECONDS = 1.0 * SLACK

#: What was measured, in seconds (or the unit that the name says), and what it must not exceed.
FIGURES: dict[str, list[float]] = defaultdict(list)
LIMITS: dict[str, float] = {}


def note(name: str, value: float, limit: float) -> None:
    """Report `value` under `name`, and hold it to `limit`."""
    FIGURES[name].append(value)
    LIMITS[name] = limit
    assert value <= limit, f"{name}: {value:.3f} is more than {limit:g}"


def summary() -> Iterator[str]:
    for name, values in sorted(FIGURES.items()):
        median, most = statistics.median(values), max(values)
        yield f"{name:<58} n={len(values):<6} median {median:9.4f}  max {most:9.4f}  limit {LIMITS[name]:g}"


def pause(seconds: float) -> None:
    """Let a random time pass: not for synchronization, but to come at any moment."""
    time.sleep(seconds)


def gone_after(pids: Sequence[int], since: float, seconds: float) -> float:
    """Wait until none of `pids` is left; returns the seconds from `since` on."""

    def left() -> list[int]:
        return [pid for pid in pids if is_running(pid)]

    deadline = since + seconds
    while left() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert not left(), f"still there after {seconds:g} s: {[describe(pid) for pid in left()]}"
    return time.monotonic() - since


def is_running(pid: int) -> bool:
    """Whether the process has not ended. Where its parent has ended too, it may stay a zombie for seconds."""
    try:
        return bool(psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    except psutil.NoSuchProcess:
        return False


def describe(pid: int) -> str:
    try:
        return f"{pid} {psutil.Process(pid).cmdline()}"
    except psutil.NoSuchProcess:
        return f"{pid} (gone)"


# ---- noted faults --------------------------------------------------------------------------


@dataclass(frozen=True)
class NotedFault(Fault):
    """Writes down when it strikes, and whom."""

    notebook: str = ""
    raises: type[Exception] | None = None  #: with "raise", in place of `InjectedFault`

    def fire(self) -> None:
        if os.getpid() != self.spare_pid and self._take_marker():
            Path(self.notebook).write_text(f"{time.monotonic()} {os.getpid()}")
            if self.raises is not None:
                raise self.raises(f"a fault was injected: {self.raises.__name__}")
            Fault(self.how, at=self.at, seconds=self.seconds).fire()


class Notebook:
    """Makes noted faults, and reads what they have noted."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "note"
        self._marker = folder / "marker"

    def fault(
        self, how: str, at: int = 1, raises: type[Exception] | None = None, spares_main: bool = True
    ) -> NotedFault:
        """A fault that strikes once, in whichever worker comes there first, or in this process if it is not spared."""
        spared = os.getpid() if spares_main else None
        return NotedFault(how, at, marker=str(self._marker), spare_pid=spared, notebook=str(self._path), raises=raises)

    def read(self) -> tuple[float, int]:
        """When it struck, and the process."""
        when, pid = self._path.read_text().split()
        return float(when), int(pid)


# ---- killers -------------------------------------------------------------------------------


class Killer:
    """A process that kills others at moments that the main process does not know.

    A process and not a thread, since start_method="fork" refuses to work beside threads.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def kill(self, pids: Sequence[int], delay: float, sig: int = 9) -> None:
        """Signal all `pids`, after `delay` seconds."""
        self._order(delay, sig, 0, 0, *pids)

    def kill_newborn(self, worker_rank: int, delay: float, start_method: str) -> None:
        """Kill a worker that is yet to be started, `delay` after its birth. Before the workers of "fork" comes their
        supervisor."""
        known = [child.pid for child in psutil.Process().children(recursive=True)]
        self._order(delay, 9, os.getpid(), worker_rank + 1 + (start_method == "fork"), *known)

    def _order(self, *words: float) -> None:
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)

    def when(self) -> float:
        """Wait for the deed; returns when it was done."""
        return self.deed()[0]

    def deed(self) -> tuple[float, list[int]]:
        """Wait for the deed; returns when it was done, and to whom."""
        assert self._process.stdout is not None
        when, *pids = self._process.stdout.readline().split()
        return float(when), list(map(int, pids))


@contextmanager
def killer() -> Iterator[Killer]:
    process = subprocess.Popen(
        [sys.executable, PROGRAMS / "killer.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield Killer(process)
        except BaseException:
            process.kill()
            raise


class Interrupts:
    """Sends this process a SIGINT from a process of its own."""

    def __init__(self, delay: float) -> None:
        self._delay = delay

    def __enter__(self) -> None:
        code = f"import os, time; time.sleep({self._delay}); os.kill({os.getpid()}, 2)"
        self._process = subprocess.Popen([sys.executable, "-S", "-c", code])

    def __exit__(self, *_: object) -> None:
        assert self._process.wait() == 0


def pid_of(sampler: Any, rank: int) -> int:
    """The process of this worker, also if it has just ended."""
    return int(sampler.run.pool.handles[rank].pid)


def generator(*key: object) -> random.Random:
    """Seeded, so that the moments are the same in each run."""
    return random.Random(repr(key))


# ---- scripts -------------------------------------------------------------------------------

HEAD = """
import os, signal, subprocess, sys, threading, time
from penstock import AsyncSampler, ParallelSampler, RandomAgent, TrajInfo, WorkerDiedError, WorkerError, ConfigError
from penstock import TrajInfo
from penstock.envs import CountingEnv, SlowEnv
from penstock.testing import Fault, faulty_env
def say(*words):
    # Several processes say something at once: print would write the words and the end of the line one after the other.
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()
"""


class Script:
    """A script in a session of its own, run as users run theirs: from a file, without a __main__ guard.

    body: Its text, which begins with `variables` and `HEAD`; or the path of a program, whose argument is a dict of the
        `variables`, as JSON.
    new: In a new interpreter, else in a fork of `starter`.
    tears_down: At its end a fork takes its modules apart, as any Python program does. Else it skips this: that halves
        its CPU time.
    """

    def __init__(
        self,
        folder: Path,
        body: str | Path,
        *,
        new: bool = False,
        tears_down: bool = False,
        **variables: Any,
    ) -> None:
        if isinstance(body, Path):
            command = [str(body), json.dumps(variables)]
        else:
            command = [str(folder / "script.py")]
            settings = "".join(f"{name} = {value!r}\n" for name, value in variables.items())
            Path(command[0]).write_text(f"{settings}{HEAD}{textwrap.dedent(body)}")
        if not new:
            self.process = Program(command, cwd=folder, strict=True, light=True, skips_teardown=not tears_down)
            return
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": python_path()},
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> list[str]:
        """The next line of its output, in words."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the script has ended: {self.process.communicate(timeout=BOUND)[1]}"
        return line.split()

    def pids(self) -> list[int]:
        return [int(word) for word in self.line()]

    def descendants(self) -> list[int]:
        """Every process that it has started, directly or not."""
        return [child.pid for child in psutil.Process(self.pid).children(recursive=True)]

    def end(self, seconds: float = BOUND) -> tuple[str, str]:
        """Wait for its end; returns the rest of its output, and what it said on stderr."""
        return self.process.communicate(timeout=seconds)

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def python_path() -> str:
    return os.pathsep.join(
        str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path
    )


# ---- system calls that are refused -------------------------------------------------------------

#: Their numbers on x86-64.
SYSCALLS = {"sched_setaffinity": 203, "eventfd2": 290, "memfd_create": 319, "pidfd_open": 434}


_REFUSE = """
import ctypes, os, struct

class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_char_p)]

def refuse(number, error):
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (0x20, 0, 0, 0),  # load the number of the system call
            (0x15, 0, 1, number),  # skip one if it is another
            (0x06, 0, 0, 0x00050000 | error),  # SECCOMP_RET_ERRNO
            (0x06, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
        )
    )
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, filter_mode, ctypes.byref(Filter(4, program))) == 0, os.strerror(ctypes.get_errno())
"""


def refusing(name: str, error: int) -> str:
    """For the begin of a script: from then on the kernel answers the system call `name` with `error`."""
    return f"{_REFUSE}\nrefuse({SYSCALLS[name]}, {error})\n"


# ---- environments --------------------------------------------------------------------------


class WithChildren(CountingEnv):
    """Starts a process that would outlive it: "sleep" a program, "fork" a copy with all descriptors."""

    def __init__(self, folder: str, how: str = "sleep", spare_pid: int = 0) -> None:
        super().__init__()
        if os.getpid() == spare_pid:
            return
        if how == "fork":
            pid = os.fork()
            if pid == 0:
                time.sleep(600)
                os._exit(0)
        else:
            pid = subprocess.Popen(["sleep", "600"]).pid
        Path(folder, f"{os.getpid()}-{pid}").touch()

    @staticmethod
    def children(folder: Path, worker: int | None = None) -> list[int]:
        """The processes that were started, by `worker` or by all."""
        pairs = [path.name.split("-") for path in folder.iterdir()]
        return [int(child) for parent, child in pairs if worker is None or int(parent) == worker]


class Talkative(TrajInfo):
    """Goes through the pipe, in more bytes than a pipe holds at once."""

    def terminate(self, final_observation: Any) -> None:
        self.cargo = bytes(50_000)


def check_counting(observation: Any, reward: Any, done: Any, length: int) -> None:
    """A batch of CountingEnv, `[T, n, 2]`, `[T, n]` and `[T, n]`, must be as worked out by hand."""
    observation, reward, done = (np.asarray(each) for each in (observation, reward, done))
    episode, count = observation[..., 0], observation[..., 1]
    assert (reward == count + 1).all(), "the reward is the number of the step within the episode"
    assert (done == (reward == length)).all()
    assert (count[1:] == np.where(done, 0, reward)[:-1]).all()
    assert (episode[1:] == episode[:-1] + done[:-1]).all()
