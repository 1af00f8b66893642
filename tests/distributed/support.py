"""Wires of each make for the tests, and one that loses, doubles and delays packets."""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from penstock import SerialSampler
from penstock.distributed.wire import Header, Wire
from penstock.distributed.wire_local import LocalHub

from ..support import until

#: The wires as parameters of a test, and those without Ray, which has no transport of its own.
MAKES = ("local", "zmq", pytest.param("ray", marks=pytest.mark.ray))
TRANSPORTS = ("local", "zmq")
SAMPLER = partial(SerialSampler, "CartPole-v1", batch_T=8, batch_B=4)


def note(what: str, value: float, limit: float) -> None:
    """Hold `value` to `limit`. `pytest -s` shows it."""
    print(f"\n{what}: {value:.3g}, at most {limit:g}")
    assert value <= limit, what


def need(make: str, request: pytest.FixtureRequest) -> None:
    """Skip the test if this make of wire needs a library that is not installed. Start Ray for the wire over Ray."""
    if make == "zmq":
        pytest.importorskip("zmq", reason="the wire over sockets needs pyzmq")
        pytest.importorskip("msgpack", reason="the wire over sockets needs msgpack")
    if make == "ray":
        request.getfixturevalue("ray_cluster")


def wait_until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    until(condition, seconds=timeout)


class FaultyHub(LocalHub):
    """Drops and doubles packets, and delays a third of them, so that they overtake each other."""

    def __init__(self, drop: float = 0.3, double: float = 0.3, delay: float = 0.02) -> None:
        super().__init__()
        self.drop, self.double, self.delay = drop, double, delay
        self.n_dropped = 0
        self._rng = random.Random(0)
        self._late: list[tuple[float, int, tuple[Any, ...]]] = []
        self._number = 0
        self._late_changed = threading.Condition()
        self._is_closed = False
        self._carrier = threading.Thread(target=self._bring, name="late packets", daemon=True)
        self._carrier.start()

    def carry(self, address: str, header: Header, packed: Any, route: str) -> None:
        with self._late_changed:
            copies = (self._rng.random() >= self.drop) + (self._rng.random() < self.double)
            self.n_dropped += copies == 0
            waits = [self._rng.random() * self.delay if self._rng.random() < 0.3 else 0.0 for _ in range(copies)]
            for wait in waits:
                self._number += 1
                heapq.heappush(self._late, (time.monotonic() + wait, self._number, (address, header, packed, route)))
            self._late_changed.notify()

    def _bring(self) -> None:
        while True:
            with self._late_changed:
                if self._is_closed:
                    return
                wait = self._late[0][0] - time.monotonic() if self._late else 1.0
                if wait > 0:
                    self._late_changed.wait(wait)
                    continue
                packet = heapq.heappop(self._late)[2]
            super().carry(*packet)

    def close(self) -> None:
        with self._late_changed:
            self._is_closed = True
            self._late_changed.notify()
        self._carrier.join()


class Wires:
    """Makes wires of one kind, and closes them."""

    def __init__(self, make: str) -> None:
        self.make, self.opened = make, list[Wire]()
        self.hub = FaultyHub() if make == "faulty" else LocalHub()
        self._patch = pytest.MonkeyPatch()
        if make == "faulty":  # so many packets are lost that the usual times would take minutes
            probes = ("wire._FIRST_PROBE", "wire._LAST_PROBE")
            for name in (*probes, "name_table._PATIENCE_SECONDS", "parameters._PATIENCE_SECONDS"):
                self._patch.setattr(f"penstock.distributed.{name}", 0.05)
        if make == "zmq":
            from penstock.distributed.keys import Connection

            self.connection = Connection.make("test/trial")

    def __call__(self) -> Wire:
        wire = self.connection.wire() if self.make == "zmq" else self.hub.wire()
        self.opened.append(wire)
        return wire

    def close(self) -> None:
        self._patch.undo()
        for wire in self.opened:
            wire.close()
        if isinstance(self.hub, FaultyHub):
            self.hub.close()
