"""`serve_envs="auto"` where other programs use the CPUs: the caller's process steps all environments."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from penstock import AgentStep, AlternatingSampler, GpuSampler, RandomAgent, SamplerState, WorkerError
from penstock.envs import CountingEnv
from penstock.testing import Fault, faulty_env
from penstock.workers.affinity import idle_cpus, usable_cpus

SIZE: dict[str, Any] = {"batch_T": 4, "batch_B": 5, "serve_envs": "auto"}


def n_processes(cls: type[GpuSampler], **kwargs: Any) -> int:
    with cls(CountingEnv, **{**SIZE, **kwargs}) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        sampler.obtain_samples(0)
        assert sum(len(worker.env_ranks) for worker in sampler.stats().workers) == 5
        return len(sampler.worker_pids)


@pytest.mark.parametrize(
    ("idle", "cls", "kwargs", "is_alone"),
    [
        (1.4, GpuSampler, {}, True),
        (0.0, GpuSampler, {"min_ready": 2}, True),
        (1.6, GpuSampler, {}, False),
        (0.0, GpuSampler, {"n_workers": 1}, False),
        (0.0, GpuSampler, {"serve_envs": 2}, False),
        (0.0, AlternatingSampler, {}, False),
    ],
)
def test_when_it_does_without_workers(idle: float, cls: Any, kwargs: Any, is_alone: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr("penstock.samplers.central.idle_cpus", lambda seconds: idle)
    assert (n_processes(cls, **kwargs) == 0) == is_alone


def test_idle_cpus_counts_what_other_programs_leave() -> None:
    n = len(usable_cpus())
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * n)]
    try:
        assert -0.01 <= idle_cpus(0.3) < 0.5 * n
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    assert idle_cpus(0.05) <= n + 0.01


class Raises(RandomAgent):
    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        if self.itr == 1:
            raise ValueError("no")
        return super().step(observation, prev_action, prev_reward)

    def sample_mode(self, itr: int) -> None:
        self.itr = itr


@pytest.mark.usefixtures("no_idle_cpu")
@pytest.mark.parametrize(
    ("env_fn", "agent", "text"),
    [
        (CountingEnv, Raises(), r"the inference server raised ValueError while acting for env_rank .*\(itr=1\): no"),
        (
            faulty_env(CountingEnv, Fault("raise", at=7)),
            RandomAgent(),
            r"raised InjectedFault while stepping env_rank 0",
        ),
    ],
)
def test_exceptions_name_who_raised_them(env_fn: Any, agent: Any, text: str) -> None:
    with GpuSampler(env_fn, **SIZE, max_decorrelation_steps=0) as sampler:
        sampler.initialize(agent, seed=0)
        sampler.obtain_samples(0)
        for _ in range(2):
            with pytest.raises(WorkerError, match=text):
                sampler.obtain_samples(1)
        assert sampler.state is SamplerState.BROKEN


@pytest.mark.usefixtures("no_idle_cpu")
def test_the_server_counts_its_steps() -> None:
    with GpuSampler(CountingEnv, **SIZE, min_ready=1) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for itr in range(3):
            sampler.start_samples(itr)
            sampler.wait_samples()
        assert sampler.server_stats.served == {5: 3 * 4}
        assert sampler.n_workers == 1
