"""The team of a central sampler: a crew whose questions are answered, and the environments that the main process
steps itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from penstock.buffers.step_buffer import StepBuffer
from penstock.buffers.trajectory_queue import ObjectMessage
from penstock.collectors.central import Question
from penstock.errors import SamplerBrokenError, WorkerError
from penstock.samplers.inference_server import InferenceServer
from penstock.samplers.local import LocalWorker
from penstock.samplers.program import Job
from penstock.workers.affinity import avoid_cpus
from penstock.workers.control import ControlBlock, Phase, Progress
from penstock.workers.failures import WorkerStatus
from penstock.workers.interrupts import interrupts
from penstock.workers.pool import WorkerPool
from penstock.workers.team import Wait

__all__ = ["ServedCrew"]


class _OwnPort:
    """Asks the server that runs in the same thread: waiting for the answer is serving."""

    def __init__(
        self, steps: StepBuffer, columns: range, progress: Progress, wait_for: Callable[[Callable[[], bool]], None]
    ) -> None:
        self.row = steps.columns(columns)
        self._progress, self._wait_for = progress, wait_for

    def ask(self, question: Question) -> None:
        self._progress.ask(int(question))
        self._wait_for(lambda: self._progress.is_answered)
        self._progress.enter(Phase.ACTING)


class ServedCrew:
    """A crew, the server that answers it, and the main process's own share of the environments, if it has one."""

    def __init__(
        self,
        crew: WorkerPool,
        server: InferenceServer,
        control: ControlBlock,
        own: LocalWorker | None,
        job: Job,
    ) -> None:
        self._crew, self._server, self._control, self._own = crew, server, control, own
        self.restarts = crew.restarts
        self._on_wake: Callable[[], None] | None = None
        self._worker_cpus = {cpu for member in crew.members for cpu in member.plan.cpus}
        self._wait = Wait("start-up", on_wake=self._serve)
        if own is not None:
            try:
                with self._telling_of(own):
                    own.build(job, self._connect)
            except BaseException:
                crew.close(broken=True)
                raise

    def _connect(self, steps: StepBuffer, columns: range) -> _OwnPort:
        assert self._own is not None
        return _OwnPort(steps, columns, self._own.progress, self._serve_until)

    @contextmanager
    def _telling_of(self, own: LocalWorker) -> Iterator[None]:
        """An exception of its environments or its collector is told as that of a worker."""
        try:
            yield
        except SamplerBrokenError:
            raise  # of another worker, or of the agent
        except Exception as error:
            raise own.failure(error, self._wait.occasion) from error

    @property
    def pids(self) -> list[int]:
        """The worker processes' ids."""
        return self._crew.pids

    def open_gates(self) -> None:
        control = self._control
        if not control.do_call:
            begin = self._server.begin_evaluation if control.do_eval else self._server.begin_batch
            begin(control.itr)
        self._crew.open_gates()
        if self._own is not None:
            self._own.open()

    def wait_out(self, wait: Wait) -> None:
        self._wait = replace(wait, on_wake=self._serve)
        self._on_wake = wait.on_wake
        with interrupts.held(), avoid_cpus(self._worker_cpus):
            if self._own is not None:
                self._work(self._own)
            self._serve()  # who asked before a Ctrl-C does not ask again
            self._crew.wait_out(self._wait)

    def _work(self, own: LocalWorker) -> None:
        if self._crew.closed:
            raise WorkerError(f"{own.witness()} was interrupted while stepping for itself ({self._wait.occasion})")
        if not own.is_at_work:
            return
        try:
            # Only a second Ctrl-C comes through.
            with interrupts, self._telling_of(own):
                own.work()
        except BaseException:
            # A collector that was left in the middle of a batch cannot go on, nor can those beside it.
            if own.is_at_work:
                self._crew.close(broken=True)
            raise

    def _serve(self, until: Callable[[], bool] = lambda: False) -> None:
        if interrupts.has_come:
            self._control.stop_eval = True  # should it be an evaluation: nobody will see its end
        self._server.serve(self._wake, until)
        if self._on_wake is not None:
            self._on_wake()

    def _serve_until(self, condition: Callable[[], bool]) -> None:
        self._serve(condition)
        while not condition():
            self._crew.wait_out(replace(self._wait, starting=False, until=condition, interruptible=False))
            if not condition():  # all workers have come to their end, and it is this process's turn
                self._serve()

    def _wake(self, rank: int) -> None:
        if rank < len(self._crew.members):  # else it is this thread's own share that has its answer
            self._crew.members[rank].gate.wake()

    def take_frames(self, promised: Sequence[int]) -> list[ObjectMessage]:
        frames = self._crew.take_frames(promised[: len(self._crew.members)])
        return frames if self._own is None else frames + self._own.take_frames()

    def witnesses(self) -> list[WorkerStatus]:
        return self._crew.witnesses() + ([] if self._own is None else [self._own.witness()])

    def close(self, *, broken: bool = False) -> None:
        self._crew.close(broken=broken)
        self._server.close()
        if self._own is not None:
            self._own.close(broken=broken)
