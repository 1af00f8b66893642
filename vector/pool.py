"""The workers of a vector environment as the main process uses them: asked for steps, given orders, ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from typing import Any

import numpy as np

from penstock.buffers.trajectory_queue import ObjectPipe
from penstock.envs.calls import EnvCall, results
from penstock.vector.exchange import Exchange, Ids
from penstock.vector.memory import VectorMemory
from penstock.vector.program import VectorJob
from penstock.workers.plan import WorkerPlan
from penstock.workers.pool import PoolOptions, WorkerPool
from penstock.workers.team import Wait

__all__ = ["VectorCrew"]


class VectorCrew:
    """A crew, and what is exchanged with it.

    Raises a `SamplerBrokenError` from every wait in which a worker fails; the processes have been ended then.
    """

    def __init__(self, plans: Sequence[WorkerPlan], job: VectorJob, memory: VectorMemory, rules: PoolOptions) -> None:
        self._memory, self._control, self._plans = memory, memory.control, plans
        self.exchange = exchange = Exchange(memory, job)

        def save_infos(pipe: ObjectPipe) -> None:
            """A worker is being replaced: what it has told of answered requests is still to be taken."""
            exchange.put_infos(pipe.take_complete())

        self._owners = np.repeat([plan.worker_rank for plan in plans], [len(plan.columns) for plan in plans])
        # The workers are on an order, whose wait the user may have interrupted; and if it is one to reset, whom.
        self._is_away = False
        self._resetting: Ids | None = None
        try:
            self._crew = WorkerPool(plans, job, memory, rules, on_replace=save_infos)
            # Runs when this object is collected and at exit, before multiprocessing joins children.
            self._finalizer = Finalize(self, _end, (self._crew, memory), exitpriority=100)
            self._crew.wait_out(Wait("start-up", starting=True))
        except BaseException:
            if "_crew" in vars(self):
                self._crew.close(broken=True)
            memory.close()
            raise

    @property
    def n_restarts(self) -> int:
        """How many workers have been replaced."""
        return self._crew.restarts.total

    # ---- steps -----------------------------------------------------------------------------

    def step(self, actions: Any) -> None:
        """Have all environments step."""
        self.end_order()
        self.exchange.put_actions(actions)
        self.exchange.request()
        self._crew.open_gates()

    def step_some(self, actions: Any, which: Ids) -> None:
        """Have the environments `which` step, and tell of each."""
        self.end_order()
        self.exchange.put_actions(actions, which)
        self.exchange.request(which, one_by_one=True)
        self._crew.open_gates(np.unique(self._owners[which]).tolist())

    def wait(self, until: Callable[[], bool] | None = None) -> None:
        """Wait until all that was asked for has been done, or `until`."""
        self.end_order()
        self._crew.wait_out(Wait("step", until=until))

    def take(self, which: Ids) -> list[tuple[int, dict[str, Any]]]:
        """The answers of `which` count as taken; returns the infos that came with them, by environment."""
        return self.exchange.take(which, self._collect_infos)

    # ---- orders ----------------------------------------------------------------------------

    def reset(self, message: bytes, seeds: Sequence[int | None], which: Ids) -> None:
        """Reset the environments `which`, once steps that are outstanding have ended. What has come of those of the
        same environments is dropped. `message` is a `ResetOrder`."""
        self.wait()
        self.exchange.drop(which)
        self.exchange.put_seeds(seeds, which)
        self._resetting = which
        self.exchange.request(which)
        self._send(message, Wait("reset"))
        self._resetting = None

    def call(self, call: EnvCall) -> tuple[Any, ...]:
        """What the environments return. Steps that are outstanding are ended first, and stay to be received."""
        message = call.dumps()
        self.wait()
        self._collect_infos()
        self._send(message, Wait(f"{call.shown} {call.name!r}"))
        promised = [self._control.trajectories(plan.worker_rank) for plan in self._plans]
        return tuple(results(call, self._crew.take_frames(promised)))

    def _send(self, message: bytes, wait: Wait) -> None:
        self._memory.mailbox.post(message)
        self._control.do_call = self._is_away = True
        self._crew.open_gates()
        self._crew.wait_out(wait)
        self._control.do_call = self._is_away = False

    def end_order(self) -> None:
        """Wait for the end of an order whose wait was interrupted."""
        if self._is_away:
            self._crew.wait_out(Wait("what was interrupted"))
            self._control.do_call = self._is_away = False
            self._collect_infos()  # and drop the results that nobody waits for any more
            if self._resetting is not None:
                self.exchange.drop(self._resetting)
                self._resetting = None

    def _collect_infos(self) -> None:
        for member in self._crew.members:
            self.exchange.put_infos(member.pipe.take_complete())

    def close(self) -> None:
        """End the workers. Never raises; again is harmless."""
        _end(self._crew, self._memory)
        self._finalizer.cancel()


def _end(crew: WorkerPool, memory: VectorMemory) -> None:
    crew.close()
    memory.close()
