"""The inference server as a process: one more worker of the pool, which serves between its two gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.errors import WorkerError
from penstock.samplers.inference_server import InferenceServer, ServerOptions
from penstock.workers.affinity import avoid_cpus
from penstock.workers.control import Command
from penstock.workers.program import WorkerContext
from penstock.workers.progress import Phase, StopCollecting


@dataclass
class ServerProgram:
    """The `WorkerProgram` of an inference server."""

    options: ServerOptions

    data_name = "env_fn"  # unused: a server has no data of its own

    def pickled_parts(self) -> dict[str, Any]:
        """The options of the server, by the names of the user's arguments."""
        names = {"compile_options": "compile_model"}
        return {names.get(name, name): value for name, value in vars(self.options).items()}

    def build(self, context: WorkerContext) -> None:
        """Build the server."""
        assert context.gate is not None
        assert context.wakers is not None
        self._context, self._control, self._gate = context, context.memory.control, context.gate
        self._wake = context.wakers.wake
        self._poll_ms = max(1, round(self.options.heartbeat_seconds * 1000))
        self._worker_cpus = {cpu for plan in self.options.plans for cpu in plan.cpus}
        self._server = InferenceServer(self.options, context.memory)

    def idle(self) -> None:
        """There is nothing to do between two commands."""

    def run(self, command: Command) -> None:
        """Reply to requests until every worker has arrived at barrier_out."""
        if command.is_call:
            return
        server, progress = self._server, self._context.progress
        server.begin(command, progress.arrived + 1)  # all gates are opened equally often
        if command.version:
            self._gate.wake_main()  # `sync_shared_memory` may wait until the parameters are loaded
        with avoid_cpus(self._worker_cpus):
            while not server.all_have_arrived:
                if self._control.quit:
                    raise StopCollecting
                try:
                    server.serve(self._wake)
                except WorkerError as error:
                    # The agent's own exception: the main process adds who raised it and when, as for every worker.
                    raise (error.__cause__ or error) from None
                progress.enter(Phase.SERVING)  # a heartbeat: a server without requests does not hang
                self._gate.sleep(lambda: server.has_work or server.all_have_arrived, self._poll_ms, server.wake_for)

    def close(self) -> None:
        """Close the server."""
        self._server.close()
