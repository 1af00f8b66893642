"""What a worker does, from its start to its end: in a process, and in the thread of the caller."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from penstock.buffers.object_pipe import ObjectMessage
from penstock.buffers.reports import in_one_line, with_notes
from penstock.buffers.shared import shared_mappings
from penstock.errors import WorkerError
from penstock.workers.affinity import limit_threads, pin
from penstock.workers.control import Phase, StopCollecting
from penstock.workers.failures import WorkerStatus, raised
from penstock.workers.marking import marked
from penstock.workers.plan import WorkerPlan
from penstock.workers.program import SharedMemory, WorkerContext, WorkerProcessArgs, WorkerProgram

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
    if args.torch_dtype and "torch" in sys.modules:  # the program, or an environment's module, has loaded it
        sys.modules["torch"].set_default_dtype(getattr(sys.modules["torch"], args.torch_dtype))
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


def torch_dtype() -> str:
    """The name of torch's default dtype in this process; "" if torch is not loaded."""
    torch = sys.modules.get("torch")
    return "" if torch is None else str(torch.get_default_dtype()).removeprefix("torch.")


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


class InPlaceWorker:
    """The handle of such a worker. The pool opens its gate as it opens the others; then `work` runs the command."""

    def __init__(self, plan: WorkerPlan, program: WorkerProgram, memory: SharedMemory) -> None:
        self._plan, self._memory = plan, memory
        self._program: WorkerProgram | None = program
        self.progress = memory.control.progress(plan.worker_rank)
        self._messages: list[ObjectMessage] = []

    def build(self, data: object) -> None:
        """Start up: this completes the first opening, as in every worker."""
        assert self._program is not None
        context = WorkerContext(
            plan=self._plan,
            data=data,
            memory=self._memory,
            progress=self.progress,
            put=self._messages.extend,
        )
        with marked:
            self._program.build(context)
        self._arrive()

    def work(self) -> None:
        """Run the command."""
        assert self._program is not None
        with marked:
            came = self.progress.enter(Phase.WAITING)
            self.progress.begin_record(came, came)
            self._program.idle()
            command = self.progress.command
            self.progress.begin()
            self._program.run(command)
        self._arrive()

    def _arrive(self) -> None:
        self.progress.enter(Phase.WAITING)
        self.progress.arrived += 1

    def take_messages(self) -> list[ObjectMessage]:
        """What the program has put."""
        messages = self._messages.copy()
        self._messages.clear()
        return messages

    def status(self) -> WorkerStatus:
        """What it is doing now."""
        return WorkerStatus(self._plan, os.getpid(), self._memory.control.snapshot(self._plan.worker_rank))

    def error(self, cause: BaseException, during: str, episode_of: Callable[[Any], Any] | None) -> WorkerError:
        """The same error as for a worker process that raised `cause`."""
        status = self.status()
        text = raised(status, f"{status.doing} ({during})", with_notes(cause))
        episode = None if episode_of is None else episode_of(status)
        error = WorkerError(text if episode is None else f"{text}\n{episode.advice}")
        error.__cause__, error.episode = cause, episode
        return error

    def close(self, *, broken: bool) -> None:
        """Close the environments. It raises no error, except for Ctrl-C. It warns if one raises, unless the sampler is
        `broken`. It may be called twice."""
        program, self._program = self._program, None  # its environments can be garbage-collected now
        if program is None:
            return
        try:
            program.close()
        except (Exception, SystemExit) as error:
            if not broken:
                status = self.status()
                text = raised(status, status.doing, in_one_line(error))
                warnings.warn(text, RuntimeWarning, stacklevel=7)
