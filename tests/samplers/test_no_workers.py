"""`serve_envs="auto"` where other programs use the CPUs: the caller's process steps all environments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

from penstock import (
    Affinity,
    AgentStep,
    AlternatingSampler,
    ConfigError,
    GpuSampler,
    RandomAgent,
    Sampler,
    SamplerState,
    SerialSampler,
    WorkerError,
)
from penstock.envs import CountingEnv
from penstock.testing import Fault, faulty_env
from penstock.workers.affinity import idle_cpus, usable_cpus

from ..scale import quick_first

SIZE: dict[str, Any] = {"batch_T": 4, "batch_B": 5, "serve_envs": "auto"}


def n_processes(cls: type[GpuSampler], affinity: Any = None, **kwargs: Any) -> int:
    with cls(CountingEnv, **{**SIZE, **kwargs}) as sampler:
        sampler.initialize(RandomAgent(), seed=0, affinity=affinity)
        sampler.obtain_samples(0)
        assert sum(len(worker.env_ranks) for worker in sampler.stats().workers) == 5
        return len(sampler.worker_pids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("idle", "cls", "kwargs", "has_none"),
    quick_first(
        [
            (1.4, GpuSampler, {}, True),
            (0.0, GpuSampler, {"min_ready": 2}, True),
            (1.6, GpuSampler, {}, False),
            (0.0, GpuSampler, {"n_workers": 1}, False),
            (0.0, GpuSampler, {"serve_envs": 2}, False),
            (0.0, GpuSampler, {"step_timeout": 60.0}, False),
            (0.0, GpuSampler, {"on_worker_failure": "restart"}, False),
            (0.0, GpuSampler, {"affinity": Affinity(pin=False)}, True),
            (0.0, AlternatingSampler, {}, False),
        ],
        4,
    ),
)
def test_when_it_does_without_workers(idle: float, cls: Any, kwargs: Any, has_none: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr("penstock.samplers.central.idle_cpus", lambda seconds: idle)
    assert (n_processes(cls, **kwargs) == 0) == has_none


@pytest.mark.slow
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


def test_cpus_that_are_asked_for_have_workers(monkeypatch: Any) -> None:
    monkeypatch.setattr("penstock.samplers.central.idle_cpus", lambda seconds: 0.0)
    n = max(1, len(usable_cpus()) - 1)
    assert n_processes(GpuSampler, affinity=[usable_cpus()[0]] * n) == n


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
            r"raised penstock\.testing\.faults\.InjectedFault while stepping env_rank 0",
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


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Leaving(Exception):
    def __str__(self) -> str:
        raise SystemExit("no text")


@pytest.mark.usefixtures("no_idle_cpu")
@pytest.mark.parametrize("kind", [Wordless, Leaving])
@pytest.mark.parametrize("cls", [SerialSampler, GpuSampler])
def test_an_exception_whose_text_cannot_be_made_breaks_the_sampler_too(
    cls: type[Sampler], kind: type[Exception]
) -> None:
    class Raising(CountingEnv):
        def step(self, action: Any) -> Any:
            raise kind

    size = {**SIZE, "serve_envs": "auto"} if cls is GpuSampler else {"batch_T": 4, "batch_B": 5}
    message = r"worker 0 .* raised .* while stepping env_rank 4, t=0 \(itr=0\): \(its message could not be formatted"
    with cls([CountingEnv] * 4 + [Raising], max_decorrelation_steps=0, **size) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        with pytest.raises(WorkerError, match=message):
            sampler.obtain_samples(0)
        assert sampler.state is SamplerState.BROKEN


@pytest.mark.usefixtures("no_idle_cpu")
def test_the_server_counts_its_steps() -> None:
    with GpuSampler(CountingEnv, **SIZE, min_ready=1) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for itr in range(3):
            sampler.start_samples(itr)
            sampler.wait_samples()
        assert sampler.server_stats.served == {5: 3 * 4}
        assert min(sampler.server_stats.acting, sampler.server_stats.waiting) > 0
        assert "1 worker, " in repr(sampler)
        assert sampler.n_workers == 1


class Nested(CountingEnv):
    """Raises as a sampler of its own would."""

    def step(self, action: Any) -> Any:
        raise WorkerError("of another sampler")


class Interrupting(CountingEnv):
    """Ctrl-C comes in its step, or when it is built."""

    def __init__(self, when: str, n_open: list[int]) -> None:
        super().__init__()
        if when == "built" and n_open[0] == 3:
            os.kill(os.getpid(), signal.SIGINT)
        n_open[0] += 1
        self.when, self.n_open = when, n_open

    def step(self, action: Any) -> Any:
        if self.when == "step":
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(action)

    def close(self) -> None:
        self.n_open[0] -= 1


@pytest.mark.usefixtures("no_idle_cpu")
def test_an_error_of_another_sampler_is_that_of_the_environment() -> None:
    with GpuSampler(Nested, **SIZE, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        with pytest.raises(
            WorkerError,
            match=r"raised penstock\.errors\.WorkerError while stepping env_rank 0, t=0 .*: of another sampler",
        ):
            sampler.obtain_samples(0)


@pytest.mark.usefixtures("no_idle_cpu")
@pytest.mark.parametrize("when", ["step", "built"])
def test_ctrl_c_closes_all_environments(when: str) -> None:
    n_open = [0]
    sampler = GpuSampler(partial(Interrupting, when, n_open), **SIZE, max_decorrelation_steps=0)
    with pytest.raises(KeyboardInterrupt):
        sampler.initialize(RandomAgent(), seed=0)
        assert when == "step"
        sampler.obtain_samples(0)
    if when == "step":
        with pytest.raises(WorkerError, match="KeyboardInterrupt while stepping env_rank 0"):
            sampler.obtain_samples(1)
    sampler.shutdown()
    assert n_open == [0]


@pytest.mark.parametrize(
    ("cls", "name", "own"),
    [
        (GpuSampler, "serve_env", "serve_envs"),
        (GpuSampler, "min_redy", "min_ready"),
        (AlternatingSampler, "overlp", "overlap"),
        (AlternatingSampler, "spin_second", "spin_seconds"),
    ],
)
def test_a_misspelt_argument_of_a_central_sampler(cls: Any, name: str, own: str) -> None:
    with pytest.raises(ConfigError, match=f"no argument '{name}': did you mean '{own}'"):
        cls(CountingEnv, batch_T=2, batch_B=4, **{name: 1})
