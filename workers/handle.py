"""The main process's view of one worker process: its gate, its pipe, its death."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.buffers.descriptors import InheritedFd
from penstock.buffers.results import ObjectPipe
from penstock.workers.gates import Gate
from penstock.workers.plan import WorkerPlan
from penstock.workers.stacks import StackFile
from penstock.workers.supervisor import SupervisedProcess

_REAP_SECONDS = 0.5

# Fields of /proc/PID/stat behind the name; see proc_pid_stat(5).
_STATE, _FLAGS, _START_TIME = 0, 6, 19
_PF_EXITING = 0x4


def open_pidfd(pid: int) -> InheritedFd | None:
    """A pidfd of the process; None where the system has none or refuses, or where the process is gone."""
    try:
        return InheritedFd(os.pidfd_open(pid))
    except (AttributeError, OSError):
        return None


@dataclass
class WorkerHandle:
    """A worker process that has been started. A replacement gets a new handle with the same gate."""

    plan: WorkerPlan
    process: Any  #: multiprocessing's Process of any context, or a SupervisedProcess
    pid: int
    gate: Gate
    pipe: ObjectPipe
    stacks: StackFile
    begun_at_start: int  #: the last opening that earlier workers of this rank have seen
    is_reaped: bool = False

    def __post_init__(self) -> None:
        self.rank = self.plan.worker_rank
        self.start_time = start_time_of(self.pid)  #: as text; None if the system does not tell
        self._pidfd = None if isinstance(self.process, SupervisedProcess) else open_pidfd(self.pid)
        #: Readable when the process has exited. A pidfd reacts within a millisecond. The fallback is a pipe, which
        #: children of the process may hold open long after its death.
        self.death_fd: int = self.process.sentinel if self._pidfd is None else self._pidfd.fd

    def signal_group(self, sig: int) -> None:
        """Signal the worker and everything that its environments have started."""
        if isinstance(self.process, SupervisedProcess):
            self.process.signal(sig)
            return
        start_time = start_time_of(self.pid)
        if start_time is not None and start_time != self.start_time:
            return  # the worker is gone, and the system has given its process id to another process
        try:
            os.killpg(self.pid, sig)
        except (ProcessLookupError, PermissionError):
            # The worker has no process group yet, or is gone.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if self.process.exitcode is None:
                    os.kill(self.pid, sig)

    def reap(self) -> int | None:
        """Kill what is left of the worker and its group, then collect its exit code, or None.

        In this order: a process id cannot be used again before its exit code is collected.
        """
        if not self.is_reaped:
            self.signal_group(signal.SIGKILL)
            self.process.join(_REAP_SECONDS)
            self._exitcode: int | None = self.process.exitcode
            self.is_reaped = True
        return self._exitcode

    @property
    def is_stopped(self) -> bool:
        """Whether the system holds the process (SIGSTOP, a debugger)."""
        return status_of(self.pid) in ("stopped", "tracing-stop")

    @property
    def is_dying(self) -> bool:
        """Whether the process has been killed but still exists, which may take a while on a busy machine."""
        with contextlib.suppress(OSError, ValueError):
            fields = _stat_fields(self.pid)
            if int(fields[_FLAGS]) & _PF_EXITING or fields[_STATE] in "ZX":
                return True
            status = Path(f"/proc/{self.pid}/status").read_text()
            pending = [
                int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))
            ]
            return any(mask >> (signal.SIGKILL - 1) & 1 for mask in pending)
        return False  # the system does not say, or the process is gone

    def release(self) -> None:
        """Release what belongs to this process alone; a replacement keeps the gate and the stack file."""
        if self._pidfd is not None:
            self._pidfd.close()
        with contextlib.suppress(ValueError):  # it still runs in spite of SIGKILL: leave it to the system
            self.process.close()


def status_of(pid: int) -> str:
    """What the process is doing, in psutil's words; empty if there is no such process."""
    import psutil  # here, because to import it takes 9 ms, and few starts need it

    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return ""


def _stat_fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def start_time_of(pid: int) -> str | None:
    """When the process was started, in clock ticks since the system was started, as text. None if it is gone, or if the
    system has no /proc."""
    try:
        return _stat_fields(pid)[_START_TIME]
    except (OSError, IndexError):
        return None
