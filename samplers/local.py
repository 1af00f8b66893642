"""Workers without a process: the thread of the caller runs their program."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from penstock.buffers.object_pipe import ObjectMessage
from penstock.buffers.reports import in_one_line
from penstock.errors import SamplerBrokenError, SamplerClosedError, WorkerError
from penstock.workers import sigint
from penstock.workers.control import Command
from penstock.workers.failures import WorkerStatus, raised
from penstock.workers.marking import marked
from penstock.workers.plan import WorkerPlan
from penstock.workers.program import SharedMemory, WorkerContext, WorkerProgram
from penstock.workers.progress import Phase, StopCollecting
from penstock.workers.restarts import Restarts

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from penstock.workers.monitor import WaitOptions


class LocalWorker:
    """A worker in the caller's thread: `open` gives it a command, and `work` runs it."""

    def __init__(
        self, plan: WorkerPlan, program: WorkerProgram, memory: SharedMemory, replay_of: Callable[[Any], Any]
    ) -> None:
        self._plan, self._memory, self._replay_of = plan, memory, replay_of
        self._program: WorkerProgram | None = program
        self.progress = memory.control.progress(plan.worker_rank)
        self._messages: list[ObjectMessage] = []
        self._is_built = False

    def build(self, share: Any, request: Callable[[int], None] | None = None) -> None:
        """Start up: this completes the first opening, as in every worker."""
        assert self._program is not None
        self.open(Command())
        self._program.build(
            WorkerContext(
                plan=self._plan,
                share=share,
                memory=self._memory,
                progress=self.progress,
                put=self._messages.extend,
                request=request,
            )
        )
        self._is_built = True
        self._arrive()

    def open(self, command: Command) -> None:
        """Give it a command."""
        self._memory.control.open(self._plan.worker_rank, command)

    @property
    def is_at_work(self) -> bool:
        """Whether it has a command that is not completed."""
        return self._is_built and not self._memory.control.has_arrived(self._plan.worker_rank)

    def work(self) -> None:
        """Run the command."""
        assert self._program is not None
        self._program.idle()
        command = self.progress.command
        self.progress.begin()
        self._program.run(command)
        self._arrive()

    def _arrive(self) -> None:
        self.progress.arrived += 1
        self.progress.enter(Phase.WAITING)

    def take_messages(self) -> list[ObjectMessage]:
        """What the program has put."""
        messages = self._messages.copy()
        self._messages.clear()
        return messages

    def status(self) -> WorkerStatus:
        """Its phase now."""
        return WorkerStatus(self._plan, os.getpid(), self._memory.control.snapshot(self._plan.worker_rank))

    def error(self, cause: BaseException, occasion: str) -> WorkerError:
        """The same error as for a worker process that raised `cause`."""
        status = self.status()
        text = raised(status, f"{status.doing} ({occasion})", in_one_line(cause))
        replay = self._replay_of(status)
        error = WorkerError(text if replay is None else f"{text}\n{replay.advice}")
        error.__cause__, error.replay = cause, replay
        return error

    def close(self, *, broken: bool) -> None:
        """Close the environments. It raises no error, except for Ctrl-C. It warns if one raises, unless the sampler is
        `broken`."""
        program, self._program = self._program, None  # its environments can be garbage-collected now
        self._is_built = False
        if program is None:
            return
        try:
            program.close()
        except (Exception, SystemExit) as error:
            if not broken:
                status = self.status()
                text = raised(status, status.doing, in_one_line(error))
                warnings.warn(text, RuntimeWarning, stacklevel=5)


class SerialPool:
    """The pool of a `SerialSampler`: the calls of `WorkerPool`, with one local worker and no process.

    The worker runs in `submit`. `wait` raises what it raised, as with processes.
    """

    pids: tuple[int, ...] = ()
    has_lost_command = False  #: there is no process that might not get it

    def __init__(
        self,
        plan: WorkerPlan,
        program: WorkerProgram,
        share: Any,
        memory: SharedMemory,
        resources: ExitStack,
        replay_of: Callable[[Any], Any],
    ) -> None:
        self._memory, self._resources = memory, resources
        self._worker = LocalWorker(plan, program, memory, replay_of)
        self.restarts = Restarts(max_restarts=0, window=0.0)  # there is no process to replace
        self._error: SamplerBrokenError | SamplerClosedError | None = None
        self.is_closed = False
        try:
            self._run(lambda: self._build(share), "start-up")
        except BaseException:
            self.close(broken=True)
            raise

    def _build(self, share: Any) -> None:
        self._worker.build(share)

    def submit(self, command: Command) -> int:
        """Run `command`. Returns the number of this opening."""
        if self._error is not None:
            return 0  # `wait` raises it
        self._worker.open(command)
        evaluation = "evaluation, " if command.do_eval else ""
        self._run(self._worker.work, f"{evaluation}itr={command.itr}")
        return self._memory.control.opened[0]

    def _run(self, work: Callable[[], None], occasion: str) -> None:
        try:
            with sigint.allowed(), marked:  # the environments run here, and may hang
                work()
        except StopCollecting:
            self._error = SamplerClosedError(f"shut down by another thread during {occasion}")
        except BaseException as error:
            self._error = self._error_of(error, occasion)
            if not isinstance(error, Exception):  # Ctrl-C: the user wants the call to end now
                raise

    def _error_of(self, error: BaseException, occasion: str) -> SamplerBrokenError:
        return self._worker.error(error, occasion)

    def wait(self, occasion: str) -> None:
        """Raise the error of the command, if there was one."""
        if self._error is not None:
            self.close(broken=True)
            raise self._error

    def run(
        self,
        command: Command,
        occasion: str,
        discard: Callable[[], Any],
        *,
        message: bytes | None = None,
        **how: Unpack[WaitOptions],
    ) -> None:
        """`submit` and `wait`."""
        self._memory.control.stop_eval = False
        if message is not None:
            self._memory.mailbox.post(message)
        self.submit(command)
        self.wait(occasion)

    def take_messages(self, number: int | None = None) -> list[ObjectMessage]:
        """What the worker has put for its last command."""
        return self._worker.take_messages()

    def statuses(self) -> list[WorkerStatus]:
        """What the worker is doing now."""
        return [self._worker.status()]

    def close(self, *, broken: bool = False, await_call: Callable[[], bool] = lambda: True) -> None:
        """Close the environments, then the resources. It raises no error, and it may be called twice.

        Another thread may use the environments. So this first waits with `await_call`; if that returns False, it leaves
        them open.
        """
        self._memory.control.quit = True  # ends a command at its next time step
        if not self.is_closed and await_call():
            self.is_closed = True
            self._worker.close(broken=broken)
            self._resources.close()
