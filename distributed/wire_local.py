"""A wire within one process: packets are function calls."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

from penstock.distributed.messages import plain_copy
from penstock.distributed.wire import TICK_SECONDS, Header, Wire

_log = logging.getLogger("penstock")


class LocalHub:
    """The wires of this process that reach each other."""

    def __init__(self) -> None:
        self.wires: dict[str, Wire] = {}
        self._numbers = iter(range(2**62))

    def wire(self) -> Wire:
        """A new wire, at a new address."""
        return Wire(LocalTransport(self, f"local://{next(self._numbers)}"))

    def carry(self, address: str, header: Header, packed: object, route: str) -> None:
        """Bring one packet to `address`. Tests override this."""
        wire = self.wires.get(address)
        if wire is not None:
            wire.deliver(header, packed, route)


@dataclass(frozen=True)
class LocalConnection:
    """What a thread needs to join a trial: its name, the address of the name table, and the wires of this process."""

    trial: str
    address: str
    hub: LocalHub

    def wire(self, port: int = 0) -> Wire:
        """A new wire, which has no port."""
        return self.hub.wire()


class LocalTransport:
    """Calls the other wire's `deliver`, in the thread of the sender. Its own thread keeps the time."""

    fan = 2**62  # no limit: a message stays in this process
    pack = pack_once = staticmethod(plain_copy)

    def __init__(self, hub: LocalHub, address: str) -> None:
        self.address, self._hub = address, hub
        self._ended = threading.Event()

    def start(self, wire: Wire) -> None:
        self._hub.wires[self.address] = wire
        self._thread = threading.Thread(target=self._run, args=(wire,), name="local wire", daemon=True)
        self._thread.start()

    def _run(self, wire: Wire) -> None:
        try:
            while not self._ended.wait(TICK_SECONDS):
                wire.tick()
        except Exception:
            _log.exception("the thread of a wire has failed: the wire is closed")
            wire.close()

    def unpack(self, packed: Any) -> Any:
        return packed

    def send(self, route: Any, header: Header, packed: Any) -> None:
        self._hub.carry(route, header, packed, self.address)

    def disconnect(self, address: str) -> None:
        pass

    def attend(self, is_done: object, until: float) -> None:
        pass

    def close(self) -> None:
        self._hub.wires.pop(self.address, None)
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
