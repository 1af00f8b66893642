"""A wire within one process: packets are function calls, and one thread keeps the time of all wires."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

from penstock.control.messages import plain_copy
from penstock.control.wire import TICK_SECONDS, Header, Transport, Wire

_log = logging.getLogger("penstock")


class LocalHub:
    """The wires of this process that reach each other. Its thread runs for as long as one of them is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wires: dict[str, Wire] = {}
        self._numbers = iter(range(2**62))
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def wire(self, address: str | None = None) -> Wire:
        """A new wire, at `address` or at a new one."""
        return Wire(LocalTransport(self, address or f"local://{next(self._numbers)}"))

    def carry(self, address: str, header: Header, packed: object, route: str) -> None:
        """Bring one packet to `address`. Tests override this."""
        wire = self._wires.get(address)
        if wire is not None:
            wire.deliver(header, packed, route)

    def add(self, address: str, wire: Wire) -> None:
        """A wire has opened."""
        with self._lock:
            self._wires[address] = wire
            if self._thread is None:
                self._ended = threading.Event()
                self._thread = threading.Thread(target=self._run, args=(self._ended,), name="local wires", daemon=True)
                self._thread.start()

    def remove(self, address: str) -> None:
        """A wire has closed."""
        with self._lock:
            self._wires.pop(address, None)
            thread = None if self._wires else self._thread
            if thread is not None:
                self._thread = None
                self._ended.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(TICK_SECONDS):
            with self._lock:
                wires = list(self._wires.values())
            for wire in wires:
                try:
                    wire.tick()
                except Exception:
                    _log.exception("the thread of the local wires has failed: this wire is closed")
                    wire.close()


@dataclass(frozen=True)
class LocalConnection:
    """What a thread needs to join a trial: its name, the address of the name table, and the wires of this process."""

    trial: str
    address: str
    hub: LocalHub

    def wire(self) -> Wire:
        """A new wire."""
        return self.hub.wire()


class LocalTransport(Transport):
    """Calls the other wire's `deliver`, in the thread of the sender."""

    def __init__(self, hub: LocalHub, address: str) -> None:
        self.address, self._hub = address, hub

    def start(self, wire: Wire) -> None:
        self._hub.add(self.address, wire)

    def pack(self, message: object) -> Any:
        return plain_copy(message)

    def unpack(self, packed: Any) -> Any:
        return packed

    def send(self, route: Any, header: Header, packed: Any) -> None:
        self._hub.carry(route, header, packed, self.address)

    def disconnect(self, address: str) -> None:
        pass

    def close(self) -> None:
        self._hub.remove(self.address)
