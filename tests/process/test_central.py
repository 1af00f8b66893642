"""Failures where one process acts for all: of workers, in each mode; of the agent itself; and Ctrl-C at any moment."""

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from penstock import (
    AgentStep,
    AlternatingSampler,
    EvalCollector,
    GpuSampler,
    RandomAgent,
    ResetCollector,
    Sampler,
    SamplerState,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)
from penstock.envs import CountingEnv
from penstock.testing import Fault, FaultyAgent, InjectedFault, faulty_collector, faulty_env, faulty_eval_collector

from .. import support
from ..scale import FULL, methods, pairs, scaled
from ..support import until
from . import crashes
from .support import ERROR_SECONDS, SLACK, Notebook, check_counting, is_running, killer, note

pytestmark = [pytest.mark.timeout(scaled(1800, 60)), pytest.mark.slow]

MODES: dict[str, tuple[type[GpuSampler], dict[str, Any]]] = {
    "lock-step": (GpuSampler, {}),
    "first-ready": (GpuSampler, {"min_ready": 1}),
    "alternating": (AlternatingSampler, {}),
    "no overlap": (AlternatingSampler, {"overlap": False}),
}


# Those of the crash matrix that are another matter where the agent is elsewhere.
PLACES = {name: place for name, place in crashes.PLACES.items() if name not in ("agent", "sending")}
HOWS = {name: crashes.HOWS[name] for name in ("raise", "kill", "segfault", "exit")}


def combinations() -> list[Any]:
    """At full scale every place and way, in every mode and with every start method. Daily an exception and a death in
    each place, with forkserver; modes and ways of dying take turns."""
    chosen = []
    for i, where in enumerate(PLACES):
        for j, how in enumerate(HOWS):
            for k, mode in enumerate(MODES):
                for method in ("fork", "forkserver", "spawn"):
                    is_daily = method == "forkserver" and (i + j) % len(MODES) == k and j in (0, 1 + i % 3)
                    if FULL or is_daily:
                        chosen.append(pytest.param(method, mode, where, how, id=f"{method}-{mode}-{where}-{how}"))
    return chosen


def sampler_of(mode: str, env_fn: Any = CountingEnv, start_method: str = "forkserver", **kwargs: Any) -> GpuSampler:
    cls, options = MODES[mode]
    sizes = {"eval_n_envs": 2, "eval_max_steps": 2 * 12}
    return support.sampler_of(cls, env_fn, start_method=start_method, **{**sizes, **options, **kwargs})


def make(mode: str, where: str, fault: Fault, start_method: str, **kwargs: Any) -> GpuSampler:
    if where in ("init", "first reset", "reset", "step"):
        faulty = faulty_env(CountingEnv, fault, where.removeprefix("first "))
        return sampler_of(mode, [CountingEnv] * 3 + [faulty], start_method, eval_env_kwargs={}, **kwargs)
    if where == "evaluation":
        kwargs["eval_collector_cls"] = faulty_eval_collector(EvalCollector, fault)
    else:
        method = {"collector": "collect_batch", "parked": "reset_if_needed"}[where]
        kwargs["collector_cls"] = faulty_collector(ResetCollector, fault, method)
    return sampler_of(mode, start_method=start_method, **kwargs)


def run(sampler: Sampler, agent: Any, **how: Any) -> None:
    sampler.initialize(agent, seed=3, **how)
    for itr in range(3):
        sampler.obtain_samples(itr)
        if itr:
            sampler.evaluate_agent(itr)


@pytest.mark.parametrize(("start_method", "mode", "where", "how"), combinations())
def test_every_failure_of_a_worker_is_named_at_once(
    tmp_path: Path, start_method: str, mode: str, where: str, how: str
) -> None:
    place, notebook = PLACES[where], Notebook(tmp_path)
    sampler = make(mode, where, notebook.fault(how, place.at), start_method)
    with sampler, pytest.raises(WorkerError if how == "raise" else WorkerDiedError) as caught:
        run(sampler, RandomAgent())
    seen = time.monotonic()
    struck, pid = notebook.read()
    first = str(caught.value).splitlines()[0]
    assert re.match(rf"worker \d \(pid {pid}, ", first), first
    assert re.search(rf"{HOWS[how]}.* while {place.doing}", first), first
    note("central, fault in a worker to error, s", seen - struck, ERROR_SECONDS)


# ---- the agent -----------------------------------------------------------------------------

AGENT_PLACES = {
    "sample_mode": (2, "while beginning for env_rank [0, 1, 2, 3] (itr=1): "),
    "step": (7, "while acting for env_rank "),
    "value": (1, "while acting for env_rank "),
    "reset_one": (5, "while acting for env_rank "),
}


@pytest.mark.parametrize(("where", "mode"), pairs(AGENT_PLACES, MODES))
def test_an_agent_that_raises_is_the_action_servers(where: str, mode: str) -> None:
    at, doing = AGENT_PLACES[where]
    fault = Fault("unpicklable" if where == "step" else "raise", at=at)
    with sampler_of(mode) as sampler, pytest.raises(WorkerError) as caught:
        run(sampler, FaultyAgent(RandomAgent(), fault, where), bootstrap_value=True)
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

    with sampler_of("lock-step") as sampler, pytest.raises(WorkerError) as caught:
        run(sampler, InEvaluation(RandomAgent(), Fault(how, at=5)))
    assert re.match(r"the inference server raised .*Fault while acting for env_rank \[0, 1\] \(eval", str(caught.value))
    assert len(str(caught.value)) < 1000


def test_what_an_agent_returns_is_checked() -> None:
    class TooFew(RandomAgent):
        def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
            action, info = super().step(observation, prev_action, prev_reward)
            return AgentStep(action[:-1] if observation.max() > 3 else action, info)

    with (
        sampler_of("lock-step") as sampler,
        pytest.raises(WorkerError, match=r"the inference server raised .*SpaceError"),
    ):
        run(sampler, TooFew())


# ---- hangs ---------------------------------------------------------------------------------

LIMIT = scaled(2.0, 0.5)


@methods("forkserver")
@pytest.mark.parametrize(
    ("mode", "how"), [(m, how) for m in MODES for how in ("hang", "stop") if FULL or m in ("lock-step", "no overlap")]
)
def test_who_hangs_is_named_and_who_waits_for_actions_is_not(
    how: str, mode: str, tmp_path: Path, start_method: str
) -> None:
    notebook = Notebook(tmp_path)
    fns = [CountingEnv] * 3 + [faulty_env(CountingEnv, notebook.fault(how, at=4))]
    with sampler_of(mode, fns, start_method, n_workers=4, step_timeout=LIMIT, eval_n_envs=0) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        with pytest.raises(WorkerTimeoutError) as caught:
            sampler.obtain_samples(0)
    seen = time.monotonic()
    struck, pid = notebook.read()
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f"worker 3 (pid {pid}, env_rank 3) made no progress for {LIMIT:g} s"), first
    assert " while stepping env_rank 3, t=3 (itr=0)" in first
    assert re.search(r"^worker [012]", str(caught.value), re.MULTILINE) is None, "nobody else is blamed"
    note("central, step_timeout: limit to error, s", seen - struck - LIMIT, 0.5 * SLACK)


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
    with sampler_of(mode, step_timeout=LIMIT, **sizes) as sampler:
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

    with sampler_of("lock-step", step_timeout=LIMIT) as sampler:
        agent = Stopping()
        agent.pids = []
        sampler.initialize(agent, seed=0)
        agent.pids.append(sampler.worker_pids[1])
        with pytest.raises(
            WorkerTimeoutError, match=r"worker 1 .* and is stopped by a signal while waiting for actions"
        ):
            sampler.obtain_samples(0)


# ---- between two calls ---------------------------------------------------------------------


@pytest.mark.parametrize(("is_sampling", "mode"), pairs([False, True], MODES))
def test_a_worker_killed_while_the_learner_trains(is_sampling: bool, mode: str) -> None:
    with killer() as kill, sampler_of(mode) as sampler:
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
        if is_sampling:
            sampler.start_samples(1)
        pid = sampler.worker_pids[1]
        kill.kill([pid], 0)
        kill.when()
        until(lambda: not is_running(pid))
        began = time.monotonic()
        with pytest.raises(WorkerDiedError, match=rf"worker 1 \(pid {pid}, .* was killed by SIGKILL"):
            if is_sampling:
                sampler.wait_samples()
            else:
                sampler.obtain_samples(1)
        note("central, killed between two calls: call to error, s", time.monotonic() - began, ERROR_SECONDS)
