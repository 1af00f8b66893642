"""Processes that lease ports at a test's word, to be killed at any moment."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.errors import PortLeaseError
from penstock.ports import PortLeases, leases
from penstock.ports.holdings import sweep_lock_files

from .support import BOUND, until

# Processes forked from this one: what a test has set up or replaced here holds in them too, and they start at once.
_FORK = multiprocessing.get_context("fork")

# Binds the port that it is given, says so, and lives until its standard input is closed.
_SERVER = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1])), reuse_port=False):
    print("bound", flush=True)
    sys.stdin.read()
"""


class Peer:
    """A process that leases ports, and holds them until it is told otherwise or killed."""

    def __init__(self, first: Callable[[], None] = lambda: None) -> None:
        self._pipe, theirs = _FORK.Pipe()
        self.process = _FORK.Process(target=_serve, args=(theirs, first), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def ask(self, n: int, ports: range, **options: Any) -> None:
        """Lease `n` of `ports`; `answer` waits for it."""
        self._pipe.send((n, ports.start, ports.stop, options))

    def answer(self) -> list[int]:
        """The ports that were leased. Raises the `PortLeaseError` that it met."""
        assert self._pipe.poll(BOUND), "no answer"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    def lease(self, n: int, ports: range, **options: Any) -> list[int]:
        self.ask(n, ports, **options)
        return self.answer()

    def release(self) -> None:
        """Give all back."""
        self._pipe.send(None)
        assert self.answer() == []

    def fork(self) -> int:
        """Have it fork; returns the process id of its copy, which does nothing. For the caller to kill."""
        self._pipe.send("fork")
        (pid,) = self.answer()
        return pid

    def kill(self) -> None:
        """End it by SIGKILL, and wait for its end."""
        self.process.kill()
        # Not join, which waits for the end of a pipe that forks of it have too.
        until(lambda: self.process.exitcode is not None, "its end")

    def close(self) -> None:
        self.kill()
        self.process.close()
        self._pipe.close()


def _serve(pipe: Any, first: Callable[[], None]) -> None:
    first()
    held: list[PortLeases] = []
    while True:
        order = pipe.recv()
        if order == "fork":
            if (pid := os.fork()) == 0:
                signal.pause()
            pipe.send([pid])
            continue
        if order is None:
            while held:
                held.pop().release()
            pipe.send([])
            continue
        n, start, stop, options = order
        try:
            held.append(leases(n, start, stop, **options))
            pipe.send(held[-1].ports)
        except PortLeaseError as error:
            pipe.send(error)


@contextmanager
def peers(n: int, first: Callable[[], None] = lambda: None) -> Iterator[list[Peer]]:
    """`n` of them, each of which calls `first` to begin with."""
    them: list[Peer] = []
    try:
        them.extend(Peer(first) for _ in range(n))
        yield them
    finally:
        for peer in them:
            peer.close()
        sweep_lock_files()


def all_at_once(them: Sequence[Peer], n: int, ports: range, **options: Any) -> list[int]:
    """Every one of them leases `n`; returns all that they got."""
    for peer in them:
        peer.ask(n, ports, **options)
    return [port for peer in them for port in peer.answer()]


def free_stretch(n: int) -> range:
    """`n` ports in a row of which nobody has one now."""
    with leases(n, consecutive=True) as found:
        return range(found.ports[0], found.ports[-1] + 1)


@contextmanager
def server_at(port: int) -> Iterator[subprocess.Popen[str]]:
    """A program in a session of its own that has bound `port`, and has never heard of leases."""
    with subprocess.Popen(
        [sys.executable, "-I", "-c", _SERVER, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "bound\n"
            yield process
        finally:
            process.kill()


def bind(port: int) -> socket.socket:
    """A socket that listens at `port`, as strictly as there is: without SO_REUSEADDR."""
    server = socket.socket()
    try:
        server.bind(("127.0.0.1", port))
        server.listen()
    except BaseException:
        server.close()
        raise
    return server
