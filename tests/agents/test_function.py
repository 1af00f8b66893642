"""FunctionAgent: a plain function acts, on any spaces, and needs no torch."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from penstock import AlternatingSampler, ConfigError, FunctionAgent, GpuSampler, ParallelSampler, SerialSampler
from penstock.agents import AgentStep
from penstock.buffers import NamedArrays
from penstock.envs import CountingEnv

from .. import models
from ..models import acting
from ..support import sampler_of

PAIR = spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3)))


def acting_function(fn: Any, columns: range = range(2), action_space: Any = None) -> Any:
    return acting(FunctionAgent(fn), spaces.Box(-1, 1, (3,)), action_space or spaces.Discrete(3), columns)


def act(agent: FunctionAgent) -> AgentStep:
    step: AgentStep = models.act(agent, np.ones((2, 3)), np.float32)
    return step


def test_the_function_gets_the_observation_and_gives_the_action() -> None:
    step = act(acting_function(lambda observation: observation.sum(axis=1)))
    assert step.action.tolist() == [3, 3]
    assert len(step.agent_info) == 0


def test_a_function_that_names_rngs_gets_one_generator_per_column() -> None:
    def fn(observation: Any, rngs: Any) -> Any:
        return np.array([rng.integers(0, 1000) for rng in rngs])

    whole = acting_function(fn, range(4))
    part = acting_function(fn, range(2, 4))
    for _ in range(3):
        assert act(whole).action[2:].tolist() == act(part).action.tolist()


@pytest.mark.parametrize(
    "returned",
    [
        lambda o: (o[:, 0], {"sum": o.sum(1)}),
        lambda o: (o[:, 0], NamedArrays(sum=o.sum(1))),
        lambda o: AgentStep(o[:, 0], {"sum": o.sum(1)}),
    ],
)
def test_it_may_report_beside_the_action(returned: Any) -> None:
    step = act(acting_function(returned))
    assert step.action.tolist() == [1, 1]
    assert step.agent_info["sum"].tolist() == [3, 3]


def test_a_tuple_of_two_is_the_action_of_a_tuple_space() -> None:
    action = (np.zeros(2, np.int64), {"not": "info"})
    returned = act(acting_function(lambda o: action, action_space=PAIR)).action
    assert isinstance(returned, tuple)
    assert returned[0].tolist() == [0, 0]
    assert returned[1] == {"not": "info"}


@pytest.mark.parametrize("fn", [np.negative, min], ids=["ufunc", "builtin"])
def test_functions_without_a_signature_will_do(fn: Any) -> None:
    acting_function(fn)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="FunctionAgent needs a function of the observation, got int"):
        FunctionAgent(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("fn", [lambda o, r: o, lambda: 0, lambda rngs: 0, lambda o, *, key: o])
def test_a_function_that_asks_for_something_else_is_told_what_there_is(fn: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"fn\(observation, rngs=rngs\) if a parameter is named rngs; this function has"
    ):
        FunctionAgent(fn)


@pytest.mark.slow
def test_it_runs_without_torch() -> None:
    code = (
        "import sys, numpy as np; from gymnasium import spaces; from penstock import FunctionAgent, LinearSchedule\n"
        "agent = FunctionAgent(lambda o: o[:, 0])\n"
        "agent.initialize(spaces.Box(0, 1, (2,)), spaces.Discrete(2))\n"
        "copy = agent.runtime.worker_copy().runtime.column_copy([np.random.default_rng(0)])\n"
        "print(copy.step(np.ones((1, 2)), None, np.zeros(1)).action, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[1.] False\n", "")


class Constant:
    """A policy with weights: the action is their argmax."""

    def __init__(self) -> None:
        self.weights = np.array([0.0, 1.0, 0.0])

    def __call__(self, observation: Any) -> Any:
        return np.full(len(observation), self.weights.argmax())


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (SerialSampler, {}),
        (ParallelSampler, {}),
        (GpuSampler, {}),
        (GpuSampler, {"server": "process"}),
        (AlternatingSampler, {}),
    ],
)
def test_changed_weights_act_only_after_sync_shared_memory(cls: Any, options: dict[str, Any]) -> None:
    """In every sampler, and within one batch too."""
    policy = Constant()
    agent = FunctionAgent(policy)
    with sampler_of(cls, batch_T=3, **options) as sampler:
        sampler.initialize(agent, seed=0)
        policy.weights[:] = [0, 0, 1]
        assert (sampler.obtain_samples(0)[0].agent.action == 1).all()
        sampler.start_samples(1)
        policy.weights[:] = [1, 0, 0]
        assert (sampler.wait_samples()[0].agent.action == 1).all()
        agent.sync_shared_memory()
        policy.weights[:] = [0, 0, 1]
        assert (sampler.obtain_samples(2)[0].agent.action == 0).all()


def test_a_function_that_grows_too_much_is_refused() -> None:
    policy = Constant()
    agent = FunctionAgent(policy)
    with ParallelSampler(CountingEnv, batch_T=3, batch_B=2) as sampler:
        sampler.initialize(agent, seed=0)
        policy.weights = np.zeros(10_000)
        with pytest.raises(ConfigError, match=r"has 8\d,\d+ bytes in pickled form, but its workers have room for"):
            agent.sync_shared_memory()


def test_a_worker_keeps_its_function_while_the_bytes_are_the_same() -> None:
    """So a function with a state, such as a controller, is not reset by every sync_shared_memory."""
    agent = FunctionAgent(Constant())
    agent.copy_for_worker()  # to load the class in this process once may change how it is pickled
    copied = agent.copy_for_worker()
    before = vars(copied).copy()
    copied.write_parameters(agent.read_parameters())
    assert vars(copied) == before


def test_a_function_that_cannot_be_pickled_runs_in_one_process() -> None:
    lock = threading.Lock()

    def locked(observation: Any) -> Any:
        with lock:
            return np.zeros(len(observation), int)

    agent = FunctionAgent(locked)
    with SerialSampler(CountingEnv, batch_T=3, batch_B=2) as sampler:
        sampler.initialize(agent, seed=0)
        agent.sync_shared_memory()
        assert (sampler.obtain_samples(0)[0].agent.action == 0).all()
    with ParallelSampler(CountingEnv, batch_T=3, batch_B=2) as sampler, pytest.raises(ConfigError, match="pickle"):
        sampler.initialize(FunctionAgent(locked))
