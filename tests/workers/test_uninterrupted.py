"""Work that signal handlers do not interrupt, and starts beside a fork server that ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from traceback import extract_stack
from typing import Any

import pytest

from penstock.workers.uninterrupted import _Work, uninterrupted

from ..process.support import BOUND, Script, until


class Interruption(Exception):
    """What the signal handler raises."""


@pytest.fixture
def interrupted() -> Iterator[threading.Event]:
    """Set by the handler of SIGALRM, before it raises."""
    event = threading.Event()

    def handler(*_: Any) -> None:
        event.set()
        raise Interruption

    before = signal.signal(signal.SIGALRM, handler)
    yield event
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("n_signals", [1, 2, 4])
def test_the_caller_gets_the_exception_when_the_work_has_ended_and_is_undone(
    n_signals: int, interrupted: threading.Event
) -> None:
    events, main = [], threading.main_thread().ident
    assert main is not None

    def is_waiting() -> bool:
        names = [frame.name for frame in extract_stack(sys._current_frames()[main])]
        return names[-1] == "wait" and ("abandon" in names or not interrupted.is_set())

    def work() -> str:
        for _ in range(n_signals):
            until(is_waiting)
            interrupted.clear()
            os.kill(os.getpid(), signal.SIGALRM)
            assert interrupted.wait(BOUND)
        until(is_waiting)
        events.append("worked")
        return "result"

    with pytest.raises(Interruption):
        uninterrupted(work, undo=events.append)
    assert events == ["worked", "result"]


def test_work_of_a_thread_that_has_not_begun_never_begins(
    interrupted: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, the exception may come before the new thread runs for the first time."""
    events: list[str] = []
    left = threading.Event()
    threads: list[threading.Thread] = []
    plain = _Work.run

    def run(self: Any) -> None:
        threads.append(self)
        assert left.wait(BOUND)
        plain(self)

    def start(self: Any) -> None:
        threading.Thread.start(self)
        os.kill(os.getpid(), signal.SIGALRM)
        assert interrupted.wait(BOUND)

    monkeypatch.setattr(_Work, "run", run)
    monkeypatch.setattr(_Work, "start", start)
    with pytest.raises(Interruption):
        uninterrupted(lambda: events.append("worked"))
    left.set()
    threads[0].join()
    assert events == []


# The fork server of the tests must live, so a script ends its own one.
REFUSED = """
import socket
from multiprocessing import forkserver
from penstock.vector import ShmVectorEnv
with ShmVectorEnv([CountingEnv]):
    server = forkserver._forkserver
    ended, address = server._forkserver_pid, server._forkserver_address
try:
    while True:  # a connection that closes early ends the fork server
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address)
except ConnectionRefusedError:
    pass
with ShmVectorEnv([CountingEnv]) as envs:
    envs.reset()
say("started", server._forkserver_pid != ended, os.path.exists(f"/proc/{ended}"))
"""


@pytest.mark.usefixtures("starter")
def test_a_start_that_the_ending_fork_server_refuses_is_tried_again(tmp_path: Path) -> None:
    with Script(tmp_path, REFUSED) as script:
        output, errors = script.end(BOUND)
    assert output == "started True False\n", errors
