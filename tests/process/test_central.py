"""Failures where one process acts for all: what the agent does wrong, and who is stopped meanwhile."""

import os
import re
import signal
from typing import Any

import pytest

from penstock import AgentStep, AlternatingSampler, GpuSampler, RandomAgent, WorkerError, WorkerTimeoutError
from penstock.envs import CountingEnv
from penstock.testing import Fault, FaultyAgent

from ..scale import pairs, scaled
from ..support import sampler_of

pytestmark = [pytest.mark.timeout(scaled(1800, 60)), pytest.mark.slow]

MODES: dict[str, tuple[type[GpuSampler], dict[str, Any]]] = {
    "lock-step": (GpuSampler, {}),
    "first-ready": (GpuSampler, {"min_ready": 1}),
    "alternating": (AlternatingSampler, {}),
    "no overlap": (AlternatingSampler, {"overlap": False}),
}


class InEvaluation(FaultyAgent):
    """Its calls count in evaluations alone."""

    in_evaluation = False

    def eval_mode(self, itr: int) -> None:
        super().eval_mode(itr)
        self.in_evaluation = True

    def _reach(self, where: str) -> None:
        if self.in_evaluation:
            super()._reach(where)


AGENT_PLACES: dict[str, tuple[type[FaultyAgent], Fault, str]] = {
    "sample_mode": (FaultyAgent, Fault("raise", 2), r"beginning for env_rank \[0, 1, 2, 3\] \(itr=1\): a fault"),
    "value": (FaultyAgent, Fault("raise", 1), r"acting for env_rank .*: a fault"),
    "reset_one": (FaultyAgent, Fault("raise", 5), r"acting for env_rank .*: a fault"),
    "step": (InEvaluation, Fault("unprintable", 5), r"acting for env_rank \[\d(, \d)?\] \(eval"),
}


@pytest.mark.parametrize(("where", "mode"), pairs(AGENT_PLACES, MODES))
def test_an_agent_that_raises_is_the_action_servers(where: str, mode: str) -> None:
    """In a step, it does so in an evaluation; in a batch, `test_faults.py` has it."""
    cls, options = MODES[mode]
    agent_cls, fault, doing = AGENT_PLACES[where]
    with sampler_of(cls, eval_n_envs=2, eval_max_steps=2 * 12, **options) as sampler:
        with pytest.raises(WorkerError) as caught:
            sampler.initialize(agent_cls(RandomAgent(), fault, where), seed=3, bootstrap_value=True)
            for itr in range(3):
                sampler.obtain_samples(itr)
                sampler.evaluate_agent(itr)
        assert sampler.worker_pids == []
    message = str(caught.value)
    assert re.match(rf"the inference server raised penstock\.testing\.faults\.\w+Fault while {doing}", message), message
    assert "\n" not in message
    assert len(message) < 1000
    assert caught.value.__cause__ is not None
    assert caught.value.__cause__.__traceback__ is not None, "it shows where"


class Stopping(RandomAgent):
    """Stops a process, once all have made two steps."""

    def __init__(self) -> None:
        self.pids: list[int] = []  # the copy that acts has the same list

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        if self.pids and observation[0, 1] == 2:
            os.kill(self.pids.pop(), signal.SIGSTOP)
        return super().step(observation, prev_action, prev_reward)


def test_a_worker_that_is_stopped_while_it_waits_is_blamed_once_it_has_its_answer() -> None:
    agent = Stopping()
    with sampler_of(GpuSampler, CountingEnv, step_timeout=scaled(2.0, 0.5)) as sampler:
        sampler.initialize(agent, seed=0)
        agent.pids.append(sampler.worker_pids[1])
        with pytest.raises(WorkerTimeoutError, match=r"worker 1 .* is stopped by a signal while waiting for actions"):
            sampler.obtain_samples(0)
