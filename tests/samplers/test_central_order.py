"""Whom central samplers serve while others work: environments held back by pipes, an agent that takes notes."""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from penstock import AgentStep, AlternatingSampler, GpuSampler, RandomAgent
from penstock.agents.remote_agent import Request
from penstock.envs import CountingEnv
from penstock.workers.plan import split

from ..scale import pairs, some

T = 10

pytestmark = [pytest.mark.timeout(60), pytest.mark.slow]  # what is served in the wrong order waits for ever


class Gates:
    """One pipe per environment, inherited by forked workers."""

    def __init__(self, n: int) -> None:
        self.pipes = [os.pipe() for _ in range(n)]

    def let(self, b: int, steps: int = 1) -> None:
        os.write(self.pipes[b][1], bytes(steps))


@contextmanager
def gates(n: int) -> Iterator[Gates]:
    made = Gates(n)
    try:
        yield made
    finally:
        for fd in (fd for pipe in made.pipes for fd in pipe):
            os.close(fd)


class Gated(CountingEnv):
    """Reads `gate` for leave to end each step, after writing to `sign` that it has begun."""

    def __init__(self, gate: int | None = None, sign: int | None = None) -> None:
        super().__init__()
        self.gate, self.sign = gate, sign

    def step(self, action: Any) -> Any:
        if self.sign is not None:
            os.write(self.sign, b"1")
        if self.gate is not None:
            os.read(self.gate, 1)
        return super().step(action)


class Recorder(RandomAgent):
    """Writes down for which columns it acts."""

    def __init__(self) -> None:
        self.log: list[list[int]] = []
        self.then: list[Callable[[list[int]], None]] = []  # its copies share the lists

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        columns = list(range(len(prev_reward))) if self.selected is None else self.selected.tolist()
        self.log.append(columns)
        for then in self.then:
            then(columns)
        return super().step(observation, prev_action, prev_reward)

    def counts(self) -> Counter[int]:
        return Counter(b for columns in self.log for b in columns)


def begin(sampler: GpuSampler, then: Callable[[list[int]], None] = lambda columns: None) -> Recorder:
    """Initialize with an agent that calls `then`: from now on, and not in the trial before the workers start."""
    agent = Recorder()
    sampler.initialize(agent, seed=0)
    agent.log.clear()
    agent.then.append(then)
    return agent


def check_batch(sampler: GpuSampler, infos: list[Any]) -> None:
    """An ordinary batch of CountingEnv, whoever was served first."""
    env = sampler.samples_np.env
    assert env.observation.shape[:2] == (T, sampler.batch_B)
    assert (env.reward == np.tile([1, 2, 3, 4, 5], 2)[:, None]).all()
    assert (env.done == (env.reward == 5)).all()
    assert (env.observation[..., 1] == env.reward - 1).all()
    assert env.valid.all()
    assert [info.Length for info in infos] == [5] * 2 * sampler.batch_B


def gated_sampler(cls: type[GpuSampler], env_kwargs: list[dict[str, Any]], **kwargs: Any) -> Any:
    arguments: dict[str, Any] = {"n_workers": len(env_kwargs), "start_method": "fork", **kwargs}
    return cls(Gated, env_kwargs=env_kwargs, batch_T=T, batch_B=len(env_kwargs), max_decorrelation_steps=0, **arguments)


# ---- values --------------------------------------------------------------------------------


class Uneven(CountingEnv):
    """Truncated after 3 to 6 steps. If it is slow, the other workers ask for values long before its own does."""

    def __init__(self, b: int, slow: int) -> None:
        super().__init__(3 + b % 4, truncate=True)
        self.is_slow = b == slow

    def step(self, action: Any) -> Any:
        if self.is_slow:
            sum(range(30_000))
        return super().step(action)


class Valuing(RandomAgent):
    """Each value depends on nothing but the observation. A recurrent agent's are asked for within the batch."""

    def __init__(self, recurrent: bool) -> None:
        self.recurrent, self.asked = recurrent, list[tuple[int, ...]]()  # its copies share the list

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        self.asked.append(tuple(range(len(prev_reward)) if self.selected is None else self.selected.tolist()))
        return observation[:, 1]


@pytest.mark.parametrize(
    ("cls", "kwargs", "recurrent"),
    [
        (GpuSampler, {}, False),
        (GpuSampler, {"min_ready": 1.0}, True),
        (AlternatingSampler, {}, True),
        (AlternatingSampler, {"overlap": False}, False),
    ],
)
def test_values_are_computed_for_the_same_environments_whichever_is_slow(
    cls: type[GpuSampler], kwargs: dict[str, Any], recurrent: bool
) -> None:
    found = []
    for slow in (0, 5):
        agent = Valuing(recurrent)
        env_kwargs = [{"b": b, "slow": slow} for b in range(6)]
        with cls(Uneven, env_kwargs=env_kwargs, batch_T=T, batch_B=6, n_workers=3, **kwargs) as sampler:
            sampler.initialize(agent, seed=0, bootstrap_value=True)
            agent.asked.clear()
            for itr in range(5):
                sampler.obtain_samples(itr)
        found.append(Counter(agent.asked))
    assert found[0] == found[1]
    assert recurrent or max(found[0], key=len) == tuple(range(6 if cls is GpuSampler else 4))


# ---- first ready ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs", some([{"min_ready": 1}, {"max_wait": 1e-4}, {"min_ready": 0.3}, {"max_wait": 0.01}], 2), ids=str
)
def test_a_slow_environment_holds_up_nobody(kwargs: dict[str, Any]) -> None:
    """Environment 0 is let go when the others have made all their steps."""
    with gates(1) as gate:

        def let_the_slow_one_go(columns: list[int]) -> None:
            counts = agent.counts()
            if 0 not in columns and counts[1] == counts[2] == T * (1 + itr):
                gate.let(0, T)

        itr = 0
        with gated_sampler(GpuSampler, [{"gate": gate.pipes[0][0]}, {}, {}], **kwargs) as sampler:
            agent = begin(sampler, let_the_slow_one_go)
            for itr in range(3):
                before = len(agent.log)
                _, infos = sampler.obtain_samples(itr)
                check_batch(sampler, infos)
                assert agent.counts() == dict.fromkeys(range(3), T * (1 + itr)), "batch_T steps each"
                assert [0] in agent.log[before:], "the slow one ends alone, when nobody else is left"
            assert sampler.server_stats.served == Counter(map(len, agent.log))
            assert sampler.server_stats.acting > 0
            assert sampler.server_stats.waiting > 0


def test_the_agent_waits_for_as_many_as_it_was_told() -> None:
    """Three of four: the fourth is held back, and nothing is served for fewer until the batch ends for them."""
    with gates(1) as gate:

        def let_go(columns: list[int]) -> None:
            if max(agent.counts().values()) == T:  # whichever came first: the slow one may be among the first three
                gate.let(0, T)

        with gated_sampler(GpuSampler, [{"gate": gate.pipes[0][0]}, {}, {}, {}], min_ready=3) as sampler:
            agent = begin(sampler, let_go)
            _, infos = sampler.obtain_samples(0)
            check_batch(sampler, infos)
        acted: Counter[int] = Counter()
        for columns in agent.log:
            acted.update(columns)
            if max(acted.values()) == T:
                break
            assert len(columns) >= 3


def test_nobody_is_served_twice_before_one_who_waits() -> None:
    control: Any = None
    waiting: set[int] = set()
    overtaken = []

    def look(columns: list[int]) -> None:
        nonlocal waiting
        if not waiting <= set(columns):
            overtaken.append((waiting, columns))
        asking = {rank for rank in range(6) if control.last_request(rank)[1] == Request.STEP}
        waiting = asking - set(columns)

    class Uneven(CountingEnv):
        def __init__(self, work: int) -> None:
            super().__init__()
            self.work = work

        def step(self, action: Any) -> Any:
            sum(range(self.work * (self.count % 3)))
            return super().step(action)

    env_kwargs = [{"work": 1000 * b} for b in range(6)]
    arguments: dict[str, Any] = {"batch_T": 100, "batch_B": 6, "n_workers": 6, "min_ready": 2, "start_method": "fork"}
    with GpuSampler(Uneven, env_kwargs=env_kwargs, **arguments) as sampler:
        agent = begin(sampler, look)
        control = sampler.run.memory.control
        for itr in range(3):
            sampler.obtain_samples(itr)
            assert set(agent.counts().values()) == {100 * (1 + itr)}
            waiting = set()
    assert not overtaken


# ---- halves --------------------------------------------------------------------------------


def test_both_halves_may_step_at_once() -> None:
    """Each environment ends its step only when the other's has begun."""
    with gates(2) as gate:
        (read_0, write_0), (read_1, write_1) = gate.pipes
        kwargs = [{"gate": read_1, "sign": write_0}, {"gate": read_0, "sign": write_1}]
        with gated_sampler(AlternatingSampler, kwargs) as sampler:
            begin(sampler)
            for itr in range(2):
                check_batch(sampler, sampler.obtain_samples(itr)[1])


@pytest.mark.parametrize("overlap", [True, False])
def test_a_half_steps_while_the_others_actions_are_computed(overlap: bool) -> None:
    """A step ends only when the agent has acted for the other half."""
    with gates(2) as gate:

        def let(columns: list[int]) -> None:
            assert len(columns) == 1
            gate.let(1 - columns[0])
            if len(agent.log) == 2 * T:
                gate.let(columns[0])  # nobody acts after it

        with gated_sampler(
            AlternatingSampler, [{"gate": gate.pipes[b][0]} for b in range(2)], overlap=overlap
        ) as sampler:
            agent = begin(sampler, let)
            check_batch(sampler, sampler.obtain_samples(0)[1])
            assert sampler.server_stats.served == {1: 2 * T}
        assert overlap or all(one != other for one, other in zip(agent.log, agent.log[1:], strict=False)), "in turn"


class Watched(CountingEnv):
    """Marks in shared memory that it steps, and counts the steps of the other half that it saw meanwhile."""

    def __init__(self, fd: int, n: int, b: int, others: list[int]) -> None:
        super().__init__()
        self.fd, self.n, self.b, self.others = fd, n, b, others

    def step(self, action: Any) -> Any:
        board = np.frombuffer(mmap.mmap(self.fd, 16 * self.n), np.int64)
        board[self.b] = 1
        for _ in range(20):
            board[self.n + self.b] += board[self.others].sum()
            os.sched_yield()
        board[self.b] = 0
        return super().step(action)


@pytest.mark.parametrize(("sizes", "overlap"), pairs(some([(2, 5), (3, 5), (2, 2), (4, 4), (5, 7)], 3), [False, True]))
def test_without_overlap_only_one_half_ever_steps(sizes: tuple[int, int], overlap: bool) -> None:
    n_workers, B = sizes
    shares = split(B, n_workers)
    middle = n_workers - n_workers // 2
    halves = [[b for share in part for b in share] for part in (shares[:middle], shares[middle:])]
    fd = os.memfd_create("board")
    try:
        os.ftruncate(fd, 16 * B)
        kwargs = [{"fd": fd, "n": B, "b": b, "others": halves[b in halves[0]]} for b in range(B)]
        arguments: dict[str, Any] = {"batch_T": T, "batch_B": B, "n_workers": n_workers, "start_method": "fork"}
        with AlternatingSampler(
            Watched, env_kwargs=kwargs, overlap=overlap, max_decorrelation_steps=0, **arguments
        ) as sampler:
            agent = begin(sampler)
            for itr in range(3):
                check_batch(sampler, sampler.obtain_samples(itr)[1])
        if not overlap:
            board = np.frombuffer(mmap.mmap(fd, 16 * B), np.int64)
            assert board[B:].sum() == 0
    finally:
        os.close(fd)
    assert all(columns in halves for columns in agent.log), "each half as a whole"
    assert agent.counts() == dict.fromkeys(range(B), 3 * T)
