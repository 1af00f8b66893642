"""The pool is the only closer: whatever happens, each resource is closed once, in one place."""

from __future__ import annotations

import os
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock import GpuSampler, ParallelSampler, RandomAgent, WorkerDiedError
from penstock.buffers.object_pipe import ObjectPipe
from penstock.buffers.shared import NamedMemory
from penstock.envs import CountingEnv
from penstock.vector import ShmVectorEnv
from penstock.workers.gates import WakeUp

from ..support import sampler_of

pytestmark = pytest.mark.slow


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

    for cls in (WakeUp, ObjectPipe, NamedMemory):
        monkeypatch.setattr(cls, "close", counted(cls.close))
    yield found
    found.clear()  # a mapping lives as long as anything refers to it


def use(sampler: Any, kills: bool) -> None:
    with sampler:
        sampler.initialize(RandomAgent(), seed=0)
        sampler.obtain_samples(0)
        if kills:
            os.kill(sampler.worker_pids[1], signal.SIGKILL)
            for _ in range(2):
                with pytest.raises(WorkerDiedError):
                    sampler.obtain_samples(1)
    sampler.shutdown()


def use_vector_env() -> None:
    envs = ShmVectorEnv([CountingEnv] * 2)
    envs.reset(seed=0)
    os.kill(envs.worker_pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        envs.step([1, 1])
    envs.close()


def start_in_vain() -> None:
    def build() -> CountingEnv:
        if os.getpid() != main:
            os.kill(os.getpid(), signal.SIGKILL)
        return CountingEnv()

    main = os.getpid()
    with sampler_of(ParallelSampler, build) as sampler, pytest.raises(WorkerDiedError):
        sampler.initialize(RandomAgent(), seed=0)


SCENES: dict[str, tuple[Callable[[], None], str]] = {
    "an ordinary shutdown": (lambda: use(sampler_of(ParallelSampler), kills=False), "close"),
    "a killed worker": (lambda: use(sampler_of(ParallelSampler), kills=True), "wait"),
    "a killed worker with a server": (lambda: use(sampler_of(GpuSampler, eval_n_envs=2), kills=True), "wait"),
    "a killed worker of a vector environment": (use_vector_env, "wait"),
    "a worker that cannot start": (start_in_vain, "wait"),
}


@pytest.mark.parametrize("scene", SCENES)
def test_each_resource_is_closed_once_by_the_pool(scene: str, closings: list[tuple[Any, str]]) -> None:
    work, place = SCENES[scene]
    work()
    counts = Counter(id(resource) for resource, _ in closings)
    assert set(counts.values()) == {1}, [resource for resource, _ in closings if counts[id(resource)] > 1]
    assert {type(resource) for resource, _ in closings} >= {WakeUp, ObjectPipe, NamedMemory}
    assert {found for _, found in closings} == {place}
