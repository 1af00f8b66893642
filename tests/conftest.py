"""What every test is held to: nothing that it started may be left when it ends."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import psutil
import pytest

from penstock import ParallelSampler, RandomAgent
from penstock.envs import CountingEnv

START_METHODS = ("fork", "forkserver", "spawn")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Workers cannot import test modules, so what is defined in them travels by value, as a script's does.
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        cloudpickle.register_pickle_by_value(module)


@pytest.fixture(params=START_METHODS)
def start_method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session", autouse=True)
def _servers() -> None:
    """Let the fork server and the resource tracker start, which live as long as the process."""
    with ParallelSampler(CountingEnv, batch_T=1, batch_B=1) as sampler:
        sampler.initialize(RandomAgent())


def _children() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}


def _descriptors() -> set[str]:
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{fd.name}={os.readlink(fd)}")
        except OSError:
            continue  # the one that the listing itself had open
    return {entry for entry in found if "memfd" in entry or "eventfd" in entry or "pidfd" in entry or "pipe:" in entry}


def _shm_names() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


@pytest.fixture(autouse=True)
def nothing_left(_servers: None) -> Iterator[None]:
    """No child process, thread, descriptor or name in /dev/shm may outlive a test."""
    gc.collect()
    before = _children(), _descriptors(), _shm_names(), set(threading.enumerate())
    yield
    gc.collect()
    children, descriptors, names, threads = before
    left = [psutil.Process(pid) for pid in _children() - children if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(left, timeout=2)
    assert not alive, f"processes left behind: {alive}"
    assert _descriptors() - descriptors == set(), "descriptors left open"
    assert _shm_names() - names == set(), "names left in /dev/shm"
    assert set(threading.enumerate()) - threads == set(), "threads left running"
