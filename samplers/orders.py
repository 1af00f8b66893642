"""Orders: what the workers are sent out on, one after the other, and what they bring back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.buffers.trajectory_queue import ObjectMessage
from penstock.collectors import TrajInfo
from penstock.envs.calls import EnvCall, results
from penstock.samplers.allocation import Allocation
from penstock.samplers.results import Deliveries
from penstock.workers.team import Team, Wait

__all__ = ["Orders"]

_EVAL_LOOK_AGAIN_SECONDS = 0.005  # how soon a running evaluation is stopped once enough have finished


class Orders:
    """Sends the workers out on batches, evaluations and calls, and takes what they hand over.

    Ctrl-C ends a wait, not what is waited for: a batch can be waited for again; after an evaluation or a call the
    next order waits first until the workers are done with it, and drops what they bring.

    Every method raises `SamplerBrokenError` if a worker fails.
    """

    #: The version of the parameters that the last batch was begun with.
    policy_version: int | None = None

    def __init__(self, team: Team, allocation: Allocation, deliveries: Deliveries) -> None:
        self._team, self._deliveries = team, deliveries
        self._control, self._mailbox, self._parameters = allocation.control, allocation.mailbox, allocation.parameters
        self._is_away = False  # the workers are on an evaluation or a call, whose wait may have been interrupted

    def wait_for_start(self) -> None:
        """Wait until all workers have built what they need."""
        self._wait(Wait("start-up", starting=True))

    def begin_batch(self, itr: int) -> None:
        """Have the workers collect a batch."""
        self._end_what_was_interrupted()
        self._control.itr, self._control.do_eval = itr, False
        self.policy_version = self._parameters.version
        self._team.open_gates()

    def wait_for_batch(self) -> None:
        """Wait until the batch is complete; `take_traj_infos` then has its trajectories."""
        self._wait(Wait(f"itr={self._control.itr}"))

    def evaluate(self, itr: int, limit: int | None) -> list[TrajInfo]:
        """The trajectories of an evaluation, which is ended soon after `limit` have finished."""
        self._end_what_was_interrupted()
        control = self._control
        control.itr, control.do_eval, control.stop_eval = itr, True, False

        wait = Wait(f"evaluation, itr={itr}")
        if limit is not None:

            def stop_if_enough() -> None:
                if sum(self._deliveries.promised()) >= limit:
                    control.stop_eval = True

            wait = replace(wait, on_wake=stop_if_enough, look_again=_EVAL_LOOK_AGAIN_SECONDS)
        self._is_away = True
        self._team.open_gates()
        self._wait(wait)
        self._is_away = False
        return self.take_traj_infos()

    def perform(self, call: EnvCall) -> list[Any]:
        """What a call on every environment returned; raises `EnvCallError` if it raised."""
        self._end_what_was_interrupted()
        self._mailbox.post(call.dumps())
        self._control.do_eval = False  # or a worker that dies would be said to have been evaluating
        self._control.do_call = self._is_away = True
        self._team.open_gates()
        self._wait(Wait(f"{call.verb} {call.name!r} on the environments"))
        self._control.do_call = self._is_away = False
        return results(call, self._take_frames())

    def take_traj_infos(self) -> list[TrajInfo]:
        """What has been handed over since the gates were opened, ordered by time step, then env_rank."""
        return self._deliveries.take_traj_infos(self._team)

    def _take_frames(self) -> list[ObjectMessage]:
        return self._deliveries.take_frames(self._team)

    def _end_what_was_interrupted(self) -> None:
        if self._is_away:
            self._control.stop_eval = True
            self._wait(Wait("what was interrupted"))
            self._is_away = False
            if self._control.do_call:
                self._take_frames()
                self._control.do_call = False
            else:
                self.take_traj_infos()

    def _wait(self, wait: Wait) -> None:
        try:
            self._team.wait_out(wait)
        except KeyboardInterrupt as interrupt:  # where exactly the wait was is of no interest to the user
            raise interrupt.with_traceback(None) from None
