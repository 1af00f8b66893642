"""Central samplers give what SerialSampler gives for the same seed, in whatever order columns are served."""

from __future__ import annotations

import functools
import sys
from functools import partial
from itertools import product
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Agent, AgentStep, AlternatingSampler, GpuSampler, RandomAgent, Sampler, SerialSampler
from penstock.envs import CountingEnv, NestedEnv

from .. import support
from ..scale import examples, pairs, scaled, with_start_methods
from ..support import Batch, run
from . import test_agents_determinism as stock

cloudpickle.register_pickle_by_value(sys.modules[stock.__name__])  # Modes, which workers cannot import

ICE = partial(gym.make, "FrozenLake-v1", max_episode_steps=12)


class TabularAgent(Agent):
    """Draws from a table that hangs on the state, with a stream per column."""

    def initialize(self, observation_space: Any, action_space: Any, *, seed: int | None = None) -> None:
        super().initialize(observation_space, action_space, seed=seed)
        self.table = np.random.default_rng(0).random((observation_space.n, action_space.n)).cumsum(axis=1)

    def seed_columns(self, rngs: Any) -> None:
        self.rngs = list(rngs)

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        columns = range(len(self.rngs)) if self.selected is None else self.selected
        draws = np.array([self.rngs[b].random() for b in columns])
        row = self.table[observation]
        return AgentStep((draws[:, None] * row[:, -1:] > row).sum(axis=1), {"draw": draws})

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        return self.table[observation, prev_action] + prev_reward


pytestmark = pytest.mark.slow

CASES: dict[str, tuple[Any, Any]] = {
    "random": ("CartPole-v1", RandomAgent),
    "random, nested": (NestedEnv, RandomAgent),
    "tabular": (ICE, TabularAgent),
    **stock.CASES,
}
EXACT = ("random", "random, nested", "tabular")
NO_VALUE = ("deterministic", "squashed", "function")

SAMPLERS: dict[str, tuple[type[Sampler], dict[str, Any]]] = {
    "lock-step, 1 worker": (GpuSampler, {"n_workers": 1}),
    "lock-step, 2 workers": (GpuSampler, {"n_workers": 2}),
    "lock-step, 3 workers": (GpuSampler, {"n_workers": 3}),
    "first-ready, 1 of 5": (GpuSampler, {"n_workers": 3, "min_ready": 1}),
    "first-ready, half": (GpuSampler, {"n_workers": 3, "min_ready": 0.5}),
    "first-ready, at most 0.1 ms": (GpuSampler, {"n_workers": 3, "max_wait": 1e-4}),
    "alternating": (AlternatingSampler, {"n_workers": 3}),
    "alternating, no overlap": (AlternatingSampler, {"n_workers": 2, "overlap": False}),
    "own process": (GpuSampler, {"n_workers": 2, "server": "process"}),
    "own process, first-ready": (GpuSampler, {"n_workers": 3, "min_ready": 1, "server": "process"}),
    "own process, at most 2 ms": (GpuSampler, {"n_workers": 3, "max_wait": 2e-3, "server": "process"}),
    "own process, no overlap": (AlternatingSampler, {"n_workers": 3, "overlap": False, "server": "process"}),
}


def batches(cls: type[Sampler], case: str, **kwargs: Any) -> list[Batch]:
    """Batches with their trajectories, and evaluations between them."""
    env_fn, make_agent = CASES[case]
    sizes: dict[str, Any] = {"batch_T": 20, "batch_B": 5, "eval_n_envs": 2, "eval_max_steps": 60}
    how = {"bootstrap_value": case not in NO_VALUE}
    return run(cls, env_fn, make_agent(), scaled(5, 4), scaled((1, 3), (1,)), how, **{**sizes, **kwargs})


@functools.cache
def reference(case: str) -> list[Batch]:
    return batches(SerialSampler, case)


def assert_same(case: str, wanted: list[Batch], found: list[Batch]) -> None:
    support.assert_same(found, wanted, **({} if case in EXACT else {"rtol": 1e-6, "atol": 1e-9}))


#: Of the ways that differ in timing only, the agents that differ in kind.
ALWAYS = ("lock-step, 1 worker", "lock-step, 2 workers", "lock-step, 3 workers", "first-ready, 1 of 5", "alternating")
KINDS = (*EXACT, "epsilon-greedy", "recurrent categorical")
#: Daily one agent acts in every way, and each other agent in one. These ways differ most.
UNLIKE = ("lock-step, 2 workers", "first-ready, 1 of 5", "alternating", "own process")


@pytest.mark.parametrize(
    ("case", "how"),
    scaled(
        [(case, how) for case in CASES for how in SAMPLERS if how in ALWAYS or case in KINDS],
        [*product(["tabular"], SAMPLERS), *pairs([case for case in CASES if case != "tabular"], UNLIKE)],
    ),
)
def test_every_agent_acts_as_in_one_process(case: str, how: str) -> None:
    cls, kwargs = SAMPLERS[how]
    assert any(batch is not None and batch.env.done.any() for batch, _ in reference(case))
    assert_same(case, reference(case), batches(cls, case, **kwargs))


@with_start_methods("server", ["caller", "process"])
@pytest.mark.parametrize("cls", scaled([GpuSampler, AlternatingSampler], [GpuSampler]))
def test_every_start_method_gives_the_same(cls: type[Sampler], server: str, start_method: str) -> None:
    kwargs: dict[str, Any] = {"n_workers": 2, "server": server, "start_method": start_method}
    assert_same("tabular", reference("tabular"), batches(cls, "tabular", **kwargs))


@examples(5, 50)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=6),
    T=st.integers(1, 12),
    n_workers=st.integers(2, 6),
    how=st.sampled_from(["lock-step", "first-ready", "alternating"]),
    data=st.data(),
)
def test_any_lengths_of_episodes_and_any_number_of_workers(
    lengths: list[int], T: int, n_workers: int, how: str, data: Any
) -> None:
    cls, kwargs = GpuSampler, {}
    if how == "first-ready":
        kwargs = {"min_ready": data.draw(st.one_of(st.integers(1, len(lengths)), st.floats(0.01, 1.0)))}
    elif how == "alternating":
        cls, kwargs = AlternatingSampler, {"overlap": data.draw(st.booleans())}
    env_kwargs = [{"length": n, "truncate": n % 2 == 0} for n in lengths]

    sizes: dict[str, Any] = {"batch_T": T, "batch_B": len(lengths), "n_workers": n_workers, "start_method": "fork"}
    wanted = run(SerialSampler, CountingEnv, None, 3, env_kwargs=env_kwargs, **sizes)
    assert_same("random", wanted, run(cls, CountingEnv, None, 3, env_kwargs=env_kwargs, **sizes, **kwargs))
