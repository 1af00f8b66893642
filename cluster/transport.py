"""The part of a wire that differs between threads and sockets: a transport, which carries packets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.cluster.wire import Wire

# The kinds of packets. From a peer to an inbox:
#   ASK: a request. TELL: a message, whose reply says that it was taken. PROBE: has this request arrived?
# Back to the peer:
#   REPLY, ERROR: the answer. PENDING: it has arrived, and has no answer yet. MISSING: it has not arrived. GONE: there
#   is no such inbox.
ASK, TELL, REPLY, ERROR, PROBE, PENDING, MISSING, GONE = range(8)

TICK_SECONDS = 0.05

# kind, wire id of the receiver ("" for any), inbox, sender, number of the request, oldest number without an answer
Header = tuple[int, str, str, str, int, int]
_TYPES = [int, str, str, str, int, int]


class Transport(ABC):
    """Carries packets between wires. It may lose, duplicate and delay them."""

    #: Where others reach this wire.
    address: str

    @abstractmethod
    def start(self, wire: Wire) -> None:
        """From now on call `wire.deliver` for each packet, in any thread, and `wire.tick` every `TICK_SECONDS`."""

    @abstractmethod
    def pack(self, message: Any, /) -> Any:
        """`message` as it is sent. Raises `BadMessageError`."""

    @abstractmethod
    def unpack(self, packed: Any, /) -> Any:
        """The message in `packed`. Raises `BadMessageError`."""

    @abstractmethod
    def send(self, route: Any, header: Header, packed: Any) -> None:
        """Send a packet to an address, or back on the route on which a packet came. It never blocks."""

    @abstractmethod
    def disconnect(self, address: str) -> None:
        """Nothing more will be sent to `address` for now."""

    def attend(self, is_done: Callable[[], Any], until: float) -> None:
        """In a thread that waits: receive packets here until `is_done()`, or until this time by `time.monotonic()`, so
        that no other thread must wake this one. It may return earlier."""

    @abstractmethod
    def close(self) -> None:
        """Send the packets that wait, and end the thread."""


def is_header(header: Any) -> bool:
    """Whether this is a header, and not something that a stranger has sent."""
    return (
        isinstance(header, list | tuple)
        and [*map(type, header)] == _TYPES
        and ASK <= header[0] <= GONE
        and 0 <= header[5] <= header[4] < 2**62
        and len(header[2]) + len(header[3]) < 1000
    )
