"""A wire over Ray: packets are calls of named actors. One thread of each process carries the packets of its wires."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray import exceptions as ray_errors

from penstock.control import messages
from penstock.control.wire import TICK_SECONDS, Header, Transport, Wire

_log = logging.getLogger("penstock")

NAMESPACE = "penstock"
_MOST_CALLS = 4  # to one actor that have not returned. Until one returns, packets wait and go together
_MOST_PACKETS = 64  # in one call
_MOST_WAITING = 10_000  # packets to one actor. More are dropped, and the wire sends them again
_LARGE = 10_000  # bytes from which Ray is given an array, which it does not copy
_LINGER_SECONDS = 0.5  # how long closing waits until what was sent has arrived

Packet = tuple[str, Header, Any, str]  # to which wire, header, message, from which wire


@dataclass(frozen=True)
class RayConnection:
    """What a process of a Ray cluster needs to join a trial: its name, and the address of the name table."""

    trial: str
    address: str = ""

    def wire(self) -> Wire:
        """A new wire."""
        return Wire(RayTransport(RayHub.of_this_process()))


class PostBox:
    """An actor that keeps packets for a process that is no actor, until it takes them."""

    def __init__(self) -> None:
        self._packets: list[Packet] = []
        self._has_packets = asyncio.Event()

    async def put(self, packets: list[Packet]) -> None:
        """Another process sends packets."""
        self._packets += packets
        self._has_packets.set()

    async def take(self) -> list[Packet]:
        """The packets that have come, as soon as there are any."""
        await self._has_packets.wait()
        self._has_packets.clear()
        packets, self._packets = self._packets, []
        return packets


@dataclass
class _Actor:
    """Another process, as the thread that sends to it sees it."""

    handle: Any = None
    n_calls: int = 0
    waiting: deque[Packet] = field(default_factory=deque)


class RayHub:
    """The wires of this process, and the thread that serves them. In an actor it runs until the process ends, elsewhere
    for as long as a wire is open."""

    _here: RayHub | None = None
    _lock = threading.RLock()

    def __init__(self, name: str | None) -> None:
        self._box: Any = None
        self.name = name or new_name("post box")
        if name is None:
            options = {"name": self.name, "namespace": NAMESPACE, "num_cpus": 0, "enable_task_events": False}
            self._box = ray.remote(PostBox).options(**options).remote()
        self._wires: dict[str, Wire] = {}
        self._numbers = iter(range(2**62))
        self._actors: dict[str, _Actor] = {}
        self._flushes: list[threading.Event] = []
        # ("send", packet), ("mail", packets), ("returned", name, exception), ("failed", exception), ("flush", event),
        # or None: the end
        self._events: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ray wires", daemon=True)
        self._thread.start()
        self._take()

    @classmethod
    def of_this_process(cls, name: str | None = None) -> RayHub:
        """The hub of this process; an actor gives its `name` at first."""
        with cls._lock:
            if cls._here is None:
                cls._here = cls(name)
            return cls._here

    # ---- for every thread ------------------------------------------------------------------

    def new_address(self) -> str:
        """The address of a new wire."""
        return f"{self.name}/{next(self._numbers)}"

    def add(self, address: str, wire: Wire) -> None:
        """A wire has opened."""
        with self._lock:
            self._wires[address] = wire

    def remove(self, address: str) -> None:
        """A wire has closed."""
        with self._lock:
            self._wires.pop(address, None)
            if self._wires or self._box is None or RayHub._here is not self:
                return
            RayHub._here = None
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def send(self, packet: Packet) -> None:
        """Send a packet, soon."""
        self._events.put(("send", packet))

    def flush(self) -> None:
        """Wait until what was sent has arrived, for `_LINGER_SECONDS` at most."""
        has_arrived = threading.Event()
        self._events.put(("flush", has_arrived))
        has_arrived.wait(_LINGER_SECONDS)

    def receive(self, packets: list[Packet]) -> None:
        """Packets have come."""
        self._events.put(("mail", packets))

    # ---- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
            self._linger()
        except Exception:
            _log.exception("the thread of the Ray wires has failed: they are closed")
            with self._lock:
                RayHub._here = None if RayHub._here is self else RayHub._here
            for wire in self._open_wires():
                wire.close()
        finally:
            if self._box is not None and ray.is_initialized():
                ray.kill(self._box)

    def _serve(self) -> None:
        next_tick = time.monotonic()
        while self._handle_events(next_tick):
            self._send_waiting()
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_SECONDS
                for wire in self._open_wires():
                    wire.tick()

    def _linger(self) -> None:
        """Send the last packets."""
        deadline = time.monotonic() + _LINGER_SECONDS
        while self._actors and ray.is_initialized() and time.monotonic() < deadline:
            self._send_waiting()
            self._handle_events(time.monotonic() + TICK_SECONDS)

    def _open_wires(self) -> list[Wire]:
        with self._lock:
            return list(self._wires.values())

    def _handle_events(self, until: float) -> bool:
        """Handle the events that are there; wait for one. Returns False at the end."""
        wait = max(0.0, until - time.monotonic())
        try:
            event = self._events.get(timeout=wait) if wait else self._events.get_nowait()
            for _ in range(1000):
                if event is None:
                    return False
                self._handle(event)
                event = self._events.get_nowait()
        except queue.Empty:
            pass
        return True

    def _handle(self, event: tuple[Any, ...]) -> None:
        if event[0] == "send":
            waiting = self._actors.setdefault(event[1][0].rpartition("/")[0], _Actor()).waiting
            if len(waiting) < _MOST_WAITING:
                waiting.append(event[1])
        elif event[0] == "mail":
            for address, header, packed, route in event[1]:
                wire = self._wires.get(address)
                if wire is not None:
                    wire.deliver(header, packed, route)
        elif event[0] == "failed":
            raise event[1]
        elif event[0] == "flush":
            self._flushes.append(event[1])
        else:
            _, name, error = event
            self._actors[name].n_calls -= 1
            if isinstance(error, ray_errors.ActorDiedError):
                self._lose(name)

    def _send_waiting(self) -> None:
        for name, actor in list(self._actors.items()):
            self._send_to(name, actor)
            if not actor.waiting and not actor.n_calls:
                del self._actors[name]
        while self._flushes and not self._actors:
            self._flushes.pop().set()

    def _send_to(self, name: str, actor: _Actor) -> None:
        while actor.waiting and actor.n_calls < _MOST_CALLS:
            try:
                actor.handle = actor.handle or ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:  # there is no such actor any more
                return self._lose(name)
            packets = [actor.waiting.popleft() for _ in range(min(len(actor.waiting), _MOST_PACKETS))]
            actor.n_calls += 1
            call = actor.handle.put.remote(packets).future()
            call.add_done_callback(lambda future: self._events.put(("returned", name, future.exception())))

    def _lose(self, name: str) -> None:
        self._actors[name].waiting.clear()
        for wire in self._open_wires():
            wire.lose(f"{name}/", "its Ray actor has ended")

    def _take(self) -> None:
        if self._box is not None:
            self._box.take.remote().future().add_done_callback(self._taken)

    def _taken(self, future: Any) -> None:
        if future.exception() is None:
            self.receive(future.result())
            self._take()
        else:  # the post box was killed, by this process or by somebody else
            self._events.put(("failed", future.exception()))


class RayTransport(Transport):
    """One wire of a hub."""

    def __init__(self, hub: RayHub) -> None:
        self._hub, self.address = hub, hub.new_address()

    def start(self, wire: Wire) -> None:
        self._hub.add(self.address, wire)

    def pack(self, message: object) -> Any:
        header, *arrays = messages.encode(message)
        return [header, *(np.frombuffer(each, np.uint8) if len(each) > _LARGE else each for each in arrays)]

    def unpack(self, packed: Any) -> Any:
        return messages.decode([each.data if isinstance(each, np.ndarray) else each for each in packed])

    def send(self, route: Any, header: Header, packed: Any) -> None:
        self._hub.send((route, header, packed, self.address))

    def disconnect(self, address: str) -> None:
        pass

    def close(self) -> None:
        self._hub.remove(self.address)


def new_name(purpose: str) -> str:
    """A name for an actor that no other one has."""
    return f"{purpose} {uuid.uuid4().hex[:12]}"
