"""What a worker process does, from its start to its exit."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from penstock.buffers.reports import in_one_line
from penstock.buffers.shared import shared_mappings
from penstock.workers.affinity import limit_threads, pin
from penstock.workers.control import Phase, StopCollecting
from penstock.workers.program import WorkerProcessArgs, WorkerProgram

_log = logging.getLogger("penstock")


def worker_main(args: WorkerProcessArgs) -> int:
    """What a worker process calls. Returns its exit code."""
    code, pid, how = 1, os.getpid(), "returned from"
    progress = args.memory.control.progress(args.plan.worker_rank)
    try:
        _prepare(args)
        _run_commands(args)
        code = int(os.getpid() != pid)
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
    return code


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


def _prepare(args: WorkerProcessArgs) -> None:
    """Give this process its stack file, threads and CPUs."""
    args.stacks.install()
    os.register_at_fork(after_in_child=partial(_separate_fork, args, list(shared_mappings)))
    limit_threads(args.plan.torch_threads)
    if args.plan.cpus:
        try:
            pin(args.plan.cpus)
        except OSError as error:  # a sandbox
            _log.warning("%s is not pinned to CPUs %s: %s", args.plan.name, list(args.plan.cpus), error)


def _separate_fork(args: WorkerProcessArgs, shared: Sequence[Any]) -> None:
    """In a fork that the user's code makes. If it comes back from this code, it must not work in the worker's place.

    It continues with private memory, where `quit` is set, so it ends at the next time step. Its results go nowhere.
    """
    for mapping in shared:
        mapping.make_private()
    args.memory.control.quit = True
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, args.pipe.writer.fd, inheritable=False)
    os.close(nowhere)
