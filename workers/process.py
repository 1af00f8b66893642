"""What a worker process does, from its start to its exit."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from penstock.buffers.descriptors import InheritedFd
from penstock.buffers.reports import in_one_line
from penstock.buffers.shared import shared_mappings
from penstock.workers.affinity import limit_threads, pin
from penstock.workers.gates import MainProcessGone
from penstock.workers.marking import note_worker
from penstock.workers.program import WorkerProcessArgs, WorkerProgram
from penstock.workers.progress import Phase, StopCollecting

end_group_with_parent: Callable[[], bool] | None
try:
    from penstock.buffers._native import end_group_with_parent
except ImportError:  # not compiled
    end_group_with_parent = None

_log = logging.getLogger("penstock")

_PR_SET_PDEATHSIG = 1
_PARENT_POLL_SECONDS = 0.5


def worker_main(args: WorkerProcessArgs) -> None:
    """Entry point of a worker process. It never returns: threads and exit handlers that environments have left would
    delay an ordinary exit."""
    code, pid, how = 1, os.getpid(), "returned from"
    progress = args.memory.control.progress(args.plan.worker_rank)
    try:
        _detach(args)
        _run_commands(args)
        code = int(os.getpid() != pid)
    except MainProcessGone:
        _kill_own_group()  # what the environments have started must end too
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: nothing else would report them
        if os.getpid() == pid:
            # Do not change the phase here: the main process quotes it beside the exception.
            args.reports.write(args.plan.worker_rank, error)
        how = f"raised {in_one_line(error)} in"
    else:
        progress.enter(Phase.CLOSED)
    with contextlib.suppress(Exception):  # standard output may be closed, broken or None
        if os.getpid() != pid:
            print(
                f"penstock: process {os.getpid()} ends. The user's code in {args.plan.name} (pid {pid}) has forked it, "
                f"and it {how} this code. End such a process inside this code with os._exit",
                file=sys.stderr,
            )
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _run_commands(args: WorkerProcessArgs) -> None:
    """Build the program, then run one command after another between barrier_in and barrier_out."""
    gate, control, pid = args.gate, args.memory.control, os.getpid()
    program: WorkerProgram = args.load(args.program)
    context = args.context()
    progress = context.progress
    program.build(context)
    limit_threads(args.plan.torch_threads)  # again: the program may have loaded libraries, or changed this
    gc.freeze()  # garbage collection need not search torch's modules again
    try:
        progress.enter(Phase.WAITING)
        # The first worker of this rank completes opening number one, the start-up. A replacement must not arrive: this
        # would complete the command that it has to repeat.
        if not progress.arrived:
            gate.arrive(progress)
        while True:
            program.idle()
            progress.enter(Phase.WAITING)
            gate.wait_in(progress)  # barrier_in
            if control.quit:
                break
            command = progress.command
            progress.begin()
            program.run(command)
            progress.enter(Phase.WAITING)
            gate.arrive(progress)  # barrier_out
    except StopCollecting:
        pass
    if os.getpid() == pid:  # a fork must not close what the environments of the worker use
        program.close()


def _detach(args: WorkerProcessArgs) -> None:
    """Give this process its own group, signals, CPUs and environment variables."""
    # Ctrl-C reaches the main process only, and the main process can kill this process together with its children.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the fork server blocks it; programs inherit that
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    args.stacks.install()
    if args.dies_with_parent and sys.platform == "linux":
        _end_with_parent()
    threading.Thread(target=_watch_main_process, args=(args.main_process,), name="watchdog", daemon=True).start()
    os.register_at_fork(after_in_child=partial(_separate_fork, args, list(shared_mappings)))
    _set_environ(args.load(args.environ))
    note_worker()
    limit_threads(args.plan.torch_threads)
    if args.plan.cpus:
        try:
            pin(args.plan.cpus)
        except OSError as error:  # a sandbox
            _log.warning("%s is not pinned to CPUs %s: %s", args.plan.name, list(args.plan.cpus), error)


def _separate_fork(args: WorkerProcessArgs, shared: Sequence[Any]) -> None:
    """In a fork that the user's code makes. If it comes back from this code, it must not work in the worker's place.

    It goes on with memory of its own, where `quit` is set, so it ends at the next time step. Its results go nowhere.
    """
    for mapping in shared:
        mapping.make_private()
    args.memory.control.quit = True
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, args.pipe.writer.fd, inheritable=False)
    os.close(nowhere)


def _set_environ(wanted: Mapping[str, str]) -> None:
    """Make `os.environ` equal to `wanted`. Most variables are equal already, and to set one takes long."""
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _end_with_parent() -> None:
    """Let the kernel end this process when its parent exits, even while C code holds the interpreter lock and the
    watchdog thread cannot run. Only the compiled part also ends what the environments have started."""
    if end_group_with_parent is None or not end_group_with_parent():
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch_main_process(main_process: InheritedFd | None) -> None:
    """Kill this process and its group as soon as the main process is gone."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread handles signals
    if main_process is not None:
        poll = select.poll()
        poll.register(main_process.fileno(), select.POLLIN)
        poll.poll()
    else:
        parent = multiprocessing.parent_process()
        parent_pid = os.getppid()
        if parent is None:
            return  # multiprocessing has not started this worker: the supervisor watches the main process
        while parent is not None and os.getppid() == parent_pid:
            parent.join(_PARENT_POLL_SECONDS)
            if not parent.is_alive():
                break
    _kill_own_group()


def _kill_own_group() -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)
