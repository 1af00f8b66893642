"""The team of a central sampler: a crew whose questions are answered, and the environments that the main process
steps itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from penstock.buffers.control import ControlBlock, Phase, Progress
from penstock.buffers.step_buffer import StepBuffer
from penstock.buffers.trajectory_queue import Frame
from penstock.collectors.central import Question
from penstock.errors import SamplerBrokenError, WorkerError
from penstock.samplers.action_server import ActionServer
from penstock.samplers.affinity import keeping_off
from penstock.samplers.crew import Crew
from penstock.samplers.failures import Witness
from penstock.samplers.interrupts import interrupts
from penstock.samplers.plan import WorkerPlan
from penstock.samplers.worker import Job, SharedState, Worker

__all__ = ["OwnShare", "ServedCrew"]


class OwnShare:
    """The environments that the main process steps itself, between two rounds of acting for all."""

    def __init__(self, plan: WorkerPlan) -> None:
        self.plan = plan
        self._worker: Worker | None = None
        self._frames: list[Frame] = []

    def build(self, job: Job, state: SharedState, wait_for: Callable[[Callable[[], bool]], None]) -> None:
        """Build its environments. `wait_for(condition)` serves everybody until the condition holds."""
        self._control, rank = state.control, self.plan.worker_rank
        self._control.open(rank)
        progress = self._control.progress(rank)

        def connect(steps: StepBuffer, columns: range) -> _OwnPort:
            return _OwnPort(steps, columns, progress, wait_for)

        def build() -> None:
            own_job = job.with_factories(*job.factories_of(self.plan))
            self._worker = Worker(self.plan, own_job, state, self, connect)

        self._occasion = "start-up"
        self._perform(build)

    def open(self) -> None:
        """It has something to do, which `work` then does."""
        self._control.open(self.plan.worker_rank)

    @property
    def is_at_work(self) -> bool:
        """Whether it has something to do, or has left it in the middle."""
        rank = self.plan.worker_rank
        return self._worker is not None and self._control.arrived(rank) != self._control.opened(rank)

    def work(self, occasion: str) -> None:
        """Do what is to be done, if anything is. Raises `WorkerError` if an environment or a collector raises."""
        if not self.is_at_work:
            return
        self._occasion = occasion
        self._perform(self._run)

    def _run(self) -> None:
        assert self._worker is not None
        self._worker.collector.reset_if_needed()
        self._worker.run()

    def _perform(self, what: Callable[[], None]) -> None:
        try:
            what()
        except SamplerBrokenError:
            raise  # of a worker, or of the agent
        except Exception as error:
            witness = self.witness()
            raise WorkerError(
                f"{witness} raised {type(error).__name__}: {error} while {witness.doing} ({self._occasion})"
            ) from error
        assert self._worker is not None
        self._worker.progress.arrived += 1
        self._worker.progress.enter(Phase.WAITING)

    def put(self, frames: Sequence[Frame]) -> None:
        """The worker's end of the trajectory queue."""
        self._frames += frames

    def take_frames(self) -> list[Frame]:
        """What has been put."""
        frames, self._frames = self._frames, []
        return frames

    def witness(self) -> Witness:
        """Where it is now."""
        return Witness(self.plan, os.getpid(), self._control.snapshot(self.plan.worker_rank))

    def close(self) -> None:
        """Close its environments."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


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
        crew: Crew,
        server: ActionServer,
        control: ControlBlock,
        own: OwnShare | None,
        job: Job,
        state: SharedState,
    ) -> None:
        self._crew, self._server, self._control, self._own = crew, server, control, own
        self._steps = [steps for steps in (state.steps, state.eval_steps) if steps is not None]
        self.restarts = crew.restarts
        self._worker_cpus = {cpu for member in crew.members for cpu in member.plan.cpus}
        self._occasion, self._look_again = "start-up", 1.0
        self._on_wake: Callable[[], None] | None = None
        if own is not None:
            try:
                own.build(job, state, self._serve_until)
            except BaseException:
                crew.close(broken=True)
                raise

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

    def wait_out(
        self,
        occasion: str,
        *,
        starting: bool = False,
        on_wake: Callable[[], None] | None = None,
        look_again: float = 1.0,
    ) -> None:
        self._occasion, self._on_wake, self._look_again = occasion, on_wake, look_again
        with interrupts.held(), keeping_off(self._worker_cpus):
            if self._own is not None:
                if self._crew.closed:
                    raise WorkerError(f"{self._own.witness()} was interrupted while stepping for itself ({occasion})")
                try:
                    # Only a second Ctrl-C comes through.
                    with interrupts:
                        self._own.work(occasion)
                except BaseException:
                    # A collector that was left in the middle of a batch cannot go on, nor can those beside it.
                    if self._own.is_at_work:
                        self._crew.close(broken=True)
                    raise
            self._serve()  # who asked before a Ctrl-C does not ask again
            self._crew.wait_out(occasion, starting=starting, on_wake=self._serve, look_again=look_again)

    def _serve(self) -> None:
        if interrupts.has_come:
            self._control.stop_eval = True  # should it be an evaluation: nobody will see its end
        self._server.serve(self._answer)
        if self._on_wake is not None:
            self._on_wake()

    def _serve_until(self, condition: Callable[[], bool]) -> None:
        self._serve()
        while not condition():
            self._crew.wait_out(self._occasion, on_wake=self._serve, look_again=self._look_again, until=condition)
            if not condition():  # all workers have come to their end, and it is this process's turn
                self._serve()

    def _answer(self, rank: int) -> None:
        if rank < len(self._crew.members):
            self._crew.members[rank].gate.answer()
        else:
            self._control.answer(rank)

    def take_frames(self, promised: Sequence[int]) -> list[Frame]:
        frames = self._crew.take_frames(promised[: len(self._crew.members)])
        return frames if self._own is None else frames + self._own.take_frames()

    def witnesses(self) -> list[Witness]:
        return self._crew.witnesses() + ([] if self._own is None else [self._own.witness()])

    def close(self, *, broken: bool = False) -> None:
        self._crew.close(broken=broken)
        if self._own is not None:
            self._own.close()
        for steps in self._steps:
            steps.memory.close()
