"""The fork server: interrupted starts, a stopped server, a removed socket, and what is left when all are killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, reduction
from pathlib import Path
from traceback import walk_stack
from typing import Any

import psutil
import pytest

from penstock import ParallelSampler, RandomAgent, WorkerDiedError, WorkerTimeoutError
from penstock.buffers.native import COMPILED
from penstock.envs import CountingEnv

from ..scale import scaled
from .support import BOUND, Script, gone_after, until

pytestmark = [pytest.mark.timeout(scaled(600, 90)), pytest.mark.slow]


def sampler_of(**kwargs: Any) -> ParallelSampler:
    return ParallelSampler(CountingEnv, batch_T=4, batch_B=2, n_workers=2, **kwargs)


def fork_server() -> psutil.Process:
    return psutil.Process(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]


class Interruption(Exception):
    """What a signal handler raises."""


def names_on_stack_of(thread: int | None) -> set[str]:
    return {frame.f_code.co_name for frame, _ in walk_stack(sys._current_frames()[thread or 0])}


@contextmanager
def interrupting(name: str, monkeypatch: pytest.MonkeyPatch, n_signals: int = 1) -> Iterator[None]:
    """Signals whose handler raises come when multiprocessing calls `reduction.name`."""
    plain, interrupted, main = getattr(reduction, name), threading.Event(), threading.main_thread().ident

    def handler(*_: Any) -> None:
        interrupted.set()
        raise Interruption

    def interrupt(*args: Any) -> Any:
        if not interrupted.is_set():
            for _ in range(n_signals):
                interrupted.clear()
                os.kill(os.getpid(), signal.SIGALRM)
                assert interrupted.wait(BOUND)
                # The main thread must come back to its wait, and must not close what this start uses.
                until(
                    lambda: "abandon" in (frame.f_code.co_name for frame, _ in walk_stack(sys._current_frames()[main]))
                )
        return plain(*args)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(reduction, name, interrupt)
            yield
        assert interrupted.is_set()
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("n_signals", [1, 3])
@pytest.mark.parametrize("name", ["dump", "sendfds"])  # before and after the connection to the fork server
def test_an_interrupted_start_leaves_the_fork_server_and_other_samplers_alone(
    name: str, n_signals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sampler_of() as other:
        other.initialize(RandomAgent())
        server = fork_server()
        with interrupting(name, monkeypatch, n_signals), sampler_of() as sampler, pytest.raises(Interruption):
            sampler.initialize(RandomAgent())
        assert server == fork_server()
        assert server.is_running()
        assert not [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]
        other.obtain_samples(0)
    with sampler_of() as sampler:
        sampler.initialize(RandomAgent())


@contextmanager
def stopped_server() -> Iterator[None]:
    server = fork_server()
    server.suspend()
    try:
        yield
    finally:
        server.resume()
        # A start that nobody waits for any more ends the process that it gets.
        until(lambda: not [thread for thread in threading.enumerate() if thread.name == "penstock-start"])
        until(lambda: not multiprocessing.active_children())  # reads the exit codes


def test_a_stopped_fork_server_is_named() -> None:
    message = r"worker 0 could not be started within \d+ s: the fork server \(pid \d+\) is stopped .* kill -CONT"
    began = time.monotonic()
    with sampler_of(start_timeout=0.5) as sampler, stopped_server():
        with pytest.raises(WorkerTimeoutError, match=message) as caught:
            sampler.initialize(RandomAgent())
        assert time.monotonic() - began < 10
    assert "\n" not in str(caught.value)


def test_a_worker_that_a_stopped_fork_server_cannot_replace() -> None:
    with sampler_of(start_timeout=0.5, on_worker_failure="restart") as sampler:
        sampler.initialize(RandomAgent())
        with stopped_server():
            os.kill(sampler.worker_pids[0], signal.SIGKILL)
            with pytest.raises(WorkerDiedError) as caught:
                sampler.obtain_samples(0)
    assert "has ended with an unknown exit code (the process that started it does not answer" in str(caught.value)
    assert "worker 0 could not be replaced: worker 0 could not be started within" in str(caught.value)


def test_ctrl_c_ends_the_wait_for_a_stopped_fork_server() -> None:
    with sampler_of() as sampler, stopped_server():
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            sampler.initialize(RandomAgent())
        timer.join()


# Scripts with vector environments: their fork server does not import torch.
REMOVED_SOCKET = """
import shutil
from multiprocessing import forkserver
from penstock.vector import ShmVectorEnv
def make():
    return ShmVectorEnv([CountingEnv] * 2, on_worker_failure="restart")
with make() as first:
    first.reset()
    shutil.rmtree(os.path.dirname(forkserver._forkserver._forkserver_address))
    os.kill(first.worker_pids[0], signal.SIGKILL)
    first.step([0, 0])
    say("replaced", first.n_restarts)
    with make() as second:
        second.reset()
        say("started")
    first.step([0, 0])
say("ended")
"""


def test_a_removed_socket_of_the_fork_server_is_made_again(tmp_path: Path, short_folder: Path) -> None:
    with Script(tmp_path, REMOVED_SOCKET) as script:
        output, errors = script.end(60)
    assert output.splitlines() == ["replaced 1", "started", "ended"], errors
    assert "Traceback" not in errors
    until(lambda: not list(short_folder.glob("pymp-*")), "the end of the folder of sockets")


POOL = """
import multiprocessing
from penstock.vector import ShmVectorEnv
def job(i):
    with ShmVectorEnv([CountingEnv]) as envs:
        envs.reset()
with multiprocessing.get_context("fork").Pool(2) as pool:
    pool.map(job, range(2))
say("ended")
"""


def test_a_process_of_a_pool_leaves_no_socket(tmp_path: Path, short_folder: Path) -> None:
    """`Pool.terminate` kills its processes, and their samplers have no guardian any more."""
    with Script(tmp_path, POOL) as script:
        output, errors = script.end(60)
    assert output == "ended\n", errors
    until(lambda: not list(short_folder.glob("pymp-*")), "the end of the folder of sockets")


GAMES = """
from penstock.vector import ShmVectorEnv
class Game(CountingEnv):
    def __init__(self):
        super().__init__()
        say(subprocess.Popen(["sleep", "600"]).pid)
with ShmVectorEnv([Game] * 2):
    say("ready")
    time.sleep(600)
"""


@pytest.mark.skipif(not COMPILED, reason="needs the compiled part")
def test_main_process_fork_server_and_guardian_killed_together(tmp_path: Path) -> None:
    """What the environments have started ends too."""
    with Script(tmp_path, GAMES) as script:
        games = [int(line[0]) for line in iter(script.line, ["ready"])]
        children = psutil.Process(script.pid).children()
        victims = [
            script.pid,
            *(child.pid for child in children if child.name() == "sh" or "forkserver" in str(child.cmdline())),
        ]
        assert len(victims) == 3
        assert len(games) == 3
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        gone_after(games[1:], time.monotonic(), BOUND)  # the first belongs to the example in the main process
        os.kill(games[0], signal.SIGKILL)
