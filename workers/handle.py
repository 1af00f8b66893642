"""One worker process as the main process holds it: its gate, its pipe, its end."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from penstock.buffers.trajectory_queue import ObjectPipe
from penstock.workers.control import ControlBlock
from penstock.workers.failures import WorkerStatus
from penstock.workers.gates import Gate
from penstock.workers.plan import WorkerPlan
from penstock.workers.stacks import StackFile
from penstock.workers.watch import DeathWatch

__all__ = ["WorkerHandle"]

_REAP_SECONDS = 0.5

# Of /proc/PID/stat: see proc_pid_stat(5); counted behind the name.
_FLAGS = 6
_PF_EXITING = 0x4


@dataclass
class WorkerHandle:
    """A worker that has been started. A replacement is a new member with its forerunner's gate."""

    plan: WorkerPlan
    process: Any  #: multiprocessing's Process of whichever context
    pid: int
    gate: Gate
    pipe: ObjectPipe
    stacks: StackFile
    death: DeathWatch
    begun_before: int  #: openings of the gate that its forerunners had begun
    is_buried: bool = False

    @property
    def rank(self) -> int:
        """The worker's rank."""
        return self.plan.worker_rank

    def signal_group(self, sig: int) -> None:
        """Signal the worker and all that its environments have started."""
        try:
            os.killpg(self.pid, sig)
        except (ProcessLookupError, PermissionError):
            # The worker has not yet made a group of its own, or is gone.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if self.process.exitcode is None:
                    os.kill(self.pid, sig)

    def bury(self) -> int | None:
        """Kill what is left of it, then collect its exit code (None if it cannot be had).

        In this order: as long as nobody has asked for the exit code, the process id cannot have been
        given to anybody else.
        """
        if not self.is_buried:
            self.signal_group(signal.SIGKILL)
            self.process.join(_REAP_SECONDS)
        code: int | None = self.process.exitcode
        self.is_buried = True
        return code

    def witness(self, control: ControlBlock) -> WorkerStatus:
        """What its progress row says of it now."""
        return WorkerStatus(self.plan, self.pid, control.snapshot(self.rank))

    @property
    def is_stopped(self) -> bool:
        """Whether the system has been told to hold the process (SIGSTOP, a debugger)."""
        with contextlib.suppress(psutil.Error):
            return bool(psutil.Process(self.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP))
        return False

    @property
    def is_dying(self) -> bool:
        """Whether the process has been killed and is not yet dead, which may take a while on a busy machine."""
        with contextlib.suppress(OSError, ValueError):
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            if int(fields[_FLAGS]) & _PF_EXITING or fields[0] in "ZX":
                return True
            status = Path(f"/proc/{self.pid}/status").read_text()
            pending = [
                int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))
            ]
            return any(mask >> (signal.SIGKILL - 1) & 1 for mask in pending)
        return False  # the system does not say, or it is gone

    def release(self) -> None:
        """Give back what is this member's alone; gate and files may go on with a replacement."""
        self.death.close()
        with contextlib.suppress(ValueError):  # still running, against all SIGKILLs: leave it to the system
            self.process.close()
