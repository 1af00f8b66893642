"""Nodes for the tests, and links between them that are cut."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock import SerialSampler
from penstock.distributed.keys import Connection
from penstock.distributed.parameters import ParameterClient
from penstock.distributed.wire import Node

from ..support import until

#: The wires as parameters of a test.
MAKES = ("local", "zmq", pytest.param("ray", marks=pytest.mark.ray))
SAMPLER = partial(SerialSampler, "CartPole-v1", batch_T=8, batch_B=4)
HAS_ZMQ = all(importlib.util.find_spec(name) for name in ("zmq", "msgpack"))
needs_zmq = pytest.mark.skipif(not HAS_ZMQ, reason="the wire over sockets needs pyzmq and msgpack")


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def note(what: str, value: float, limit: float) -> None:
    """Hold `value` to `limit`. `pytest -s` shows it."""
    print(f"\n{what}: {value:.3g}, at most {limit:g}")
    assert value <= limit, what


def need(make: str, request: pytest.FixtureRequest) -> None:
    """Skip the test if this make of wire needs a library that is not installed. Start Ray for the wire over Ray."""
    pytest.importorskip("zmq", reason="a wire needs pyzmq")
    pytest.importorskip("msgpack", reason="a wire needs msgpack")
    if make == "ray":
        request.getfixturevalue("ray_cluster")


def wait_until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    until(condition, seconds=timeout)


def in_four_threads(run: Callable[[int], None]) -> None:
    """Call `run` with 0 to 3, at once, and wait for all."""
    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def newer(client: ParameterClient) -> Any:
    """The next parameters that come."""
    found = list[Any]()

    def comes() -> bool:
        found.append(client.newer())
        return found[-1] is not None

    wait_until(comes, 30)
    return found[-1]


class Proxy:
    """A link to a port of this machine. It is cut again and again: each connection after some bytes, a random number.
    While `is_cut`, it refuses all."""

    def __init__(self, port: int, least: float = 20_000, most: float = 200_000) -> None:
        self._port, self.least, self.most, self._rng = port, least, most, random.Random(port)
        self.is_cut, self.n, self._sockets = False, 0, list[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [self._start(self._accept)]

    def _start(self, run: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        thread.start()
        return thread

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                near, _ = self._listener.accept()
                self.n += 1
                far = socket.socket()
                if self.is_cut or far.connect_ex(("127.0.0.1", self._port)):
                    near.close()
                    far.close()
                    continue
                self._sockets += [near, far]
                left = [self.least + self._rng.random() * (self.most - self.least)]
                self._threads += [self._start(self._pump, *pair, left) for pair in ((near, far), (far, near))]

    def _pump(self, source: socket.socket, target: socket.socket, left: list[float]) -> None:
        with contextlib.suppress(OSError):
            while left[0] > 0 and (data := source.recv(4096)):
                left[0] -= len(data)
                target.sendall(data[: len(data) + int(min(0, left[0]))])
        self._end(source, target)

    def _end(self, *sockets: socket.socket) -> None:
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Cut all connections."""
        self._end(*self._sockets)

    def close(self) -> None:
        self._end(self._listener)
        self._threads[0].join(10)  # it adds no more now
        self._end(*self._sockets)
        for thread in self._threads:
            thread.join(10)
        for each in (self._listener, *self._sockets):
            each.close()


class LateLink:
    """A link to a port of this machine. From `cut` on, its first connection brings nothing, and later ones do. What was
    sent through the first one comes with `bring`, as a system delivers it when a broken network works again."""

    def __init__(self, port: int) -> None:
        self._port, self.is_cut, self.n, self._held = port, False, 0, bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets, self._threads = list[socket.socket](), list[threading.Thread]()
        self._start(self._accept)

    def _start(self, run: Callable[..., None], *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=run, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                near, far = self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [near, far]
                self.n += 1
                self._start(self._pump, near, far, self.n == 1, self._held)
                self._start(self._pump, far, near, self.n == 1, bytearray())

    def _pump(self, source: socket.socket, target: socket.socket, is_first: bool, held: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                if is_first and self.is_cut:
                    held += data
                else:
                    target.sendall(data)
        if not (is_first and self.is_cut):
            for each in (source, target):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def bring(self) -> None:
        """The client has left the first connection."""
        self._threads[1].join(10)
        self._sockets[1].sendall(self._held)

    def close(self) -> None:
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(10)
        for thread in self._threads:
            thread.join(10)
        for each in (self._listener, *self._sockets):
            each.close()


class Wires:
    """Makes nodes, and closes them. Of "cut" ones, all links are cut again and again, and packets come twice."""

    def __init__(self, make: str) -> None:
        self.make, self.opened, self.proxies = make, list[Node](), list[Proxy]()
        self.connection = Connection.make("test/trial")

    def __call__(self) -> Node:
        node = self.connection.wire()
        self.opened.append(node)
        if self.make == "cut":
            self.proxies.append(proxy := Proxy(int(node.address.rpartition(":")[2])))
            node.address = proxy.address
            twice(node)
        return node

    def mend(self) -> None:
        """From now on no link is cut: something large must pass."""
        for proxy in self.proxies:
            proxy.least = proxy.most = 1e12
            proxy.cut()

    def close(self) -> None:
        for node in self.opened:
            node.close()
        for proxy in self.proxies:
            proxy.close()


def twice(node: Node) -> None:
    """From now on `node` sends each packet twice."""
    send = node.send

    def send_twice(*arguments: Any) -> None:
        send(*arguments)
        send(*arguments)

    node.send = send_twice  # type: ignore[method-assign]
