"""Processes that lease ports when a test asks them to. A test may kill them at any moment."""

from __future__ import annotations

import multiprocessing
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.errors import PortLeaseError
from penstock.games import PortLeases, lease_port, leases
from penstock.workers import claims

from ..support import BOUND

# Forks start fast, and they inherit what a test has set up or patched.
_FORK = multiprocessing.get_context("fork")

# Binds its port, prints a line, and ends when its standard input is closed.
_SERVER = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1])), reuse_port=False):
    print("bound", flush=True)
    sys.stdin.read()
"""


class Peer:
    """A process that leases ports, and keeps them until `release` or `kill`."""

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
        """Ask it to lease `n` of `ports`. `answer` waits for the result."""
        self._pipe.send((n, ports.start, ports.stop, options))

    def answer(self) -> list[int]:
        """The ports that it has leased. Raises the `PortLeaseError` that it has raised."""
        assert self._pipe.poll(BOUND), "no answer"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    def lease(self, n: int, ports: range, **options: Any) -> list[int]:
        self.ask(n, ports, **options)
        return self.answer()

    def release(self) -> None:
        """Release all leases."""
        self._pipe.send(None)
        assert self.answer() == []

    def kill(self) -> None:
        """Kill it with SIGKILL and wait until it has ended."""
        self.process.kill()
        self.process.join(BOUND)
        assert self.process.exitcode is not None

    def close(self) -> None:
        self.kill()
        self.process.close()
        self._pipe.close()


def _serve(pipe: Any, first: Callable[[], None]) -> None:
    first()
    taken: list[PortLeases] = []
    while True:
        request = pipe.recv()
        if request is None:
            while taken:
                taken.pop().release()
            pipe.send([])
            continue
        n, start, stop, options = request
        try:
            taken.append(leases(n, start, stop, **options))
            pipe.send(taken[-1].ports)
        except PortLeaseError as error:
            pipe.send(error)


@contextmanager
def peers(n: int, first: Callable[[], None] = lambda: None) -> Iterator[list[Peer]]:
    """Start `n` peers. Each calls `first` before anything else."""
    them: list[Peer] = []
    try:
        them.extend(Peer(first) for _ in range(n))
        yield them
    finally:
        for peer in them:
            peer.close()
        remove_stale()


def remove_stale() -> None:
    """Remove the lock files of killed processes, as the first lease of another process does."""
    claims._swept.clear()
    lease_port().release()


def all_at_once(them: Sequence[Peer], n: int, ports: range, **options: Any) -> list[int]:
    """Each peer leases `n` ports, all at the same time. Returns all these ports."""
    for peer in them:
        peer.ask(n, ports, **options)
    return [port for peer in them for port in peer.answer()]


def free_stretch(n: int) -> range:
    """`n` ports in a row that are free now."""
    with leases(n, consecutive=True) as found:
        return range(found.ports[0], found.ports[-1] + 1)


@contextmanager
def server_at(port: int) -> Iterator[subprocess.Popen[str]]:
    """A program in a separate session that has bound `port` and does not use leases."""
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
    """A socket that listens at `port`. It does not set SO_REUSEADDR."""
    server = socket.socket()
    try:
        server.bind(("127.0.0.1", port))
        server.listen()
    except BaseException:
        server.close()
        raise
    return server
