"""The pool is the only closer: whatever happens, each resource is closed once, in one place."""

from __future__ import annotations

import os
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock import GpuSampler, ParallelSampler, RandomAgent, Sampler, WorkerDiedError
from penstock.buffers.object_pipe import ObjectPipe
from penstock.buffers.shared import NamedMemory
from penstock.envs import CountingEnv
from penstock.vector import ShmVectorEnv
from penstock.workers.gates import WakeUp

pytestmark = pytest.mark.slow

CLOSERS: list[tuple[type, str]] = [
    (WakeUp, "close"),
    (ObjectPipe, "close"),
    (NamedMemory, "close"),
]


@pytest.fixture
def closings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, str]]]:
    """Each closing of a resource in this process: the resource, and the function of the pool that it came from."""
    found: list[tuple[Any, str]] = []

    def counted(plain: Callable[[Any], None]) -> Callable[[Any], None]:
        def close(resource: Any) -> None:
            names = [frame.name for frame in traceback.extract_stack() if frame.filename.endswith("workers/pool.py")]
            found.append((resource, names[0] if names else "elsewhere"))
            plain(resource)

        return close

    for cls, name in CLOSERS:
        monkeypatch.setattr(cls, name, counted(getattr(cls, name)))
    yield found
    found.clear()  # a mapping lives as long as anything refers to it


def check(closings: list[tuple[Any, str]], place: str) -> None:
    counts = Counter(id(resource) for resource, _ in closings)
    assert set(counts.values()) == {1}, [resource for resource, _ in closings if counts[id(resource)] > 1]
    assert {cls for cls, _ in CLOSERS} <= {type(resource) for resource, _ in closings}
    assert {found for _, found in closings} == {place}


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("cls", [ParallelSampler, GpuSampler])
def test_a_killed_worker(cls: type[Sampler], closings: list[tuple[Any, str]]) -> None:
    with cls(CountingEnv, batch_T=4, batch_B=4, n_workers=2, eval_n_envs=2) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        sampler.obtain_samples(0)
        kill(sampler.worker_pids[1])
        with pytest.raises(WorkerDiedError):
            sampler.obtain_samples(1)
        check(closings, "wait")
        with pytest.raises(WorkerDiedError):
            sampler.obtain_samples(2)
    sampler.shutdown()
    check(closings, "wait")


def test_an_ordinary_shutdown(closings: list[tuple[Any, str]]) -> None:
    with ParallelSampler(CountingEnv, batch_T=4, batch_B=4, n_workers=2) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        sampler.obtain_samples(0)
    sampler.shutdown()
    check(closings, "close")


def test_a_killed_worker_of_a_vector_environment(closings: list[tuple[Any, str]]) -> None:
    envs = ShmVectorEnv([CountingEnv] * 2)
    envs.reset(seed=0)
    kill(envs.worker_pids[0])
    with pytest.raises(WorkerDiedError):
        envs.step([1, 1])
    envs.close()
    check(closings, "wait")


def test_a_worker_that_cannot_start(closings: list[tuple[Any, str]]) -> None:
    def build() -> CountingEnv:
        if os.getpid() != main:
            kill(os.getpid())
        return CountingEnv()

    main = os.getpid()
    with ParallelSampler(build, batch_T=4, batch_B=4, n_workers=2) as sampler, pytest.raises(WorkerDiedError):
        sampler.initialize(RandomAgent(), seed=0)
    check(closings, "wait")
