"""What every test is held to: nothing that it started may be left when it ends."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported: several tests run at once, and its threads would push each other aside.
os.environ["OMP_NUM_THREADS"] = "1"

import cloudpickle
import psutil
import pytest

from penstock import ParallelSampler, RandomAgent
from penstock.envs import CountingEnv
from penstock.ports.lock_files import FOLDER_VARIABLE, ports_with_lock_file

# In the background SIGINT is ignored, and under nohup SIGHUP, and so they would be in all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

START_METHODS = ("fork", "forkserver", "spawn")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Workers cannot import test modules, so what is defined in them travels by value, as a script's does.
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        cloudpickle.register_pickle_by_value(module)


@pytest.fixture(params=START_METHODS)
def start_method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session", autouse=True)
def _port_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A folder of lock files that no other program uses."""
    os.environ[FOLDER_VARIABLE] = str(tmp_path_factory.mktemp("ports") / "locks")


@pytest.fixture(scope="session", autouse=True)
def _servers(_port_folder: None) -> None:
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


def _holdings() -> list[set[object]]:
    lock_files = set(ports_with_lock_file())
    return [set(_children()), set(_descriptors()), set(_shm_names()), set(threading.enumerate()), set(lock_files)]


@pytest.fixture(autouse=True)
def nothing_left(_servers: None) -> Iterator[None]:
    """No child process, descriptor, thread, lock file or name in /dev/shm may outlive a test."""
    before = _holdings()
    yield
    if not any(after - then for after, then in zip(_holdings(), before, strict=True)):
        return
    gc.collect()  # slow, so only where something is there that garbage may hold
    left = [psutil.Process(pid) for pid in _children() - before[0] if psutil.pid_exists(pid)]
    psutil.wait_procs(left, timeout=2)
    names, deadline = _shm_names() - before[2], time.monotonic() + 30
    while names and time.monotonic() < deadline:
        time.sleep(0.01)  # a test in another process has names there too, as long as it runs
        names &= _shm_names()
    kinds = ("processes", "descriptors", "names in /dev/shm", "threads", "lock files")
    for kind, after, then in zip(kinds, _holdings(), before, strict=True):
        assert (names if kind == "names in /dev/shm" else after - then) == set(), f"{kind} left behind"
