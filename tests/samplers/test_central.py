"""Central samplers: whom they serve while others work, what their workers do without, and the parameters that act."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import (
    AgentStep,
    AlternatingSampler,
    CategoricalPgAgent,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    ResetCollector,
    Sampler,
    SerialSampler,
)
from penstock.buffers.reports import ReportBoard
from penstock.envs import CountingEnv, SlowEnv
from penstock.workers.control import ControlBlock
from penstock.workers.monitor import Monitor
from penstock.workers.plan import PoolOptions
from penstock.workers.spinning import yield_cpu

from ..models import Constant
from ..scale import pairs, scaled, some
from ..starter import run
from ..support import PROGRAMS, Gated, assert_same, collect_with, pipes
from .digest_cases import Plain, Stateful
from .test_equalities import SAMPLERS

T = 10

pytestmark = [pytest.mark.timeout(60), pytest.mark.slow]  # what is served in the wrong order waits for ever


class Recorder(RandomAgent):
    """Writes down for which columns it acts, and for which it computes values. A recurrent agent's are asked for within
    the batch."""

    def __init__(self, recurrent: bool = False) -> None:
        self.recurrent = recurrent
        self.log: list[list[int]] = []
        self.valued: list[tuple[int, ...]] = []
        self.then: list[Callable[[list[int]], None]] = []  # its copies share the lists

    def _columns(self, n: int) -> list[int]:
        return list(range(n)) if self.selected is None else self.selected.tolist()

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        columns = self._columns(len(prev_reward))
        self.log.append(columns)
        for then in self.then:
            then(columns)
        return super().step(observation, prev_action, prev_reward)

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        self.valued.append(tuple(self._columns(len(prev_reward))))
        return observation[:, 1]

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


def gated_sampler(cls: type[Sampler], env_kwargs: list[dict[str, Any]], **kwargs: Any) -> Any:
    arguments: dict[str, Any] = {"n_workers": len(env_kwargs), "start_method": "fork", **kwargs}
    return cls(Gated, env_kwargs=env_kwargs, batch_T=T, batch_B=len(env_kwargs), max_decorrelation_steps=0, **arguments)


# ---- values --------------------------------------------------------------------------------


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
        agent = Recorder(recurrent)
        # The other workers ask for values long before the one of the slow environment does.
        env_kwargs = [{"length": 3 + b % 4, "truncate": True, "seconds": (b == slow) / 2000} for b in range(6)]
        with cls(SlowEnv, env_kwargs=env_kwargs, batch_T=T, batch_B=6, n_workers=3, **kwargs) as sampler:
            sampler.initialize(agent, seed=0, bootstrap_value=True)
            agent.valued.clear()
            for itr in range(3):
                sampler.obtain_samples(itr)
        found.append(Counter(agent.valued))
    assert found[0] == found[1]
    assert recurrent or max(found[0], key=len) == tuple(range(6 if cls is GpuSampler else 4))


# ---- first ready ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs", some([{"min_ready": 1}, {"max_wait": 1e-4}, {"min_ready": 0.3}, {"max_wait": 0.01}], 2), ids=str
)
def test_a_slow_environment_holds_up_nobody(kwargs: dict[str, Any]) -> None:
    """Environment 0 is let go when the others have made all their steps."""
    with pipes(1) as [(gate, leave)]:

        def let_the_slow_one_go(columns: list[int]) -> None:
            counts = agent.counts()
            if 0 not in columns and counts[1] == counts[2] == T * (1 + itr):
                os.write(leave, bytes(T))

        itr = 0
        with gated_sampler(GpuSampler, [{"gate": gate}, {}, {}], **kwargs) as sampler:
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
    with pipes(1) as [(gate, leave)]:

        def let_go(columns: list[int]) -> None:
            if max(agent.counts().values()) == T:  # whichever came first: the slow one may be among the first three
                os.write(leave, bytes(T))

        with gated_sampler(GpuSampler, [{"gate": gate}, {}, {}, {}], min_ready=3) as sampler:
            agent = begin(sampler, let_go)
            _, infos = sampler.obtain_samples(0)
            check_batch(sampler, infos)
        acted: Counter[int] = Counter()
        for columns in agent.log:
            acted.update(columns)
            if max(acted.values()) == T:
                break
            assert len(columns) >= 3


# ---- halves --------------------------------------------------------------------------------


def test_both_halves_may_step_at_once() -> None:
    """Each environment ends its step only when the other's has begun."""
    with pipes(2) as [(read_0, write_0), (read_1, write_1)]:
        kwargs = [{"gate": read_1, "sign": write_0}, {"gate": read_0, "sign": write_1}]
        with gated_sampler(AlternatingSampler, kwargs) as sampler:
            begin(sampler)
            for itr in range(2):
                check_batch(sampler, sampler.obtain_samples(itr)[1])


@pytest.mark.parametrize("overlap", [True, False])
def test_a_half_steps_while_the_others_actions_are_computed(overlap: bool) -> None:
    """A step ends only when the agent has acted for the other half."""
    with pipes(2) as gates:

        def let(columns: list[int]) -> None:
            (column,) = columns
            os.write(gates[1 - column][1], b"1")
            if len(agent.log) == 2 * T:
                os.write(gates[column][1], b"1")  # nobody acts after it

        with gated_sampler(AlternatingSampler, [{"gate": gate} for gate, _ in gates], overlap=overlap) as sampler:
            agent = begin(sampler, let)
            check_batch(sampler, sampler.obtain_samples(0)[1])
            assert sampler.server_stats.served == {1: 2 * T}


class Watched(CountingEnv):
    """Writes the number of its half when a step begins and when it ends, and lets others run in between."""

    def __init__(self, half: bytes, file: int) -> None:
        super().__init__()
        self.half, self.file = half, file

    def step(self, action: Any) -> Any:
        os.write(self.file, self.half)
        for _ in range(20):
            yield_cpu()
        os.write(self.file, self.half)
        return super().step(action)


@pytest.mark.parametrize("n_workers", [2, 3])
def test_without_overlap_only_one_half_ever_steps(n_workers: int) -> None:
    """Each worker has two environments."""
    B, n_first = 2 * n_workers, 2 * (n_workers - n_workers // 2)
    with pipes(1) as [(read, write)]:
        env_kwargs = [{"half": b"A" if b < n_first else b"B", "file": write} for b in range(B)]
        arguments: dict[str, Any] = {"batch_T": T, "batch_B": B, "n_workers": n_workers, "start_method": "fork"}
        arguments |= {"overlap": False, "max_decorrelation_steps": 0}
        with AlternatingSampler(Watched, env_kwargs=env_kwargs, **arguments) as sampler:
            agent = begin(sampler)
            for itr in range(3):
                check_batch(sampler, sampler.obtain_samples(itr)[1])
        seen = os.read(read, 10_000).decode()
    whole = {"A": 2 * n_first, "B": 2 * (B - n_first)}  # where a half has begun its step and has ended it
    assert not [half for half, letters in groupby(seen) if len(list(letters)) % whole[half]]
    assert len(seen) == 2 * B * 3 * T
    assert all(columns in ([*range(n_first)], [*range(n_first, B)]) for columns in agent.log)


# ---- a collector of one's own, and an evaluation that is ended ------------------------------


class Halting(ResetCollector):
    """Repeats the first action in every third row."""

    def collect_batch(self, itr: int) -> None:
        self.begin_batch(itr)
        for t in range(self.batch_T):
            self.act(t)
            if t % 3 == 2:
                self.prev_action[...] = self.samples.action[1]
                self.samples.action[t + 1] = self.prev_action
            self.step_envs(t)
        self.end_batch()


HOW = ("central", "central, first-ready", "alternating", "alternating, no overlap", "central, own process, first-ready")


@pytest.mark.parametrize(("agent_cls", "how"), pairs([Plain, Stateful], HOW))
def test_a_collector_of_ones_own_records_what_it_does_in_one_process(agent_cls: Any, how: str) -> None:
    cls, kwargs = SAMPLERS[how]
    env_kwargs = [{"length": n, "truncate": n > 3} for n in (3, 5, 1, 4, 7)]
    options: dict[str, Any] = {"batch_T": 13, "n": 4, "env_kwargs": env_kwargs, "collector_cls": Halting}
    wanted = collect_with(SerialSampler, CountingEnv, agent_cls(), **options)
    assert any(batch.agent.final_value.any() for batch, _ in wanted)
    assert_same(collect_with(cls, CountingEnv, agent_cls(), **options, **kwargs), wanted)


@pytest.mark.parametrize("how", HOW)
def test_an_evaluation_ends_when_there_are_enough_trajectories(how: str) -> None:
    cls, kwargs = SAMPLERS[how]
    limits: dict[str, Any] = {"eval_n_envs": 3, "eval_max_steps": 3_000_000_000, "eval_max_trajectories": 10}
    with cls(CountingEnv, batch_T=2, batch_B=4, **limits, **kwargs) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for itr in range(2):
            assert len(sampler.evaluate_agent(itr)) >= 10
            sampler.obtain_samples(itr)


# ---- workers without an agent --------------------------------------------------------------


@pytest.mark.parametrize("start_method", scaled(["forkserver", "spawn"], ["forkserver"]))
def test_workers_import_neither_torch_nor_optional_rooms(starter: None, tmp_path: Path, start_method: str) -> None:
    """In a program of its own, whose supervisor is a new interpreter: that of this process has torch. A vector
    environment that starts later finds what it needs, in the same supervisor."""
    how = {"strict": True, "forks_supervisor": False, "skips_teardown": False}
    done = run(PROGRAMS / "imported.py", start_method, cwd=tmp_path, seconds=60, **how)
    assert (done.stdout.splitlines(), done.stderr) == (
        ["0.0 0.0 4", "of the sampler: []", "of the vector environment: True", "one supervisor: True"],
        "",
    )


def test_the_default_workers_of_halves_leave_a_cpu_for_the_process_that_acts() -> None:
    sampler = AlternatingSampler("CartPole-v1", batch_T=1, batch_B=20)
    assert [sampler.acting().count_workers(sampler.config, range(n)) for n in (1, 2, 8, 64)] == [2, 2, 14, 20]


@pytest.mark.parametrize(
    ("cls", "kwargs"),
    [(GpuSampler, {}), (GpuSampler, {"min_ready": 1, "step_timeout": 30.0}), (AlternatingSampler, {"overlap": False})],
)
def test_waiting_takes_no_cpu(cls: type[GpuSampler], kwargs: dict[str, Any]) -> None:
    """About a second in which nobody can do anything."""
    seconds = 0.8
    with pipes(1) as [(gate, leave)], gated_sampler(cls, [{"gate": gate}] * 2, **kwargs) as sampler:
        begin(sampler)
        release = threading.Timer(seconds, os.write, (leave, bytes(2 * T)))
        release.start()
        # Of this thread: after the forks OpenBLAS starts its threads again, and they spin for a tenth of a second.
        began, cpu = time.monotonic(), time.thread_time()
        sampler.obtain_samples(0)
        used, took = time.thread_time() - cpu, time.monotonic() - began
        release.join()
        assert sampler.server_stats.waiting > 0.5 * seconds
    assert took >= seconds * 0.9
    assert used < 0.25 * took, "it would be all of it if anything were looked at again and again"


def publish(agent: CategoricalPgAgent, value: float) -> None:
    with torch.no_grad():
        agent.model.weight.fill_(value)
    agent.sync_shared_memory()


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler, GpuSampler, AlternatingSampler])
def test_policy_version_counts_the_parameters_that_were_published(cls: type[Sampler]) -> None:
    agent = CategoricalPgAgent(Constant)
    with cls(CountingEnv, batch_T=2, batch_B=2, n_workers=2, eval_n_envs=2, eval_max_steps=20) as sampler:
        assert sampler.policy_version is None
        sampler.initialize(agent, seed=0)
        assert sampler.policy_version is None, "no batch has begun"
        sampler.evaluate_agent(0)
        assert sampler.policy_version is None, "an evaluation is no batch"
        for itr in range(4):
            samples, _ = sampler.obtain_samples(itr)
            assert sampler.policy_version == 1 + itr
            assert (samples.agent.policy_version == 1 + itr).all()
            assert samples.agent.agent_info.value.unique().tolist() == [float(itr)]
            publish(agent, itr + 1.0)
            assert sampler.policy_version == 1 + itr, "of the batch, not of the learner"
            sampler.evaluate_agent(itr)
        sampler.obtain_samples(8)
        sampler.obtain_samples(9)
        assert sampler.policy_version == 5, "nothing new was published between the two"
    assert sampler.policy_version == 5


@pytest.mark.parametrize("cls", [ParallelSampler, GpuSampler])
def test_what_is_published_during_a_batch_counts_for_the_next(cls: type[Sampler]) -> None:
    agent = CategoricalPgAgent(Constant)
    with pipes(2) as [(seen, sign), (gate, leave)], gated_sampler(cls, [{"sign": sign, "gate": gate}]) as sampler:
        sampler.initialize(agent, seed=0)
        for itr in range(2):
            sampler.start_samples(itr)
            if cls is ParallelSampler:
                os.read(seen, 1)  # the worker has begun, with what was there
            publish(agent, itr + 1.0)
            assert sampler.policy_version == 1 + itr
            os.write(leave, bytes(T))
            samples, _ = sampler.wait_samples()
            assert sampler.policy_version == 1 + itr
            assert samples.agent.agent_info.value.unique().tolist() == [float(itr)]
            if cls is ParallelSampler:
                os.read(seen, T - 1)


def test_step_buffers_are_among_the_bytes_that_are_shared() -> None:
    found, sizes = [], {"batch_T": 1, "batch_B": 500, "eval_n_envs": 500, "eval_max_steps": 500}
    for cls in (ParallelSampler, GpuSampler):
        with cls(CountingEnv, n_workers=1, max_decorrelation_steps=0, **sizes) as sampler:
            sampler.initialize(RandomAgent())
            found.append(sampler.stats().bytes_shared)
    # Of each environment the observation, action, previous action and reward, value and reset flag.
    assert found[1] - found[0] >= 1000 * (2 * 4 + 8 + 8 + 4 + 4 + 1)


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
