"""Failures where one process acts for all: what the agent does wrong, and who is slow or is stopped meanwhile."""

import os
import re
import signal
import threading
from typing import Any

import pytest

from penstock import (
    AgentStep,
    AlternatingSampler,
    GpuSampler,
    RandomAgent,
    Sampler,
    SamplerState,
    WorkerError,
    WorkerTimeoutError,
)
from penstock.envs import CountingEnv
from penstock.testing import Fault, FaultyAgent, InjectedFault

from .. import support
from ..scale import pairs, scaled
from .support import check_counting

pytestmark = [pytest.mark.timeout(scaled(1800, 60)), pytest.mark.slow]

MODES: dict[str, tuple[type[GpuSampler], dict[str, Any]]] = {
    "lock-step": (GpuSampler, {}),
    "first-ready": (GpuSampler, {"min_ready": 1}),
    "alternating": (AlternatingSampler, {}),
    "no overlap": (AlternatingSampler, {"overlap": False}),
}


def central_sampler(
    mode: str, env_fn: Any = CountingEnv, start_method: str = "forkserver", **kwargs: Any
) -> GpuSampler:
    cls, options = MODES[mode]
    sizes = {"eval_n_envs": 2, "eval_max_steps": 2 * 12}
    return support.sampler_of(cls, env_fn, start_method=start_method, **{**sizes, **options, **kwargs})


def sample_and_evaluate(sampler: Sampler, agent: Any, **how: Any) -> None:
    sampler.initialize(agent, seed=3, **how)
    for itr in range(3):
        sampler.obtain_samples(itr)
        if itr:
            sampler.evaluate_agent(itr)


# ---- the agent -----------------------------------------------------------------------------

AGENT_PLACES = {
    "sample_mode": (2, "while beginning for env_rank [0, 1, 2, 3] (itr=1): "),
    "value": (1, "while acting for env_rank "),
    "reset_one": (5, "while acting for env_rank "),
}


@pytest.mark.parametrize(("where", "mode"), pairs(AGENT_PLACES, MODES))
def test_an_agent_that_raises_is_the_action_servers(where: str, mode: str) -> None:
    at, doing = AGENT_PLACES[where]
    with central_sampler(mode) as sampler, pytest.raises(WorkerError) as caught:
        sample_and_evaluate(sampler, FaultyAgent(RandomAgent(), Fault("raise", at), where), bootstrap_value=True)
    message = str(caught.value)
    assert message.startswith("the inference server raised penstock.testing.faults."), message
    assert doing in message
    assert "\n" not in message
    assert isinstance(caught.value.__cause__, InjectedFault)
    assert caught.value.__cause__.__traceback__ is not None, "it shows where"
    assert sampler.state is SamplerState.BROKEN
    assert sampler.worker_pids == []
    with pytest.raises(WorkerError, match="the inference server raised") as again:
        sampler.obtain_samples(9)
    assert isinstance(again.value.__cause__, InjectedFault)


@pytest.mark.parametrize("how", ["raise", "unprintable"])
def test_an_agent_that_raises_in_evaluation(how: str) -> None:
    class InEvaluation(FaultyAgent):
        in_evaluation = False

        def eval_mode(self, itr: int) -> None:
            super().eval_mode(itr)
            self.in_evaluation = True

        def _reach(self, where: str) -> None:
            if self.in_evaluation:
                super()._reach(where)

    with central_sampler("lock-step") as sampler, pytest.raises(WorkerError) as caught:
        sample_and_evaluate(sampler, InEvaluation(RandomAgent(), Fault(how, at=5)))
    assert re.match(r"the inference server raised .*Fault while acting for env_rank \[0, 1\] \(eval", str(caught.value))
    assert len(str(caught.value)) < 1000


# ---- who is slow, or is stopped ------------------------------------------------------------

LIMIT = scaled(2.0, 0.5)


class Pausing(RandomAgent):
    """Takes longer over some steps than a worker may."""

    calls = 0

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        type(self).calls += 1
        if type(self).calls % 6 == 0:
            threading.Event().wait(1.5 * LIMIT)
        return super().step(observation, prev_action, prev_reward)


@pytest.mark.parametrize("mode", ["lock-step", "no overlap"])
def test_a_slow_agent_makes_nobody_overdue(mode: str) -> None:
    """Many workers, so that some have not woken up yet when the main process looks at them again."""
    sizes: dict[str, Any] = {"batch_T": 8, "batch_B": 8, "n_workers": 8, "eval_n_envs": 0}
    with central_sampler(mode, step_timeout=LIMIT, **sizes) as sampler:
        sampler.initialize(Pausing(), seed=0)
        samples, _ = sampler.obtain_samples(0)
        check_counting(samples.env.observation, samples.env.reward, samples.env.done, 5)


def test_a_worker_that_is_stopped_while_it_waits_is_blamed_once_it_has_its_answer() -> None:
    class Stopping(RandomAgent):
        pids: list[int]

        def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
            if self.pids and observation[0, 1] == 2:
                os.kill(self.pids.pop(), signal.SIGSTOP)
            return super().step(observation, prev_action, prev_reward)

    with central_sampler("lock-step", step_timeout=LIMIT) as sampler:
        agent = Stopping()
        agent.pids = []
        sampler.initialize(agent, seed=0)
        agent.pids.append(sampler.worker_pids[1])
        with pytest.raises(
            WorkerTimeoutError, match=r"worker 1 .* and is stopped by a signal while waiting for actions"
        ):
            sampler.obtain_samples(0)
