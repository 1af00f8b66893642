"""The worker pool of a vector environment."""

from __future__ import annotations

import enum
import multiprocessing
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from gymnasium import error as gymnasium_error

from penstock.envs.calls import EnvCall, results
from penstock.errors import PenstockError, SamplerClosedError, SamplerStateError, brief
from penstock.vector.exchange import Exchange, Ids
from penstock.vector.step_memory import VectorMemory
from penstock.vector.step_program import VectorProgram
from penstock.vector.vector_infos import Infos
from penstock.workers.call_guard import CallGuard
from penstock.workers.control import Command
from penstock.workers.plan import PoolOptions, WorkerPlan
from penstock.workers.pool import WorkerPool


class State(enum.Enum):
    """The state of a vector environment. The value names the calls that are expected next."""

    NEW = "reset"
    READY = "step, step_async, send or reset"
    STEPPING = "step_wait"
    RESETTING = "reset_wait"
    SENT = "recv, send or reset"
    BROKEN = "close"
    CLOSED = "none"


#: The call that is not finished, by state.
_PENDING = {State.STEPPING: "step", State.RESETTING: "reset", State.SENT: "send"}
_WAITS = ("step_wait", "reset_wait", "recv")


class VectorClosedError(SamplerClosedError, gymnasium_error.ClosedEnvironmentError):
    """A call came after `close`."""


class PendingCallError(SamplerStateError, gymnasium_error.AlreadyPendingCallError):
    """A call came while another call was not finished. `name` is the name of the unfinished call."""

    def __init__(self, message: str, name: str = "") -> None:
        Exception.__init__(self, message)
        self.name = name


class NoPendingCallError(SamplerStateError, gymnasium_error.NoAsyncCallError):
    """`step_wait`, `reset_wait` or `recv` came without a call to wait for. `name` is the name of this call."""

    def __init__(self, message: str, name: str = "") -> None:
        Exception.__init__(self, message)
        self.name = name


class WaitTimeoutError(PenstockError, multiprocessing.TimeoutError, TimeoutError):
    """A call did not finish within `timeout` seconds. It continues: wait again for its results."""


class VectorGuard(CallGuard[State]):
    """The guard of a vector environment."""

    def __init__(self) -> None:
        super().__init__(State, "vector environment", "close", owned_by_process=True)

    def _refusal(self, name: str, *, is_busy: bool) -> SamplerStateError:
        refusal = super()._refusal(name, is_busy=is_busy)
        if self.state is State.CLOSED:
            return VectorClosedError(*refusal.args)
        if is_busy:
            return refusal
        if self.state in _PENDING:
            return PendingCallError(str(refusal), _PENDING[self.state])
        if name in _WAITS and self.state is not State.BROKEN:
            return NoPendingCallError(str(refusal), name)
        return refusal


_TIMEOUT_POLL_SECONDS = 0.01  # how late a timeout may end


class VectorPool(WorkerPool):
    """Steps, resets and calls as commands of a worker pool."""

    wakes_for_any = False

    def __init__(
        self,
        plans: Sequence[WorkerPlan],
        program: VectorProgram,
        worker_data: Sequence[Any],
        options: PoolOptions,
        resources: ExitStack,
        *,
        check_finite: bool,
    ) -> None:
        n_envs = sum(len(plan.columns) for plan in plans)
        n_seats = None if program.seats is None else len(program.seats.cells(0, range(n_envs)))
        spaces = program.observation_space, program.action_space
        memory = VectorMemory.allocate(*spaces, n_envs, len(plans), n_seats)
        resources.callback(memory.close)
        self.exchange = Exchange(memory, program, [plan.columns for plan in plans], check_finite=check_finite)
        self._ranks = np.repeat([plan.worker_rank for plan in plans], [len(plan.columns) for plan in plans])
        super().__init__(plans, [program] * len(plans), worker_data, memory, options, resources)

    # ---- steps -----------------------------------------------------------------------------

    def step(self, actions: object, which: Ids | None = None) -> None:
        """Step all environments, or the environments `which`: then each result can be taken as soon as it is there."""
        self.finish_interrupted()
        rows: slice | Ids = slice(None) if which is None else which
        ranks = None if which is None else np.flatnonzero(np.bincount(self._ranks[which])).tolist()
        self.exchange.put_actions(actions, rows)
        self.exchange.request(rows, one_by_one=which is not None)
        self.submit(Command(), ranks)

    def wait_steps(self) -> None:
        """Wait until all requests have their replies."""
        self.finish_interrupted()
        self.wait("step")  # no keywords: this runs at every step

    def wait_ready(self, wanted: int, max_wait: float | None = None) -> None:
        """Wait until `wanted` results are ready, with `max_wait` at most so many seconds after the first one. Call
        `finish_interrupted` before."""
        if max_wait is None:
            self.wait("step", self.exchange.when_ready(wanted))
        else:
            self.wait("step", self.exchange.when_ready(1))
            self._wait_until(self.exchange.when_ready(wanted), max_wait, "step")

    def wait_at_most(self, timeout: float, name: str, wanted: int | None = None) -> None:
        """Wait until all requests have replies, or `wanted` results are ready. Raises `WaitTimeoutError` after
        `timeout` seconds; its text begins with `name`. The workers continue."""
        self.finish_interrupted()
        exchange = self.exchange
        is_met = exchange.is_answered if wanted is None else exchange.when_ready(wanted)
        self._wait_until(is_met, timeout, name.removesuffix("_wait"))
        if not is_met():
            late = np.setdiff1d(exchange.outstanding, exchange.ready).tolist()
            raise WaitTimeoutError(
                f"{name}: environments {brief(late)} have not finished within timeout={timeout:g} s. They continue: "
                f"call {name} again"
            )

    def _wait_until(self, is_met: Callable[[], bool], seconds: float, during: str) -> None:
        """Wait until `is_met()` is True, at most for `seconds`."""
        deadline = time.monotonic() + seconds
        self.wait(
            during,
            until=lambda: is_met() or time.monotonic() >= deadline,
            poll_interval=min(seconds, _TIMEOUT_POLL_SECONDS),
        )

    def take(self, which: Ids) -> Infos:
        """Take the results of `which`; returns their infos, by environment."""
        return self.exchange.take(which, self._receive_infos)

    # ---- resets and calls --------------------------------------------------------------------

    def begin_reset(self, message: bytes, seeds: Sequence[int | None], which: Ids) -> None:
        """Reset the environments `which`, after all outstanding steps; `message` is a pickled `ResetMessage`.

        Results of these environments that were not taken are dropped. `wait_steps` waits for the end.
        """
        self._request_reset(seeds, which)
        self._memory.mailbox.post(message)
        self.submit(Command(has_message=True))

    def _request_reset(self, seeds: Sequence[int | None], which: Ids) -> None:
        self.wait_steps()
        self.exchange.drop(which)
        self.exchange.put_seeds(seeds, which)
        self.exchange.request(which)

    def reset(
        self, message: bytes, seeds: Sequence[int | None], which: Ids, take: Callable[[], tuple[Any, Infos]]
    ) -> tuple[Any, Infos]:
        """`begin_reset`, wait, and `take`. If Ctrl-C ends the wait, the results will be taken later, and dropped."""
        self._request_reset(seeds, which)
        return self.run(Command(has_message=True), "reset", take, message=message)

    def call(self, call: EnvCall) -> tuple[Any, ...]:
        """What the environments return. Steps that still run are finished first, and their results can still be
        received."""
        message = call.dumps()
        self.wait_steps()
        self._receive_infos()
        during = f"{call.verb_in_errors} {call.name!r}"
        return tuple(results(call, self.run(Command(has_message=True), during, self.take_messages, message=message)))

    def _receive_infos(self) -> None:
        for handle in self.handles:
            self.exchange.put_infos(handle.pipe.take_complete())
