"""What every sampler promises, held against the central ones: collectors, spaces, evaluation, infos and calls."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from penstock import (
    Agent,
    AlternatingSampler,
    GpuSampler,
    RandomAgent,
    ResetCollector,
    Sampler,
    SerialSampler,
)
from penstock.buffers.reports import ReportBoard
from penstock.envs import CountingEnv
from penstock.workers.control import ControlBlock
from penstock.workers.monitor import Monitor
from penstock.workers.plan import PoolOptions

from ..scale import pairs, some
from ..support import Batch, assert_same, collect_with
from .digest_cases import Plain, Stateful

pytestmark = pytest.mark.slow

HOW: dict[str, tuple[type[GpuSampler], dict[str, Any]]] = {
    "lock-step": (GpuSampler, {"n_workers": 2}),
    "first-ready": (GpuSampler, {"n_workers": 3, "min_ready": 1}),
    "alternating": (AlternatingSampler, {"n_workers": 3}),
    "no overlap": (AlternatingSampler, {"n_workers": 2, "overlap": False}),
    "own process": (GpuSampler, {"n_workers": 3, "min_ready": 1, "server": "process"}),
}
HOW_TO_START: dict[str, Any] = {"seed": 5, "bootstrap_value": True, "traj_info_kwargs": {"discount": 0.9}}


def ways(first: int, n: int = 3) -> Any:
    """Each way at full scale; daily each test takes others, so that each way has several tests."""
    return pytest.mark.parametrize("how", some(HOW, n, first))


def collect_and_evaluate(cls: type[Sampler], agent: Agent, env_fn: Any, n: int = 4, **kwargs: Any) -> list[Batch]:
    arguments: dict[str, Any] = {"batch_T": 13, "batch_B": 5, "eval_n_envs": 3, "eval_max_steps": 3 * 40, **kwargs}
    evaluate = range(n) if arguments["eval_n_envs"] else ()
    return collect_with(cls, env_fn, agent, n, evaluate, **HOW_TO_START, **arguments)


class Halting(ResetCollector):
    """A custom collector: repeats the first action in every third row."""

    def collect_batch(self, itr: int) -> None:
        self.begin_batch(itr)
        for t in range(self.batch_T):
            self.act(t)
            if t % 3 == 2:
                self.prev_action[...] = self.samples.action[1]
                self.samples.action[t + 1] = self.prev_action
            self.step_envs(t)
        self.end_batch()


# ---- collectors ----------------------------------------------------------------------------


@pytest.mark.parametrize(("agent_cls", "how"), pairs([Plain, Stateful], HOW))
def test_a_collector_of_ones_own_records_what_it_does_in_one_process(agent_cls: Any, how: str) -> None:
    cls, kwargs = HOW[how]
    env_kwargs = [{"length": n, "truncate": n > 3} for n in (3, 5, 1, 4, 7)]
    arguments: dict[str, Any] = {"env_kwargs": env_kwargs, "collector_cls": Halting}
    wanted = collect_and_evaluate(SerialSampler, agent_cls(), CountingEnv, **arguments)
    assert any(batch.agent.final_value.any() for batch, _ in wanted[::2])
    assert_same(collect_and_evaluate(cls, agent_cls(), CountingEnv, **arguments, **kwargs), wanted)


# ---- spaces --------------------------------------------------------------------------------


class OfSpace(gym.Env[Any, Any]):
    """Shows samples of its space, from its own stream."""

    def __init__(self, space: Any) -> None:
        self.observation_space, self.action_space = copy.deepcopy(space), spaces.Discrete(3)
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.count = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self.observation_space.sample(), float(action), self.count == 6, False, {}


SPACES = {
    "discrete": spaces.Discrete(7, start=-2),
    "float16": spaces.Box(-1, 1, (2,), np.float16),
    "uint8": spaces.Box(0, 255, (3, 4), np.uint8),
    "scalar": spaces.Box(-1, 1, (), np.float64),
    "binary": spaces.MultiBinary(3),
    "multi-discrete": spaces.MultiDiscrete([3, 5]),
    "nested": spaces.Dict(
        {
            "a": spaces.Tuple((spaces.Discrete(3), spaces.Dict({"b": spaces.Box(-1, 1, (2,))}))),
            "c": spaces.MultiBinary(2),
        }
    ),
}


@pytest.mark.parametrize(("name", "how"), pairs(SPACES, ["lock-step", "first-ready"]))
def test_observations_of_every_space_travel(name: str, how: str) -> None:
    cls, kwargs = HOW[how]
    make, agent = partial(OfSpace, SPACES[name]), RandomAgent if name == "nested" else Stateful
    assert_same(
        collect_and_evaluate(cls, agent(), make, 2, **kwargs), collect_and_evaluate(SerialSampler, agent(), make, 2)
    )


def test_observations_may_be_recorded_in_another_dtype() -> None:
    for dtype in (np.float32, np.float16):
        arguments: dict[str, Any] = {"observation_dtype": dtype, "n_workers": 2}
        found = collect_and_evaluate(GpuSampler, Stateful(), partial(CountingEnv, dtype=np.float64), 2, **arguments)
        assert found[0][0].env.observation.dtype == dtype
        assert_same(
            found,
            collect_and_evaluate(SerialSampler, Stateful(), partial(CountingEnv, dtype=np.float64), 2, **arguments),
        )


# ---- evaluation ----------------------------------------------------------------------------


@ways(3, 4)
def test_evaluation_is_bounded_by_steps_trajectories_or_episodes(how: str) -> None:
    cls, kwargs = HOW[how]

    def evaluate(**bound: Any) -> list[int]:
        arguments: dict[str, Any] = {"env_kwargs": {"length": 4}, **kwargs, **bound}
        with cls(CountingEnv, batch_T=2, batch_B=4, eval_n_envs=3, **arguments) as sampler:
            sampler.initialize(RandomAgent(), seed=0)
            sampler.obtain_samples(0)
            first = [info.Length for info in sampler.evaluate_agent(0)]
            assert len(sampler.evaluate_agent(1)) >= (0 if "eval_max_trajectories" in bound else len(first))
            sampler.obtain_samples(1)
            return first

    assert evaluate(eval_max_steps=3 * 41) == [4] * 3 * 10
    few = evaluate(eval_max_steps=3_000_000_000, eval_max_trajectories=10)
    assert 10 <= len(few) <= 3 * 12
    for n in (1, 2, 7):  # some environments, and with one episode some workers, have nothing to do
        assert evaluate(eval_max_steps=3_000_000, eval_episodes=n) == [4] * n
    with pytest.warns(RuntimeWarning, match="2 of 5 episodes had not ended"):
        assert evaluate(eval_max_steps=3 * 7, eval_episodes=5) == [4] * 3


def test_who_is_done_first_in_an_evaluation_holds_up_nobody() -> None:
    """The workers' shares have different lengths."""
    lengths = [{"length": n} for n in (2, 30, 5, 9)]
    for order in (lengths, lengths[::-1]):
        arguments: dict[str, Any] = {"eval_env_kwargs": order, "eval_n_envs": 4, "eval_max_steps": 4000}
        with GpuSampler(CountingEnv, batch_T=2, batch_B=4, n_workers=2, eval_episodes=10, **arguments) as sampler:
            sampler.initialize(RandomAgent(), seed=0)
            for itr in range(2):
                assert len(sampler.evaluate_agent(itr)) == 10
                sampler.obtain_samples(itr)


# ---- infos, calls, shares ------------------------------------------------------------------


def test_a_reply_that_was_slow_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has its reply, and has had no time to wake up yet, does not hang."""
    now = 0.0
    monkeypatch.setattr("penstock.workers.monitor.time.monotonic", lambda: now)
    control, reports = ControlBlock(1, 1, shared=False), ReportBoard(1, shared=False)
    control.progress(0).request(1)
    monitor = Monitor(control, reports, PoolOptions("fork", 0.5, 1.0, 0, 60.0, spin_seconds=0.0))

    def overdue(then: float) -> Any:
        """What it finds at that time, if it looks every 0.1 s until then."""
        nonlocal now
        while now < then:
            now += 0.1
            found = monitor._overdue([0])
        return found

    assert overdue(9.0) == []
    control.reply([0], [1])
    assert overdue(9.4) == [], "the agent took 9 seconds"
    assert overdue(9.8) == [(0, "step_timeout", 0.5)], "but now it has had its time"
