"""The pool of a central sampler: the main process replies to the workers' requests, and may step environments too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from penstock.buffers.object_pipe import ObjectMessage
from penstock.errors import SamplerBrokenError, SamplerClosedError, WorkerError
from penstock.samplers.inference_server import InferenceServer
from penstock.samplers.local import LocalWorker, SerialPool
from penstock.samplers.sampler_memory import SamplerMemory
from penstock.workers import sigint
from penstock.workers.affinity import avoid_cpus
from penstock.workers.control import Command
from penstock.workers.failures import WorkerStatus
from penstock.workers.marking import marked
from penstock.workers.plan import PoolOptions, WorkerPlan
from penstock.workers.pool import WorkerPool
from penstock.workers.program import WorkerProgram
from penstock.workers.progress import URGENT, Phase

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from penstock.workers.monitor import WaitOptions


class CentralPool(WorkerPool):
    """While this pool waits, it also replies to requests, and runs the local worker if there is one."""

    def __init__(
        self,
        plans: Sequence[WorkerPlan],
        program: WorkerProgram,
        shares: Sequence[Any],
        memory: SamplerMemory,
        options: PoolOptions,
        resources: ExitStack,
        server: InferenceServer,
        local: LocalWorker | None,
    ) -> None:
        """If there is a `local` worker, the last plan and the last share belong to it."""
        self.server, self._local, self._was_interrupted = server, local, False
        self._occasion = "start-up"
        self._on_wake: Callable[[], None] | None = None
        self._worker_cpus = {cpu for plan in plans for cpu in plan.cpus}
        n = len(plans) - (local is not None)
        super().__init__(plans[:n], [program] * n, shares[:n], memory, options, resources)
        if local is not None:
            try:
                with marked:
                    local.build(shares[-1], self._request_locally)
            except Exception as error:
                failure = local.error(error, self._occasion)  # before `close`, which changes the phase
                self.close(broken=True)
                raise failure from error
            except BaseException:
                self.close(broken=True)
                raise

    def _submit(self, command: Command, ranks: Iterable[int] | None = None) -> None:
        self.server.begin(command, self._wanted_openings[0] + 1)
        self.server.act_ahead(command)
        super()._submit(command, ranks)
        if self._local is not None:
            self._local.open(command)

    def wait(self, occasion: str, **how: Unpack[WaitOptions]) -> None:
        """As `WorkerPool.wait`, while requests get replies and the local worker runs."""
        self._occasion, self._on_wake = occasion, how.get("on_wake")
        how.update(self._serving())
        with sigint.deferred(), avoid_cpus(self._worker_cpus):
            try:
                if self._local is not None:
                    self._run_locally(self._local)
                    if self._monitor.is_closing:
                        raise SamplerClosedError(f"shut down by another thread during {occasion}")
                self._serve()  # a request that came before a Ctrl-C still waits, and will not wake this process again
            except SamplerBrokenError:
                self.close(broken=True)
                raise
            super().wait(occasion, **how)

    def _run_locally(self, local: LocalWorker) -> None:
        if self._was_interrupted:
            raise WorkerError(f"{local.status()} was interrupted while it ran its command ({self._occasion})")
        if not local.is_at_work:
            return
        try:
            with sigint.nested(), marked:  # only a second Ctrl-C interrupts it
                local.work()
        except SamplerBrokenError:
            raise  # the error of another worker, or of the agent
        except Exception as error:
            if not self._monitor.is_closing:  # otherwise another thread closes the pool: see `wait`
                raise local.error(error, self._occasion) from error
        except BaseException:
            # A collector that was stopped in the middle of a batch cannot continue, so neither can the other workers.
            if local.is_at_work:
                self._was_interrupted = True
                self.close(broken=True)
            raise

    def _serve(self, until: Callable[[], bool] = lambda: False) -> None:
        if sigint.is_pending():
            self.control.stop_eval = True  # end a running evaluation early: its results will be dropped
        self.server.serve(self._wake, until)
        if self._on_wake is not None:
            self._on_wake()

    def _serving(self) -> WaitOptions:
        """The arguments of a wait in which requests get replies."""
        server = self.server
        return {"on_wake": self._serve, "is_due": lambda: server.has_work, "wake_for_any": server.wake_for_any}

    def _request_locally(self, kind: int) -> None:
        """The local worker's request: serve until it has its reply."""
        assert self._local is not None
        progress = self._local.progress
        progress.request(kind)
        self._serve(lambda: progress.has_reply)
        how: WaitOptions = {**self._serving(), "until": lambda: progress.has_reply, "interruptible": False}
        while not progress.has_reply:
            super().wait(self._occasion, **how)
            if not progress.has_reply:  # all processes have arrived, and only this request has no reply
                self._serve()
        progress.enter(Phase.ACTING)

    def _wake(self, rank: int) -> None:
        if rank < len(self.handles):  # the local worker runs in this thread, and needs no wake-up
            self.handles[rank].gate.wake()

    def take_messages(self, number: int | None = None) -> list[ObjectMessage]:
        messages = super().take_messages(number)
        return messages if self._local is None else messages + self._local.take_messages()

    def statuses(self) -> list[WorkerStatus]:
        return super().statuses() + ([] if self._local is None else [self._local.status()])

    def _release(self, broken: bool) -> None:
        if self._local is not None:
            self._local.close(broken=broken)
        super()._release(broken)


class CentralSerialPool(SerialPool):
    """The pool of a central sampler without processes: the caller's process steps all environments."""

    def __init__(
        self,
        plan: WorkerPlan,
        program: WorkerProgram,
        share: Any,
        memory: SamplerMemory,
        resources: ExitStack,
        replay_of: Callable[[Any], Any],
        server: InferenceServer,
    ) -> None:
        self.server = server
        super().__init__(plan, program, share, memory, resources, replay_of)

    def _build(self, share: Any) -> None:
        self._worker.build(share, self._request)

    def submit(self, command: Command) -> int:
        if self._error is None:
            self.server.begin(command, self._memory.control.opened[0] + 1)
        return super().submit(command)

    def _request(self, kind: int) -> None:
        self.server.act_at_once(for_values=kind == URGENT)

    def _error_of(self, error: BaseException, occasion: str) -> SamplerBrokenError:
        if isinstance(error, SamplerBrokenError) and error is self.server.error:
            return error  # it says already that the agent raised it
        return super()._error_of(error, occasion)
