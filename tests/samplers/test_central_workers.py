"""A central sampler's workers: without agent and torch, quiet while they wait; and the parameters that act."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import (
    AlternatingSampler,
    CategoricalPgAgent,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    Sampler,
    SamplerStateError,
    SerialSampler,
)
from penstock.envs import CountingEnv

from ..models import Constant
from ..scale import scaled
from ..support import PROGRAMS, Held

pytestmark = pytest.mark.slow

every = pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler, GpuSampler, AlternatingSampler])


@pytest.mark.parametrize("start_method", scaled(["forkserver", "spawn"], ["forkserver"]))
def test_workers_do_not_import_torch(tmp_path: Path, start_method: str) -> None:
    """In a process of its own: this one's supervisor has torch."""
    paths = [str(Path(p).resolve()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    done = subprocess.run(
        [sys.executable, "-W", "error", PROGRAMS / "without_torch.py", start_method],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert (done.stdout, done.stderr) == ("0.0 0.0 4\n", "")


def test_the_default_workers_of_halves_leave_a_cpu_for_the_process_that_acts() -> None:
    sampler = AlternatingSampler("CartPole-v1", batch_T=1, batch_B=20)
    assert [sampler.acting().count_workers(sampler.config, range(n)) for n in (1, 2, 8, 64)] == [2, 2, 14, 20]


@pytest.mark.parametrize(
    ("cls", "kwargs"),
    [
        (GpuSampler, {}),
        (GpuSampler, {"min_ready": 1, "step_timeout": 30.0}),
        (AlternatingSampler, {"overlap": False}),
    ],
    ids=["lock-step", "first-ready", "alternating"],
)
def test_waiting_takes_no_cpu(cls: type[GpuSampler], kwargs: dict[str, Any]) -> None:
    """About a second in which nobody can do anything."""
    seconds = 0.8
    read, write = os.pipe()
    sizes: dict[str, Any] = {"batch_T": 2, "batch_B": 2, "n_workers": 2, "max_decorrelation_steps": 0}
    try:
        with cls(Held, env_kwargs={"gate": read}, start_method="fork", **sizes, **kwargs) as sampler:
            sampler.initialize(RandomAgent())
            release = threading.Timer(seconds, os.write, (write, bytes(4)))
            release.start()
            # Of this thread: after the forks OpenBLAS starts its threads again, and they spin for a tenth of a second.
            began, cpu = time.monotonic(), time.thread_time()
            sampler.obtain_samples(0)
            used, took = time.thread_time() - cpu, time.monotonic() - began
            release.join()
            waiting = sampler.server_stats.waiting
    finally:
        os.close(read)
        os.close(write)
    assert took >= seconds * 0.9
    assert used < 0.25 * took, "it would be all of it if anything were looked at again and again"
    assert waiting > 0.5 * seconds


def publish(agent: CategoricalPgAgent, value: float) -> None:
    with torch.no_grad():
        agent.model.weight.fill_(value)
    agent.sync_shared_memory()


@every
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
            assert samples.agent.agent_info.value.unique().tolist() == [float(itr)]
            publish(agent, itr + 1.0)
            assert sampler.policy_version == 1 + itr, "of the batch, not of the learner"
            sampler.evaluate_agent(itr)
        sampler.obtain_samples(8)
        sampler.obtain_samples(9)
        assert sampler.policy_version == 5, "nothing new was published between the two"
    assert sampler.policy_version == 5


class Announced(CountingEnv):
    """Says through a pipe that it steps, and waits for leave."""

    def __init__(self, sign: int, gate: int) -> None:
        super().__init__()
        self.sign, self.gate = sign, gate

    def step(self, action: Any) -> Any:
        os.write(self.sign, b"1")
        os.read(self.gate, 1)
        return super().step(action)


@pytest.mark.parametrize("cls", [ParallelSampler, GpuSampler])
def test_what_is_published_during_a_batch_counts_for_the_next(cls: type[Sampler]) -> None:
    agent, (seen, sign), (gate, leave) = CategoricalPgAgent(Constant), os.pipe(), os.pipe()
    sizes: dict[str, Any] = {"batch_T": 3, "batch_B": 1, "n_workers": 1, "max_decorrelation_steps": 0}
    try:
        with cls(Announced, env_kwargs={"sign": sign, "gate": gate}, start_method="fork", **sizes) as sampler:
            sampler.initialize(agent, seed=0)
            for itr in range(2):
                sampler.start_samples(itr)
                if cls is ParallelSampler:
                    os.read(seen, 1)  # the worker has begun, with what was there
                publish(agent, itr + 1.0)
                assert sampler.policy_version == 1 + itr
                os.write(leave, bytes(3))
                samples, _ = sampler.wait_samples()
                assert sampler.policy_version == 1 + itr
                assert samples.agent.agent_info.value.unique().tolist() == [float(itr)]
                if cls is ParallelSampler:
                    os.read(seen, 2)
    finally:
        for fd in (seen, sign, gate, leave):
            os.close(fd)


def test_step_buffers_are_counted_in_the_bytes_that_are_shared() -> None:
    """Each environment's observation, action, previous action and reward, value and reset flag, at the least."""

    def bytes_shared(cls: type[Sampler], B: int, n_evals: int) -> int:
        with cls(
            CountingEnv,
            batch_T=1,
            batch_B=B,
            n_workers=1,
            eval_n_envs=n_evals,
            eval_max_steps=n_evals,
            max_decorrelation_steps=0,
        ) as sampler:
            sampler.initialize(RandomAgent())
            return sampler.stats().bytes_shared

    one = 2 * 4 + 8 + 8 + 4 + 4 + 1
    n = scaled(1000, 500)
    for B, n_evals in ((n, 0), (1, n)):
        more = bytes_shared(GpuSampler, B, n_evals) - bytes_shared(ParallelSampler, B, n_evals)
        assert n * one <= more <= n * one + n * 8 + 8000, "and no copy of anything"


def test_statistics_before_initialize_say_what_is_missing() -> None:
    with pytest.raises(SamplerStateError, match=r"server_stats was called before initialize"):
        _ = GpuSampler(CountingEnv, batch_T=1, batch_B=1).server_stats
