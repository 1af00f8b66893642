"""The main process's view of one worker process: its gate, its pipe, its death."""

from __future__ import annotations

import contextlib
import re
import select
import signal
from dataclasses import dataclass
from pathlib import Path

from penstock.buffers.object_pipe import ObjectPipe
from penstock.workers.gates import Gate
from penstock.workers.plan import WorkerPlan
from penstock.workers.stacks import StackFile
from penstock.workers.supervisor import SupervisedProcess

_REAP_SECONDS = 0.5

# Fields of /proc/PID/stat behind the name; see proc_pid_stat(5).
_STATE, _FLAGS = 0, 6
_PF_EXITING = 0x4


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
        with contextlib.suppress(OSError, ValueError):
            process = Path(f"/proc/{self.pid}")
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if int(fields[_FLAGS]) & _PF_EXITING or fields[_STATE] in "ZX":
                return True
            for mask in re.findall(r"^(?:SigPnd|ShdPnd):\s*(\w+)", (process / "status").read_text(), re.MULTILINE):
                if int(mask, 16) >> (signal.SIGKILL - 1) & 1:
                    return True
        return False  # the system does not say, or the process is gone


def status_of(pid: int) -> str:
    """What the process is doing, in psutil's words; empty if there is no such process."""
    import psutil  # here, because to import it takes 9 ms, and few starts need it

    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return ""
