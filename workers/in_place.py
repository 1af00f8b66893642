"""A worker without a process: the thread of the caller runs its program."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

from penstock.buffers.object_pipe import ObjectMessage
from penstock.buffers.reports import in_one_line
from penstock.errors import WorkerError
from penstock.workers.control import Phase
from penstock.workers.failures import WorkerStatus, raised
from penstock.workers.marking import marked
from penstock.workers.plan import WorkerPlan
from penstock.workers.program import SharedMemory, WorkerContext, WorkerProgram


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
        """What it is doing now."""
        return WorkerStatus(self._plan, os.getpid(), self._memory.control.snapshot(self._plan.worker_rank))

    def error(self, cause: BaseException, during: str, episode_of: Callable[[Any], Any] | None) -> WorkerError:
        """The same error as for a worker process that raised `cause`."""
        status = self.status()
        text = raised(status, f"{status.doing} ({during})", in_one_line(cause))
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
