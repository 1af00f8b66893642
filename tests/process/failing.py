"""What the table of faults does with each pool: something fails once in one place, and the pool is used on.

All pools have four environments in two workers, or shards. The last one fails: env_rank 3, of worker 1.
An episode has 5 steps and a batch 8, so the call number says where in which batch a fault strikes.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from penstock import (
    AgentStep,
    AlternatingSampler,
    AsyncSampler,
    GameError,
    GpuSampler,
    ParallelSampler,
    PenstockError,
    RandomAgent,
    ResetCollector,
    Sampler,
    SamplerState,
    SerialSampler,
    TrajInfo,
)
from penstock.envs import CountingEnv
from penstock.testing import FaultyAgent, faulty_collector, faulty_env, faulty_traj_info
from penstock.testing.faults import Trigger
from penstock.vector import ShmVectorEnv

from ..scale import scaled
from ..support import BOUND, sampler_of
from .support import Notebook, NotedFault, check_counting

#: The last is more than the 1.5 s that each worker has to end its step: else the error comes later than this limit.
STEP_TIMEOUT, START_TIMEOUT, CLOSE_TIMEOUT = 1.0, 4.0, 2.0


class Cell(NamedTuple):
    """A row of the table."""

    pool: str
    where: str
    how: str
    when: str
    policy: str
    start_method: str


# ---- what fails ----------------------------------------------------------------------------


class Garbage(Exception):
    """Is raised where nonsense is to be returned."""


class Garbling(gym.Wrapper[Any, Any, Any, Any]):
    """Returns nonsense in place of `Garbage`."""

    def reset(self, **kwargs: Any) -> Any:
        try:
            return super().reset(**kwargs)
        except Garbage:
            return "nonsense"

    def step(self, action: Any) -> Any:
        try:
            return super().step(action)
        except Garbage:
            return "nonsense"


class GarblingAgent(FaultyAgent):
    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        try:
            return super().step(observation, prev_action, prev_reward)
        except Garbage:
            return AgentStep(np.zeros((99, 99)))


def garbling(fn: Callable[..., Any]) -> Callable[[], Any]:
    def build() -> Any:
        try:
            return Garbling(fn())
        except Garbage:
            return "nonsense"

    return build


#: What is raised by these ways to fail. The others are those of `Fault`.
RAISED: dict[str, type[Exception]] = {"garbage": Garbage, "game error": GameError}

#: At which call of a place the fault strikes. Between two batches, a collector is asked whether to reset.
CALLS = {
    ("build", "start-up"): 1,
    ("reset", "start-up"): 1,
    ("reset", "first batch"): 2,
    ("reset", "later"): 3,
    ("step", "start-up"): 1,
    ("step", "first batch"): 3,
    ("step", "later"): 11,
    ("act", "first batch"): 3,
    ("act", "later"): 11,
    ("begin", "first batch"): 1,
    ("begin", "later"): 2,
    ("send", "first batch"): 1,
    ("send", "later"): 3,
    ("between", "first batch"): 2,
    ("between", "later"): 3,
    ("evaluation", "first batch"): 4,
    ("evaluation", "later"): 16,
    ("close", "later"): 1,
}
IN_ENVIRONMENT = {"build": "init", "reset": "reset", "step": "step", "evaluation": "step", "close": "close"}


@dataclass
class Outcome:
    """What the user has seen."""

    error: BaseException | None = None
    seen: float = 0.0  #: when the error came, or the end of the close
    called: float = 0.0  #: when the call began that raised it
    warnings: list[str] = field(default_factory=list)
    restarts: int = 0
    renewals: int = 0
    left: list[int] = field(default_factory=list)  #: processes of a broken pool
    again: BaseException | None = None  #: what the next call raised
    struck: tuple[float, int] = (0.0, 0)  #: when the fault struck, and in which process


def fault_of(cell: Cell, folder: Path, at: int, spares_main: bool = True) -> NotedFault:
    how = "raise" if cell.how in RAISED else cell.how
    return Notebook(folder).fault(how, at, raises=RAISED.get(cell.how), spares_main=spares_main)


def env_fns_of(cell: Cell, fault: NotedFault) -> list[Any]:
    """Of four environments, the last one fails."""
    failing = faulty_env(CountingEnv, fault, IN_ENVIRONMENT[cell.where])
    return [CountingEnv] * 3 + [garbling(failing) if cell.how == "garbage" else failing]


def failing_agent(cell: Cell, fault: NotedFault) -> FaultyAgent:
    return (GarblingAgent if cell.how == "garbage" else FaultyAgent)(RandomAgent(), fault)


# ---- samplers ------------------------------------------------------------------------------

OWN_PROCESS = {"server": "process"}
SAMPLERS: dict[str, tuple[type[Sampler], dict[str, Any]]] = {
    "serial": (SerialSampler, {}),
    "parallel": (ParallelSampler, {}),
    "central": (GpuSampler, {}),
    "central, own process": (GpuSampler, OWN_PROCESS),
    "alternating": (AlternatingSampler, {}),
    "ahead": (AsyncSampler, {}),
    "ahead, own process": (AsyncSampler, OWN_PROCESS),
}
#: They run the code of two of the others.
SAMPLERS |= scaled(
    {
        "central, first-ready": (GpuSampler, {"min_ready": 1}),
        "alternating, own process": (AlternatingSampler, OWN_PROCESS),
    },
    {},
)
POLICIES: dict[str, dict[str, Any]] = {
    "raise": {},
    "restart": {"on_worker_failure": "restart"},
    "renew": {"on_game_failure": "renew"},
}


def sampler_with(cell: Cell, folder: Path) -> tuple[Sampler, Any]:
    """A sampler in which something fails, and its agent."""
    cls, kwargs = SAMPLERS[cell.pool]
    at, env_fn, agent = CALLS[cell.where, cell.when], CountingEnv, RandomAgent()
    if cell.where == "act" and "alternating" in cell.pool:
        at = 2 * at - 1  # each half has a step
    is_of_main = cell.pool == "serial" or (cell.where == "act" and cell.pool in ACTS_IN_MAIN)
    fault, arguments = fault_of(cell, folder, at, not is_of_main), {**kwargs, **POLICIES[cell.policy]}
    if cell.where == "evaluation":
        arguments |= {"eval_env_fn": env_fns_of(cell, fault)[-1], "eval_n_envs": 2, "eval_max_steps": 24}
    elif cell.where in IN_ENVIRONMENT:
        env_fn = env_fns_of(cell, fault)
    elif cell.where == "act":
        agent = failing_agent(cell, fault)
    elif cell.where == "send":
        arguments["traj_info_cls"] = faulty_traj_info(TrajInfo, fault, "sending")
    else:
        method = {"begin": "collect_batch", "between": "reset_if_needed"}[cell.where]
        arguments["collector_cls"] = faulty_collector(ResetCollector, fault, method)
    if cell.where == "step" and cell.when == "start-up":
        arguments["max_decorrelation_steps"] = 40
    arguments |= limits_of(cell)
    return sampler_of(cls, env_fn, start_method=cell.start_method, **arguments), agent


#: The agent acts in the caller's process.
ACTS_IN_MAIN = ("serial", "central", "central, first-ready", "alternating")


def limits_of(cell: Cell) -> dict[str, float]:
    """The limits of time, where something hangs. Elsewhere a loaded machine may take its time."""
    if cell.how not in HANGS:
        return {}
    return {"step_timeout": STEP_TIMEOUT, "start_timeout": START_TIMEOUT, "close_timeout": CLOSE_TIMEOUT}


HANGS = ("hang", "spin", "hold the gil", "stop")


@contextmanager
def watched(outcome: Outcome) -> Iterator[None]:
    """Notes the warnings of this block, and its end, if no error was seen before."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    outcome.seen = outcome.seen or time.monotonic()
    outcome.warnings = [str(each.message) for each in caught]


def use_sampler(cell: Cell, folder: Path) -> Outcome:
    return run_until_it_fails(cell, *sampler_with(cell, folder))


def run_until_it_fails(cell: Cell, sampler: Any, agent: Any) -> Outcome:
    """Initialize, collect and evaluate, and shut down."""
    outcome = Outcome()

    def calls() -> Iterator[Callable[[], object]]:
        yield lambda: sampler.initialize(agent, seed=SEED)
        if isinstance(sampler, AsyncSampler):
            yield sampler.start
        for itr in range(4):
            yield partial(collect, sampler, itr)
            if cell.where == "evaluation" and itr < 2:
                yield partial(sampler.evaluate_agent, itr)

    with watched(outcome):
        try:
            for call in calls():
                outcome.called = time.monotonic()
                call()
        except Exception as error:
            outcome.error, outcome.seen = error, time.monotonic()
            outcome.left = list(sampler.worker_pids)
            assert sampler.state is SamplerState.BROKEN
            assert "broken" in repr(sampler)
            outcome.again = raised_by(lambda: sampler.obtain_samples(9))
        outcome.restarts, outcome.renewals = sampler.stats().restarts, sampler.stats().renewals
        if cell.where == "close":
            outcome.called = time.monotonic()
        sampler.shutdown()
    return outcome


#: With this one, env_rank 3 makes random steps before the first batch.
SEED = 3


def collect(sampler: Any, itr: int) -> None:
    """A batch, which must be whole. In that of a game that is renewed, a step is not valid."""
    samples, infos = sampler.obtain_samples(itr)
    assert samples.env.reward.shape == (8, 4)
    if sampler.config.on_game_failure == "raise" and sampler.config.max_decorrelation_steps == 0:
        check_counting(samples.env.observation, samples.env.reward, samples.env.done, 5)
        assert len(infos) == int(samples.env.done.sum())


def raised_by(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except Exception as error:
        return error
    return None


# ---- vector environments -------------------------------------------------------------------


def use_vector_env(cell: Cell, folder: Path) -> Outcome:
    outcome, restarts = Outcome(), {"on_worker_failure": "restart"} if cell.policy == "restart" else {}
    at = CALLS[cell.where, cell.when] - (cell.where == "reset")  # it is built without a reset
    fns: Any = [CountingEnv] * 4 if cell.where == "between" else env_fns_of(cell, fault_of(cell, folder, at))
    with watched(outcome):
        envs = None
        try:
            outcome.called = time.monotonic()
            envs = ShmVectorEnv(fns, in_series=2, context=cell.start_method, **restarts, **limits_of(cell))  # type: ignore[arg-type]
            envs.reset(seed=SEED)
            for k in range(20):
                if cell.where == "between" and k == CALLS["step", cell.when]:
                    pid = envs.worker_pids[1]
                    os.kill(pid, signal.SIGKILL)
                    outcome.struck = time.monotonic(), pid
                outcome.called = time.monotonic()
                envs.step(np.zeros(4, int))
        except Exception as error:
            outcome.error, outcome.seen = error, time.monotonic()
            if envs is not None:
                outcome.left, outcome.again = envs.worker_pids, raised_by(envs.reset)
        if envs is not None:
            outcome.restarts = envs.n_restarts
            if cell.where == "close":
                outcome.called = time.monotonic()
            envs.close()
    return outcome


# ---- experiments ---------------------------------------------------------------------------


class Idle:
    """A trainer that learns nothing."""

    def __init__(self, agent: Any) -> None:
        pass

    def step(self, batch: Any) -> dict[str, float]:
        return {}


class ActorsAgent(RandomAgent):
    """Has the fault in whatever process it acts, other than the main process."""

    def __init__(self, fault: NotedFault) -> None:
        self._trigger = Trigger(fault)

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        try:
            self._trigger.call()
        except Garbage:
            return AgentStep(np.zeros((99, 99)))
        return super().step(observation, prev_action, prev_reward)


def use_experiment(cell: Cell, folder: Path) -> Outcome:
    """Two actors, of which one fails, and a trainer."""
    from penstock.distributed import Actors, Experiment, Training

    fault = fault_of(cell, folder, CALLS[cell.where, cell.when] + (cell.where == "act"))  # the first call is a trial
    env_fns = CountingEnv if cell.where == "act" else env_fns_of(cell, fault)
    make_agent = partial(ActorsAgent, fault) if cell.where == "act" else RandomAgent
    sampler = partial(SerialSampler, env_fns, batch_T=8, batch_B=4, max_decorrelation_steps=0)
    experiment = Experiment("faults", make_agent, Actors(2, sampler), Training(Idle, batch=2), seed=SEED)
    limits: dict[str, Any] = {"max_restarts": 0 if cell.policy == "raise" else 3, "hang_timeout": STEP_TIMEOUT}
    outcome = Outcome(called=time.monotonic())
    try:
        with experiment.run(wire="zmq", **limits) as run:

            def is_over(state: Any) -> bool:
                outcome.restarts = sum(run.restarts.values())
                statuses = {facts["status"] for facts in state.workers.values()}
                return bool(outcome.restarts and statuses == {"RUNNING"} and state.version >= 8)

            try:
                run.wait(is_over, timeout=BOUND)
            finally:
                outcome.seen = time.monotonic()  # a worker that hangs has some seconds to exit, when the run is closed
    except PenstockError as error:
        outcome.error, outcome.seen = error, outcome.seen or time.monotonic()
    return outcome


# ---- Ray -----------------------------------------------------------------------------------


def use_ray(cell: Cell, folder: Path) -> Outcome:
    """Two shards, each with one worker, of which the second fails."""
    from penstock.distributed import RaySampler

    fault = fault_of(cell, folder, CALLS[cell.where, cell.when])
    env_fn, agent = CountingEnv, RandomAgent()
    if cell.where == "act":
        agent = failing_agent(cell, fault)
    else:
        env_fn = env_fns_of(cell, fault)
    sizes: dict[str, Any] = {"batch_T": 8, "batch_B": 4, "n_shards": 2, "n_workers": 1, "max_decorrelation_steps": 0}
    with RaySampler(env_fn, **sizes, **POLICIES[cell.policy], **limits_of(cell)) as sampler:
        return run_until_it_fails(cell, sampler, agent)


def use(cell: Cell, folder: Path) -> Outcome:
    """Use this pool until an error comes, or for some batches, and close it."""
    outcome = (use_sampler if cell.pool in SAMPLERS else USES[cell.pool])(cell, folder)
    if not outcome.struck[1]:
        outcome.struck = Notebook(folder).read()
    return outcome


USES: dict[str, Callable[[Cell, Path], Outcome]] = {
    "vector": use_vector_env,
    "experiment": use_experiment,
    "ray": use_ray,
}
