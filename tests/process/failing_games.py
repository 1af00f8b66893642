"""Games that fail at one call of a method, and the rules of a batch of games in turns."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import numpy as np

from penstock.envs.toy import ScriptedGame
from penstock.testing import Fault
from penstock.testing.faults import Trigger

from ..toy_games import TurnGame

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here


class _Failing:
    """Of a game of `k` agents: its method `where` has the fault."""

    k: int

    def __init__(self, fault: Fault, where: str = "step") -> None:
        super().__init__(self.k)  # type: ignore[call-arg]
        self._trigger, self._plain = Trigger(fault), getattr(self, where)
        setattr(self, where, self._call)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self._trigger.call()
        return self._plain(*args, **kwargs)


class FailingGame(_Failing, ScriptedGame):
    k = 3


class FailingTurns(_Failing, TurnGame):
    k = 2


def kinds(agent_id: str) -> str:
    return "one" if agent_id == "a0" else "two"


def seat(agent_id: str, env_rank: int, game: int, rng: np.random.Generator) -> str:
    return "one" if rng.random() < 0.6 else "two"


def check_turns(samples: Any) -> None:
    """Valid rows are a prefix of each column, and each episode in it has all its decisions, one after the other."""
    env = samples.env
    valid, own = env.valid, env.observation[..., 2]
    assert (valid[:-1] >= valid[1:]).all()
    np.testing.assert_array_equal(env.prev_done, valid & (own == 0))
    goes_on = valid[1:] & ~env.done[:-1]
    np.testing.assert_array_equal(own[1:][goes_on], own[:-1][goes_on] + 1)
    assert not env.prev_done[1:][goes_on].any()
    assert not env.reward[~valid].any()
    assert not samples.agent.action[~valid].any()
