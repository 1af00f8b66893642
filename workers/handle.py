"""The main process's view of one worker process: its gate, its pipe, its stack, its death."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock import system
from penstock.buffers.descriptors import InheritedFd, anonymous_file
from penstock.buffers.object_pipe import ObjectPipe
from penstock.workers.gates import Gate
from penstock.workers.plan import WorkerPlan
from penstock.workers.supervisor import SupervisedProcess

_MAX_BYTES = 8 * 1024
_ANSWER_SECONDS = 0.5  # until the first line: a process may have to wait for a CPU
_QUIET_SECONDS = 0.15  # a stack that has not grown for so long is complete
_MOST_SECONDS = 1.0  # which the whole answer may take
_LOOK_SECONDS = 0.005
_CRASH = b"Fatal Python error"  # how faulthandler begins, if nobody has asked
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
        faulthandler.register(system.ASK_STACKS, self.file.fd, all_threads=True, chain=False)

    def ask(self, pid: int) -> str:
        """Main process: the stack of the live worker `pid`, which has called `install`; empty if it does not answer."""

        def send() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, system.ASK_STACKS)
                os.kill(pid, signal.SIGCONT)  # a stopped process cannot answer

        return self.answer_to(send)

    def answer_to(self, send: Callable[[], object]) -> str:
        """The stack that the process writes because of the signal that `send` sends; empty if it does not answer."""
        first = self._size()  # what is there was asked for earlier, perhaps by another process
        send()
        # A worker's stack is complete when it shows the worker's loop. In other processes, the only sign is that the
        # text stops growing. On a busy machine, a process may wait for a CPU in the middle of a line.
        began, size = time.monotonic(), first
        until = began + _ANSWER_SECONDS
        while (now := time.monotonic()) < until:
            if (grown := self._size()) > size:
                until, size = min(now + _QUIET_SECONDS, began + _MOST_SECONDS), grown
                if _LOOP.search(self._text(first)):
                    break
            time.sleep(_LOOK_SECONDS)
        return _of_user(self._text(first))

    def read(self) -> str:
        """Main process: where the dead worker has crashed, in the user's code and the collectors; empty if it has
        not."""
        text = os.pread(self.file.fd, self._size(), 0)
        return _of_user(self._text(start)) if (start := text.rfind(_CRASH)) >= 0 else ""

    def _text(self, start: int) -> str:
        return os.pread(self.file.fd, _MAX_BYTES, start).decode(errors="replace")

    def _size(self) -> int:
        return os.fstat(self.file.fd).st_size

    def clear(self) -> None:
        """Main process: forget what a dead worker has written."""
        os.ftruncate(self.file.fd, 0)
        os.lseek(self.file.fd, 0, os.SEEK_SET)


def _of_user(text: str) -> str:
    """Of a stack, what is about the user's code and the collectors."""
    threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", text.partition("\nExtension modules:")[0])
    return "\n".join(map(_shortened, threads)).strip()


def _shortened(stack: str) -> str:
    """Without the frames below the worker's loop; under fork there are many."""
    loop = _LOOP.search(stack)
    return stack[: loop.end()] if loop else stack.rstrip()


_REAP_SECONDS = 0.5


@dataclass(eq=False)
class WorkerHandle:
    """A worker process that has been started. A replacement gets a new handle with the same gate."""

    plan: WorkerPlan
    process: SupervisedProcess
    gate: Gate
    pipe: ObjectPipe
    stacks: StackFile
    begun_at_start: int  #: the last opening that earlier workers of this rank have seen
    is_reaped: bool = False

    def __post_init__(self) -> None:
        self.rank = self.plan.worker_rank
        self.pid = self.process.pid
        self.death_fd = self.process.sentinel  #: readable when the process has exited

    def kill_and_reap(self) -> int | None:
        """Kill what is left of the worker and its group. Returns its exit code, or None if the supervisor
        does not answer."""
        if not self.is_reaped:
            self.process.signal(signal.SIGKILL)
            self.process.join(_REAP_SECONDS)
            self.is_reaped = True
        return self.process.exitcode

    @property
    def has_ended(self) -> bool:
        """Whether the process has exited. The supervisor collects its exit code at once."""
        poll = select.poll()
        poll.register(self.death_fd, select.POLLIN)
        return self.is_reaped or bool(poll.poll(0))

    @property
    def is_stopped(self) -> bool:
        """Whether the system holds the process (SIGSTOP, a debugger)."""
        return status_of(self.pid) in ("stopped", "tracing-stop")

    @property
    def is_dying(self) -> bool:
        """Whether the process has been killed but still exists, which may take a while on a busy machine."""
        return system.is_dying(self.pid)


def status_of(pid: int) -> str:
    """What the process is doing, in psutil's words; empty if there is no such process."""
    import psutil  # here, because to import it takes 9 ms, and few starts need it

    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return ""
