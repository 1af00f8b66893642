"""The inference server as a process of its own: one more member of the crew, which serves between its two gates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import WorkerError
from penstock.samplers.inference_server import InferenceServer, ServerJob
from penstock.samplers.program import Job, SharedState
from penstock.workers.affinity import avoid_cpus
from penstock.workers.control import Phase, StopCollecting
from penstock.workers.plan import WorkerPlan
from penstock.workers.work import Station, Task

__all__ = ["ServedJob", "ServingWorker"]


@dataclass(frozen=True)
class ServedJob:
    """The job of a crew whose last member is the inference server."""

    workers: Job
    server: ServerJob | None

    def arguments(self) -> Mapping[str, Any]:
        """What it is made of, by the names that the user knows it by."""
        names = {"compile_options": "compile_model"}
        return {
            **self.workers.arguments(),
            **{names.get(name, name): value for name, value in vars(self.server).items()},
        }

    def common(self) -> ServedJob:
        """What the workers share."""
        return ServedJob(self.workers.common(), None)

    def share_of(self, plan: WorkerPlan) -> Any:
        """A worker's own share, or all that the server needs."""
        return _Serving(self.server) if plan.is_server and self.server else self.workers.share_of(plan)

    def with_share(self, share: Any) -> Task:
        """What one of them is to do."""
        return share if isinstance(share, _Serving) else self.workers.with_share(share)


@dataclass(frozen=True)
class _Serving:
    job: ServerJob

    def start_work(self, station: Station) -> ServingWorker:
        return ServingWorker(self.job, station)


class ServingWorker:
    """What a worker's process does for its environments, done for the agent: the same calls, from the same loop."""

    def __init__(self, job: ServerJob, station: Station) -> None:
        state: SharedState = station.memory
        self._control, self._gate = state.control, station.gate
        self._served, self._main_process = station.served, station.main_process
        self._look_again_ms = max(1, round(job.sign_of_life * 1000))
        self._worker_cpus = {cpu for plan in job.plans for cpu in plan.cpus}
        self._server = InferenceServer(job, state)
        self.progress = self._server.progress

    def prepare(self) -> None:
        """Nothing goes on while nobody asks."""

    def run(self) -> None:
        """Answer questions until every worker has come to its barrier_out."""
        control, server, progress = self._control, self._server, self.progress
        progress.begin()
        if control.do_call:
            return
        begin = server.begin_evaluation if control.do_eval else server.begin_batch
        begin(control.itr)
        with avoid_cpus(self._worker_cpus):
            while not server.all_have_arrived:
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

    def _wake(self, rank: int) -> None:
        self._served[rank].wake()

    def close(self) -> None:
        """No question will come any more."""
        self._server.close()
