"""Which tests are slow, which need torch, and the rule for all: a test leaves nothing behind that it started."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest
from xdist import is_xdist_controller

from penstock.system import PORTABLE

from .children import descendants, descriptors
from .scale import FULL, USUAL_METHODS, scaled
from .starter import starting

gc.disable()  # until `_servers`: the garbage collector would search all that the test modules make, many times

# In the background a shell ignores SIGINT, and nohup ignores SIGHUP. Processes that the tests start would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

TESTS = Path(__file__).parent

# Samplers return tensors, so most tests need torch. Without it, only the tests of these folders run.
HAS_TORCH = importlib.util.find_spec("torch") is not None
NEED_NO_TORCH = ("buffers", "envs", "games", "vector", "workers")
if not HAS_TORCH:
    collect_ignore = [path.name for path in TESTS.iterdir() if path.name not in NEED_NO_TORCH]
    collect_ignore.append("workers/test_arguments.py")
    collect_ignore += [f"games/{path.name}" for path in TESTS.glob("games/test_*.py") if path.name != "test_leases.py"]


def pytest_sessionstart(session: pytest.Session) -> None:
    """What all tests need. A process that leaves the tests to others (`-n`) does not wait for these imports."""
    if is_xdist_controller(session):
        return
    from hypothesis import settings

    # No deadline: several tests share a CPU.
    settings.register_profile("scaled", max_examples=scaled(300, 25), deadline=None)
    settings.register_profile("quick", max_examples=4, deadline=None)
    settings.load_profile("quick" if session.config.option.markexpr == QUICK else "scaled")
    if HAS_TORCH:
        import torch

        # In this process alone. Tests fork it, and in a fork torch would wait for the threads that it has used before.
        torch.set_num_threads(1)


QUICK = "not slow"
#: `make quick` runs at most so many cases of each test: the first ones.
QUICK_CASES = 2
#: Of a file whose tests are all slow.
ALL_SLOW = re.compile(r"^pytestmark = (\[[^\]]*)?pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make quick` does not import a file of which it would leave out every test."""
    if config.option.markexpr == QUICK and collection_path.name.startswith("test_"):
        return bool(ALL_SLOW.search(collection_path.read_text())) or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Workers cannot import test modules. Definitions in them are pickled by value, like those in a script.
    import cloudpickle

    from . import scale, support

    shared = [scale, support]
    if HAS_TORCH:
        from . import models

        shared.append(models)
    for module in {*shared, *(item.module for item in items if isinstance(item, pytest.Function))}:
        cloudpickle.register_pickle_by_value(module)
    seen: Counter[str] = Counter()
    for item in items:
        if (linux := item.get_closest_marker("linux")) is not None:
            assert any(linux.args), f"{item.nodeid}: the mark `linux` needs a reason"
            item.add_marker(pytest.mark.skipif(PORTABLE, reason=f"Linux: {linux.args[0]}"))
        test = item.nodeid.partition("[")[0]
        if _has_other_start_method(item) or seen[test] == QUICK_CASES:
            item.add_marker(pytest.mark.slow)
        elif item.get_closest_marker("slow") is None:
            seen[test] += 1


def _has_other_start_method(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    values = callspec.params.values() if callspec is not None else ()
    return any(isinstance(value, str) and value in ("fork", "spawn") for value in values)


@pytest.fixture(params=USUAL_METHODS)
def start_method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session", autouse=True)
def _lock_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Folders of lock files for this process alone: several tests run at once, and each must find its CPUs free."""
    for kind in ("PORT", "CPU", "RUN"):
        os.environ[f"PENSTOCK_{kind}_FOLDER"] = str(tmp_path_factory.mktemp(kind) / "locks")


@pytest.fixture(scope="session", autouse=True)
def _servers(_lock_folders: None) -> None:
    """Start the supervisor, the resource tracker and Python's own fork server, which live as long as the process."""
    from penstock.envs import CountingEnv

    if HAS_TORCH:  # then the supervisor imports torch
        from penstock import ParallelSampler, RandomAgent

        with ParallelSampler(CountingEnv, batch_T=1, batch_B=1) as sampler:
            sampler.initialize(RandomAgent())
    else:
        from penstock.vector import ShmVectorEnv

        ShmVectorEnv([CountingEnv]).close()
    if sys.version_info >= (3, 14):  # Gymnasium's vector environments use it
        forkserver.ensure_running()
    gc.collect()
    gc.freeze()  # a collection after a test need not search what was imported
    gc.enable()


@pytest.fixture(scope="session")
def starter(_servers: None) -> Iterator[None]:
    """What `starter.Program` and `starter.run` need."""
    with starting():
        yield


@pytest.fixture(scope="module")
def starter_if_slow(request: pytest.FixtureRequest) -> None:
    """The same, for a module of which only slow tests need it: `make quick` does without the process."""
    if any(item.path == request.path and item.get_closest_marker("slow") for item in request.session.items):
        request.getfixturevalue("starter")


# The functions below run twice for every test.


def _children() -> set[int]:
    """All descendants, zombies excluded. On Linux they read /proc themselves: psutil takes ten times as long."""
    if PORTABLE:
        return descendants()
    found: set[int] = set()
    parents = [os.getpid()]
    while parents:
        with contextlib.suppress(OSError):  # it has ended
            tasks = f"/proc/{parents.pop()}/task"
            for task in os.listdir(tasks):
                parents += (new := set(map(int, _read(f"{tasks}/{task}/children").split())) - found)
                found |= new
    return {pid for pid in found if not _is_zombie(pid)}


def _is_zombie(pid: int) -> bool:
    try:
        return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[0] == b"Z"
    except OSError:
        return True


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def _descriptors() -> set[str]:
    """Pipes, memory, and what wakes or watches a process, without the memory that multiprocessing keeps for later."""
    heap = sys.modules.get("multiprocessing.heap")
    kept = {f"0 {os.fstat(arena.fd).st_ino}" for arena in heap.BufferWrapper._heap._arenas} if heap else ()
    return {f"{fd}={what}" for fd, what in descriptors().items() if what[0] in "p0?" and what not in kept}


def _shm_names() -> set[str]:
    """Not those of ViZDoom's engines, which another process may have: the tests of ViZDoom look at them themselves."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else ()
    return {name for name in names if not name.startswith("ViZDoom")}


def _not_mapped_by_others(names: set[str]) -> set[str]:
    """The names in /dev/shm that no process of another test has mapped. A process with parent 1 may be one that this
    test has left, so it does not count as another's."""
    inodes: dict[bytes, str] = {}
    for name in names:
        with contextlib.suppress(OSError):  # it is gone
            inodes[b"%d" % os.stat(f"/dev/shm/{name}").st_ino] = name
    own = {os.getpid(), *_children()}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if inodes else ():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if pid not in own and _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[1] != b"1":
                for line in _read(f"/proc/{pid}/maps").splitlines():
                    if b"/dev/shm/" in line:  # a semaphore has another name there, so compare inodes
                        inodes.pop(line.split()[4], None)
    return set(inodes.values())


def _holdings() -> list[set[object]]:
    from penstock.workers import claims

    return [set(_children()), set(_descriptors()), set(_shm_names()), set(threading.enumerate()), set(claims.held)]


@pytest.fixture(autouse=True)
def nothing_left(_servers: None) -> Iterator[None]:
    """A test leaves no child process, descriptor, thread, name in /dev/shm, or claim on a port or a CPU behind."""
    before = _holdings()
    yield
    if not any(after - then for after, then in zip(_holdings(), before, strict=True)):
        return
    began = time.process_time()
    gc.collect()  # slow, so only if something is left that garbage may hold
    is_slow = time.process_time() - began > 0.02
    left = []
    for pid in _children() - before[0]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            left.append(psutil.Process(pid))
    psutil.wait_procs(left, timeout=scaled(2, 10))  # daily, other tests use the CPUs too
    for thread in set(threading.enumerate()) - before[3]:
        thread.join(scaled(2, 10))  # it may be about to end
    names, deadline = _not_mapped_by_others(_shm_names() - before[2]), time.monotonic() + 30
    while names and time.monotonic() < deadline:
        time.sleep(0.2)  # a test in another process may be about to map it, or to remove it
        names = _not_mapped_by_others(names & _shm_names())
    kinds = ("processes", "descriptors", "names in /dev/shm", "threads", "claims")
    for kind, after, then in zip(kinds, _holdings(), before, strict=True):
        assert (names if kind == "names in /dev/shm" else after - then) == set(), f"{kind} left behind"
    if is_slow:
        gc.freeze()  # the next collection need not search what tests have imported since


@pytest.fixture
def daily_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Daily, every process of `multiprocessing` is a fork. One of "spawn" or "forkserver" imports all modules again."""
    if not FULL:
        fork = multiprocessing.get_context("fork")
        monkeypatch.setattr(multiprocessing, "get_context", lambda method=None: fork)
