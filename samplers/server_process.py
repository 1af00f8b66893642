"""The action server as a process of its own: one more member of the crew, which serves between its two gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.buffers.control import Phase, StopCollecting
from penstock.errors import WorkerError
from penstock.samplers.action_server import ActionServer, ServerJob
from penstock.samplers.affinity import keeping_off
from penstock.samplers.gates import Gate
from penstock.samplers.worker import SharedState

__all__ = ["ServingWorker"]


class ServingWorker:
    """What a worker's process does for its environments, done for the agent: the same calls, from the same loop."""

    def __init__(
        self, job: ServerJob, state: SharedState, gate: Gate, served: Sequence[Gate], main_process: Any
    ) -> None:
        """`gate` is its own; `served` are those of the workers, by rank."""
        self._control, self._gate, self._served, self._main_process = state.control, gate, served, main_process
        self._look_again_ms = max(1, round(job.sign_of_life * 1000))
        self._worker_cpus = {cpu for plan in job.plans for cpu in plan.cpus}
        self._server = ActionServer(job, state)
        self.progress = self._server.progress

    def reset_if_needed(self) -> None:
        """There is nothing to be reset."""

    def run(self) -> None:
        """Answer questions until every worker has come to its barrier_out."""
        control, server, progress = self._control, self._server, self.progress
        progress.begin()
        if control.do_call:
            return
        begin = server.begin_evaluation if control.do_eval else server.begin_batch
        begin(control.itr)
        with keeping_off(self._worker_cpus):
            while not self._all_arrived():
                if control.quit:
                    raise StopCollecting
                self._serve()
                progress.enter(Phase.SERVING)  # a sign of life: it is not overdue however long nobody asks
                self._gate.sleep(self._main_process, self._look_again_ms)

    def _serve(self) -> None:
        try:
            return self._server.serve(self._wake)
        except WorkerError as error:
            cause = error.__cause__ or error
        # The agent's own exception: who raised it and when, the main process says as of every worker.
        raise cause

    def _all_arrived(self) -> bool:
        control = self._control
        return all(control.arrived(rank) == control.opened(rank) for rank in range(len(self._served)))

    def _wake(self, rank: int) -> None:
        self._served[rank].wake()

    def close(self) -> None:
        """No question will come any more."""
        self._server.close()
