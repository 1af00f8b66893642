"""The step buffer: one row per environment, in the structure of the samples, each worker with its own part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.agents import AgentStep
from penstock.agents.random import RandomAgent
from penstock.agents.remote_agent import RemoteAgent, Request
from penstock.buffers import NamedArrays, SamplesBuffer, SampleSpec
from penstock.envs import CountingEnv, NestedEnv, example_of, observation_example
from penstock.samplers.inference_batch import InferenceBatch
from penstock.samplers.sampler_memory import StepBuffer
from penstock.workers.plan import split

T, B = 3, 5


def samples_of(env: Any, agent_info: NamedArrays | None = None, **kwargs: Any) -> Any:
    info = NamedArrays(age=np.float64(0), state=np.zeros((2, 3), np.float16)) if agent_info is None else agent_info
    observation = observation_example(env.observation_space, kwargs.pop("dtype", None))
    spec = SampleSpec(observation, example_of(env.action_space, "action"), info, True, True, **kwargs)
    return SamplesBuffer(spec, T, B, shared=False).slots[0]


@pytest.mark.parametrize("shared", [False, True])
def test_its_fields_are_those_of_one_row(shared: bool) -> None:
    samples = samples_of(NestedEnv())
    steps = StepBuffer(samples, B, shared=shared)
    row = steps.memory.arrays
    for name in ("observation", "action", "agent_info"):
        wanted = {path: (leaf.shape[2:], leaf.dtype) for path, leaf in NamedArrays(x=samples[name]).leaves()}
        found = {path: (leaf.shape[1:], leaf.dtype) for path, leaf in NamedArrays(x=row[name]).leaves()}
        assert found == wanted
    assert all(leaf.shape[0] == B and not leaf.any() for _, leaf in row.leaves())
    assert row.prev_action.keys() == row.action.keys()
    assert (row.prev_reward.dtype, row.value.dtype, row.reset.dtype) == (np.float32, np.float32, np.bool_)
    steps.memory.close()
    steps.memory.close()
    row.value[...] = 1.0  # views outlive the descriptor


def test_it_follows_the_dtype_that_observations_are_recorded_in() -> None:
    samples = samples_of(CountingEnv(), dtype=np.float16)
    assert StepBuffer(samples, B, shared=False).memory.arrays.observation.dtype == np.float16


@given(n_workers=st.integers(1, B), data=st.data())
def test_each_worker_writes_its_own_columns(n_workers: int, data: Any) -> None:
    steps = StepBuffer(samples_of(CountingEnv()), B, shared=False)
    shares = split(B, n_workers)
    for rank in data.draw(st.permutations(range(n_workers))):
        row = steps.columns(shares[rank])
        for _, leaf in row.leaves():
            assert leaf.shape[0] == len(shares[rank])
            leaf[...] = rank + 1
    owner = [rank + 1 for rank, share in enumerate(shares) for _ in share]
    assert steps.memory.arrays.prev_reward.tolist() == owner
    assert steps.memory.arrays.observation[:, 0].tolist() == owner
    assert steps.memory.arrays.action.tolist() == owner


# ---- both ends of it -----------------------------------------------------------------------


class Echo(RandomAgent):
    """Answers with what it was given, and with what it remembers."""

    def seed_columns(self, rngs: Any) -> None:
        self.age = np.zeros(len(rngs))

    def reset_one(self, column: int) -> None:
        self.age[column] = 0

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        columns = slice(None) if self.selected is None else self.selected
        self.age[columns] += 1
        info = NamedArrays(age=self.age[columns].copy(), state=np.ones((len(prev_reward), 2, 3)))
        return AgentStep((observation[:, 1].astype(int) + prev_action) % 3, info)

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        return observation[:, 1] * 100 + prev_action * 10 + prev_reward


class Line:
    """Sends requests that get their replies at once."""

    def __init__(self, batch: InferenceBatch, steps: StepBuffer, shares: list[range], rank: int) -> None:
        self.batch, self.rank, self.row = batch, rank, steps.columns(shares[rank])
        self.requests: list[int] = []

    def request(self, kind: int) -> None:
        self.requests.append(kind)
        (self.batch.step if kind == Request.STEP else self.batch.value)([self.rank])


def lines(n_workers: int) -> tuple[list[RemoteAgent], list[Line], Echo]:
    env, shares = CountingEnv(), split(B, n_workers)
    agent = Echo()
    agent.initialize(env.observation_space, env.action_space)
    steps = StepBuffer(samples_of(env), B, shared=False)
    served = agent.runtime.column_copy([np.random.default_rng(b) for b in range(B)])
    batch = InferenceBatch(served, steps, shares)
    remotes, ports = [], []
    for rank in range(n_workers):
        remote = RemoteAgent(agent).runtime.column_copy([])
        ports.append(Line(batch, steps, shares, rank))
        remote.connect(ports[-1].row, ports[-1].request)
        remotes.append(remote)
    return remotes, ports, served


@given(n_workers=st.integers(1, B), data=st.data())
def test_a_remote_agent_is_the_agent(n_workers: int, data: Any) -> None:
    remotes, ports, _ = lines(n_workers)
    shares = split(B, n_workers)
    age = np.zeros(B)
    for _ in range(8):
        rank = data.draw(st.integers(0, n_workers - 1))
        share = np.arange(shares[rank].start, shares[rank].stop)
        n = len(share)
        observation = np.array(data.draw(st.lists(st.integers(0, 9), min_size=2 * n, max_size=2 * n))).reshape(n, 2)
        prev_action = np.array(data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)))
        for column in data.draw(st.sets(st.integers(0, n - 1))):
            remotes[rank].reset_one(column)
            age[share[column]] = 0
        action, info = remotes[rank].step(observation, prev_action, np.zeros(n, np.float32))
        age[share] += 1
        assert action.tolist() == ((observation[:, 1] + prev_action) % 3).tolist()
        assert info.age.tolist() == age[share].tolist()
        assert not ports[rank].row.reset.any()


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 7])
def test_values_of_any_number_of_rows(n: int) -> None:
    remotes, ports, _ = lines(2)  # of three columns and two
    observation = np.arange(2 * n, dtype=np.float32).reshape(n, 2)
    prev_action, prev_reward = np.arange(n) % 3, np.arange(n, dtype=np.float32) / 16
    found = remotes[1].value(observation, prev_action, prev_reward)
    np.testing.assert_array_equal(found, observation[:, 1] * 100 + prev_action * 10 + prev_reward)
    assert ports[1].requests == [Request.VALUE] * -(-n // 2)


def test_a_value_leaves_the_action_alone_and_forgets_what_is_to_be_forgotten() -> None:
    remotes, ports, served = lines(2)
    zeros = np.zeros((3, 2), np.float32), np.zeros(3, np.int64), np.zeros(3, np.float32)
    action, _ = remotes[0].step(zeros[0] + 2, *zeros[1:])
    kept = action.copy()
    remotes[0].reset_one(1)
    remotes[0].value(*zeros)
    assert (action == kept).all()
    assert served.age.tolist() == [1, 0, 1, 0, 0]
    remotes[0].reset()
    assert ports[0].row.reset.all()
