"""Failures of games and of their policies: the error says which one."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest

from penstock import AgentStep, ParallelSampler, SamplerBrokenError, WorkerDiedError, WorkerError, WorkerTimeoutError
from penstock.envs.toy import ScriptedGame
from penstock.testing import Fault
from penstock.testing.faults import Trigger

from ..scale import pairs, scaled, with_start_methods
from ..support import sampler_of
from ..toy_games import TurnGame, Valued
from .failing_games import FailingTurns, kinds, seat

pytestmark = [pytest.mark.timeout(scaled(3600, 60)), pytest.mark.slow]

B = 6
HOWS: dict[str, tuple[type[SamplerBrokenError], str]] = {
    "raise": (WorkerError, "raised .*InjectedFault"),
    "kill": (WorkerDiedError, r"was killed by SIGKILL"),
    "exit": (WorkerDiedError, "exited with code 0"),
    "hang": (WorkerTimeoutError, r"no progress"),
}


def message_of(how: str, agents: Any, env_fn: Any, start_method: str = "forkserver", **options: Any) -> str:
    """The error of a sampler in which something fails in this way."""
    error, message = HOWS[how]
    limit = {"step_timeout": 1.0} if how == "hang" else {}
    sizes = {"batch_T": 12, "batch_B": B, "n_workers": 3}
    with sampler_of(ParallelSampler, env_fn, start_method=start_method, **sizes, **limit) as sampler:
        sampler.initialize(agents, seed=0, **options)
        with pytest.raises(error, match=message) as told:
            for itr in range(20):
                sampler.obtain_samples(itr)
    return str(told.value)


def fault(how: str, at: int) -> Fault:
    return Fault(how, at, spare_pid=os.getpid())


class FaultyPolicy(Valued):
    def __init__(self, fault: Fault, where: str) -> None:
        super().__init__()
        self._trigger, self._where, self._is_acting = Trigger(fault), where, False

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        if self._where == "step":
            self._trigger.call()
        self._is_acting = True
        try:
            return super().step(observation, prev_action, prev_reward)
        finally:
            self._is_acting = False

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        if self._where == "value" and not self._is_acting:
            self._trigger.call()
        return super().value(observation, prev_action, prev_reward)


PLACES: dict[str, tuple[Any, str, int, dict[str, Any]]] = {
    "a step": (ScriptedGame, "step", 4, {"policy_of": kinds}),
    "a value": (ScriptedGame, "value", 2, {"policy_of": kinds, "bootstrap_value": True}),
    "a turn": (partial(TurnGame, 2), "step", 17, {"policy_of": seat}),
    "a turn that is not recorded": (partial(TurnGame, 2), "step", 17, {"policy_of": seat, "record": ["one"]}),
}


@with_start_methods("what", pairs(PLACES, HOWS))
def test_the_policy_that_was_acting_is_named(what: tuple[str, str], start_method: str) -> None:
    place, how = what
    env_fn, where, at, options = PLACES[place]
    agents = {"one": Valued(), "two": FaultyPolicy(fault(how, at), where)}
    assert "acting by the policy 'two'" in message_of(how, agents, env_fn, start_method, **options)


@pytest.mark.parametrize(("where", "how"), pairs(["step", "last", "reset"], HOWS))
def test_the_game_in_turns_that_failed_is_named(where: str, how: str) -> None:
    env_fns: Any = [partial(TurnGame, 2)] * B
    env_fns[3] = partial(FailingTurns, fault(how, 5), where)
    doing = "resetting" if where == "reset" else "stepping"
    assert f"{doing} env_rank 3, t=" in message_of(how, Valued(), env_fns)
