"""The life of a worker process, from its first instruction to its last."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.buffers.descriptors import InheritedFd
from penstock.buffers.mailbox import Mailbox
from penstock.buffers.reports import ReportBoard
from penstock.buffers.trajectory_queue import ObjectPipe
from penstock.workers import cleanup
from penstock.workers.affinity import limit_threads, pin
from penstock.workers.control import Phase, StopCollecting
from penstock.workers.gates import Gate, MainProcessGone
from penstock.workers.plan import WorkerPlan
from penstock.workers.stacks import StackFile
from penstock.workers.work import Job, Memory, Station, Task

__all__ = ["WorkerSetup", "worker_main"]

_PR_SET_PDEATHSIG = 1
_PARENT_POLL_SECONDS = 0.5
_RELEASE_SECONDS = 1.0


@dataclass(frozen=True)
class WorkOrder:
    """What a worker is to do, and where it is written down."""

    mailbox: Mailbox
    environ: slice  #: pickled: the environment variables to run with
    job: slice  #: cloudpickled: what all workers share of it
    share: slice  #: and what is this worker's own

    def read_environ(self) -> dict[str, str]:
        """The environment variables."""
        environ: dict[str, str] = pickle.loads(self.mailbox.read(self.environ))
        return environ

    def read_job(self) -> Task:
        """The job, as far as it is this worker's; unpickling it imports the user's modules."""
        job: Job = pickle.loads(self.mailbox.read(self.job))
        return job.with_share(pickle.loads(self.mailbox.read(self.share)))


@dataclass(frozen=True)
class WorkerSetup:
    """All that a worker process is started with. Descriptors travel in it, so it pickles only then."""

    plan: WorkerPlan
    order: WorkOrder
    memory: Memory
    gate: Gate
    reports: ReportBoard
    pipe: ObjectPipe
    stacks: StackFile
    main_process: InheritedFd | None  #: a pidfd of the main process, where there is such a thing
    die_with_parent: bool  #: whether the death of the starting process or thread is the main process's
    served: Sequence[Gate] = ()  #: the gates of all workers before it, if it is the inference server


def worker_main(setup: WorkerSetup) -> None:
    """Entry point of a worker process. Never returns: environments may have left threads and exit
    handlers behind that would keep an ordinary exit waiting."""
    code = 1
    progress = setup.memory.control.progress(setup.plan.worker_rank)
    try:
        _detach(setup)
        _serve(setup)
        code = 0
    except MainProcessGone:
        _kill_own_group()  # as the watchdog does: what the environments started is to go too
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: nobody else would hear of them
        # Written with the phase still that of the failure: the main process quotes both.
        setup.reports.write(setup.plan.worker_rank, error)
    else:
        progress.enter(Phase.CLOSED)
    cleanup.run_at_exit()  # what environments have not given back: exit handlers do not run
    with contextlib.suppress(OSError, ValueError):  # a closed or broken stream must not keep us
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _serve(setup: WorkerSetup) -> None:
    gate, control = setup.gate, setup.memory.control
    progress = control.progress(setup.plan.worker_rank)
    station = Station(setup.plan, setup.memory, gate, setup.pipe, setup.main_process, setup.served)
    work = setup.order.read_job().start_work(station)
    limit_threads(setup.plan.torch_threads)  # again: unpickling the job may have loaded torch
    gc.freeze()  # what exists now is for good: collections need not go through torch's modules again
    # Start-up is answered once. A replacement finds its gate open for what its forerunner has left undone.
    is_replacement = progress.arrived > 0
    try:
        while True:
            progress.enter(Phase.WAITING)
            if not is_replacement:
                gate.arrive(progress)
            is_replacement = False
            work.prepare()
            progress.enter(Phase.WAITING)
            gate.wait_in(progress, setup.main_process)
            if control.quit:
                break
            work.run()
    except StopCollecting:
        pass
    work.close()


def _detach(setup: WorkerSetup) -> None:
    """Make this process the worker's own: group, signals, fate, CPUs, variables."""
    os.setpgid(0, 0)  # Ctrl-C goes to the main process alone; our own children can be killed with us
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    setup.stacks.install()
    cleanup.announce_to(lambda name: setup.reports.announce_stale(setup.plan.worker_rank, name))
    if setup.die_with_parent and sys.platform == "linux":
        # Kills us even while C code holds the interpreter lock, which the watchdog thread cannot.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch_main_process, args=(setup.main_process,), name="watchdog", daemon=True).start()
    os.environ.clear()
    os.environ.update(setup.order.read_environ())
    limit_threads(setup.plan.torch_threads)
    if setup.plan.cpus:
        pin(setup.plan.cpus)


def _watch_main_process(main_process: InheritedFd | None) -> None:
    """Kill this process and its group as soon as the main process is gone."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals are for the main thread to answer
    if main_process is not None:
        poll = select.poll()
        poll.register(main_process.fileno(), select.POLLIN)
        while not poll.poll(60_000):
            pass
    else:
        parent = multiprocessing.parent_process()
        parent_pid = os.getppid()
        while parent is not None and os.getppid() == parent_pid:
            parent.join(_PARENT_POLL_SECONDS)
            if not parent.is_alive():
                break
    _kill_own_group()


_ending = threading.Lock()  # taken by the first that finds the main process gone, and never given back


def _kill_own_group() -> Any:
    _ending.acquire(timeout=_RELEASE_SECONDS)  # a second one would kill the first in the midst of what it is doing
    try:
        # The main thread may be busy, and would get the interpreter for 5 ms after each system call of ours.
        sys.setswitchinterval(1e-6)
        cleanup.run_at_exit()
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(1)
