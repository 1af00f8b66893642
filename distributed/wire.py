"""A wire: inboxes with names, and requests that are executed exactly once.

The transport may lose, duplicate and delay packets, and lose connections. The sender keeps a request until it has the
reply. If none comes, it sends a probe. The other side then answers that it is at work, or sends its reply again. If it
has never seen the request, it says so, and the sender sends it again. The receiver remembers the requests and replies
of each sender for as long as the sender may need them. So a request is executed once, however often it arrives.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.distributed.messages import BadMessageError
from penstock.errors import ClusterError, NoReplyError, PeerLostError, RequestError

_log = logging.getLogger("penstock")

# The kinds of packets. From a peer to an inbox:
#   ASK: a request. PROBE: has this request arrived?
# Back to the peer:
#   REPLY, ERROR: the answer. PENDING: it has arrived, and has no answer yet. MISSING: it has not arrived. GONE: there
#   is no such inbox.
ASK, REPLY, ERROR, PROBE, PENDING, MISSING, GONE = range(7)

TICK_SECONDS = 0.05
LOST_SECONDS = 5.0  # of silence, after which another side counts as lost

# kind, wire id of the receiver ("" for any), inbox, sender, number of the request, oldest number without an answer
Header = tuple[int, str, str, str, int, int]
_TYPES = [int, str, str, str, int, int]


class Transport(Protocol):
    """Carries packets between wires. It may lose, duplicate and delay them.

    After `start` it calls `wire.deliver` for each packet, in any thread, and `wire.tick` every `TICK_SECONDS`.
    """

    address: str  #: where others reach this wire
    fan: int  #: to how many others it sends a large message, before these send it on

    def start(self, wire: Wire) -> None: ...

    def pack(self, message: object, /) -> Any:
        """`message` as it is sent. Raises `BadMessageError`."""

    def pack_once(self, message: object, /) -> Any:
        """`message` as it is sent to many: their transfers share the memory."""

    def unpack(self, packed: Any, /) -> Any:
        """The message in `packed`. Raises `BadMessageError`."""

    def send(self, route: Any, header: Header, packed: Any) -> None:
        """Send a packet to an address, or back on the route on which a packet came. It never blocks."""

    def disconnect(self, address: str) -> None:
        """Nothing more will be sent to `address` for now."""

    def attend(self, is_done: Callable[[], Any], until: float) -> None:
        """In a thread that waits: receive packets here until `is_done()`, or until this time by `time.monotonic()`, so
        that no other thread must wake this one. It may return earlier."""

    def close(self) -> None:
        """Send the packets that wait, and end the thread."""


def is_header(header: object) -> bool:
    """Whether this is a header, and not something that a stranger has sent."""
    return (
        isinstance(header, list | tuple)
        and [*map(type, header)] == _TYPES
        and ASK <= header[0] <= GONE
        and 0 <= header[5] <= header[4] < 2**62
        and len(header[2]) + len(header[3]) < 1000
    )


class Answer(Future[Any]):
    """What comes back for one request. The thread that waits for it receives packets meanwhile."""

    packed: Any = None  #: the reply, as it came

    def __init__(self, transport: Transport) -> None:
        super().__init__()
        self._transport = transport

    def cancel(self) -> bool:
        return False  # the request is on its way

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has come, for `timeout` seconds. Returns whether it has."""
        if not self.done():
            until = float("inf") if timeout is None else time.monotonic() + timeout
            self._transport.attend(self.done, until)
            if not self.done():  # another thread receives
                wait([self], None if timeout is None else until - time.monotonic())
        return self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.wait(timeout)
        return super().exception(0)

    def result(self, timeout: float | None = None) -> Any:
        self.wait(timeout)
        return super().result(0)


_FIRST_PROBE, _LAST_PROBE = 0.25, 1.0  # seconds without a reply until the first probe, and between later ones


@dataclass
class _Request:
    future: Answer
    packed: Any
    deadline: float
    probe_at: float
    interval: float = _FIRST_PROBE


class Peer:
    """An inbox of another wire. Make it with `names.peer(key)` or `wire.reach(...)`.

    If that wire is closed and another one opens an inbox with the same name, make a new peer.
    """

    def __init__(self, wire: Wire, name: str, address: str, target: str, lost_after: float) -> None:
        self.name, self.address = name, address
        self._wire, self._target, self._lost_after = wire, target, lost_after
        self._id = f"{wire.id}.{next(wire.numbers)}"
        self._requests: dict[int, _Request] = {}
        self._next = 0
        self._silent_since: float | None = None  # when the first probe was sent that nothing has answered
        self._lost: str | None = None

    @property
    def place(self) -> list[str]:
        """Address, wire id and name of the inbox: what the name table holds."""
        return [self.address, self._target, self.name]

    @property
    def is_dead(self) -> bool:
        """Whether the other side is known to have ended, or was silent for too long."""
        return self._lost is not None

    @property
    def is_silent(self) -> bool:
        """Whether it was asked again and again for some seconds, and nothing has come back."""
        since = self._silent_since
        return bool(self._requests) and since is not None and time.monotonic() - since > LOST_SECONDS

    @property
    def n_waiting(self) -> int:
        """How many requests have no answer yet."""
        return len(self._requests)

    def ask(self, message: object, timeout: float, *, patience: float = _FIRST_PROBE) -> Answer:
        """Send a request. The future gets the reply, or `NoReplyError` after `timeout` seconds, `PeerLostError`, or
        `RequestError` with what the other side reported. After `patience` seconds, it begins to ask whether the request
        has arrived. Raises `BadMessageError` if `message` cannot be sent, and `PeerLostError` if the other side has
        ended."""
        transport = self._wire.transport
        future, packed, now = Answer(transport), transport.pack(message), time.monotonic()
        with self._wire.lock:
            if self._lost is not None:
                raise PeerLostError(self._lost)
            if not self._requests:
                self._silent_since = None  # nothing was expected
            number, self._next = self._next, self._next + 1
            self._requests[number] = _Request(future, packed, now + timeout, now + patience, patience)
        self._send(ASK, number, packed)
        return future

    def lose(self, reason: str) -> None:
        """The other side has ended: fail all requests with `PeerLostError`."""
        with self._wire.lock:
            if self._lost is not None:
                return
            self._lost = f"{self.name} is lost: {reason}"
            requests, self._requests = self._requests, {}
        self._wire.forget(self)
        for request in requests.values():
            request.future.set_exception(PeerLostError(self._lost))

    def _send(self, kind: int, number: int, packed: object = None) -> None:
        with self._wire.lock:
            oldest = next(iter(self._requests), number)  # the requests are in order
            header = kind, self._target, self.name, self._id, number, min(oldest, number)
        self._wire.transport.send(self.address, header, packed)

    def release(self) -> None:
        """This peer is not needed any more."""
        self.lose("it was released")

    def heard(self, kind: int, number: int, packed: object) -> None:
        """A packet has come back from the other side."""
        self._silent_since = None
        if kind == GONE:
            return self.lose("it has closed its inbox, or another process has its address now")
        with self._wire.lock:
            request = self._requests.get(number)
            if request is None:  # it was answered before, or its time was up
                return None
            if kind in (REPLY, ERROR):
                del self._requests[number]
        if kind == MISSING:
            self._send(ASK, number, request.packed)
        elif kind != PENDING:
            self._finish(request.future, kind, packed)
        return None

    def _finish(self, future: Answer, kind: int, packed: Any) -> None:
        try:
            message = self._wire.transport.unpack(packed)
        except BadMessageError as error:
            self._wire.count("refused")
            future.set_exception(error)
        else:
            if kind == REPLY:
                future.packed = packed
                future.set_result(message)
            else:
                future.set_exception(RequestError(f"{self.name}: {message}"))

    def tick(self, now: float) -> None:
        """Send probes that are due, and fail requests whose time is up."""
        late, probes = [], []
        with self._wire.lock:
            for number, request in list(self._requests.items()):
                if request.deadline <= now:
                    late.append(self._requests.pop(number))
                elif request.probe_at <= now:
                    request.interval = max(request.interval, min(request.interval * 2, _LAST_PROBE))
                    request.probe_at = now + request.interval
                    probes.append(number)
        for request in late:
            request.future.set_exception(
                NoReplyError(f"{self.name} did not answer in time: it may be busy. Use a longer timeout")
            )
        if probes and self._silent_since is None:
            self._silent_since = now
        if self._requests and self._silent_since is not None and now - self._silent_since > self._lost_after:
            self.lose(f"it was silent for {self._lost_after:g} s")
        for number in probes if self._lost is None else ():
            self._send(PROBE, number)


_MOST_LETTERS = 10_000  # in one inbox. More are not accepted, and the senders send them again
_FORGET_SECONDS = 600.0  # an inbox forgets a sender that was silent for so long


@dataclass
class _Sender:
    """What an inbox remembers of one sender."""

    route: Any  # the way back
    heard: float  # when its last packet came
    done: int = 0  # it has the answers to all requests below this number
    replies: dict[int, tuple[int, Any] | None] = field(default_factory=dict)  # to its other requests; None: not yet


class Letter:
    """A request in an inbox. The receiver calls `reply` or `fail` once, at any time, in any thread."""

    def __init__(self, inbox: Inbox, sender: str, number: int, message: object) -> None:
        self.message: Any = message
        self.sender = sender
        self._inbox, self._number = inbox, number
        self.is_answered = False  #: whether `reply` or `fail` was called

    def reply(self, message: object = None) -> None:
        """Send the result. Raises `BadMessageError` if it cannot cross a wire."""
        self._answer(REPLY, self._inbox.wire.transport.pack(message))

    def reply_packed(self, packed: object) -> None:
        """Send what `transport.pack_once`, or `packed` of an `Answer`, has: many letters may share it."""
        self._answer(REPLY, packed)

    def fail(self, reason: str) -> None:
        """Say why there is no result: the sender gets a `RequestError`."""
        self._answer(ERROR, self._inbox.wire.transport.pack(reason[:20_000]))

    @property
    def command(self) -> str | None:
        """The `command` in the message."""
        command = self.message.get("command") if isinstance(self.message, dict) else None
        return command if isinstance(command, str) else None

    def answer_with(self, handlers: Mapping[str, Callable[..., Any]]) -> None:
        """Call the handler for `command`, with `kwargs` of the message. Reply with its result, or fail with what it
        raises."""
        command = self.command
        if command is None or command not in handlers:
            known = ", ".join(sorted(handlers)) or "none"
            return self.fail(f"there is no command {command!r}; the commands are {known}")
        try:
            self.reply(handlers[command](**self.message.get("kwargs", {})))
        except RequestError as error:
            self.fail(str(error))
        except Exception as error:  # the user's handler may raise anything
            self.fail(f"{command} raised {type(error).__name__}: {error}\n{traceback.format_exc()}")
        return None

    def _answer(self, kind: int, packed: object) -> None:
        if self.is_answered:
            raise ClusterError(f"inbox {self._inbox.name}: this letter was answered already")
        self.is_answered = True
        self._inbox.answer(self.sender, self._number, kind, packed)


class Inbox:
    """The requests and messages that arrive under one name, on one wire. With a `handler`, a thread of the wire calls
    it for each letter, and it must not block. Otherwise they wait until somebody receives them."""

    def __init__(self, wire: Wire, name: str, handler: Callable[[Letter], None] | None = None) -> None:
        self.wire, self.name, self._handler = wire, name, handler
        self._letters: queue.SimpleQueue[Letter | None] = queue.SimpleQueue()
        self._senders: dict[str, _Sender] = {}
        self.is_closed = False

    def __len__(self) -> int:
        return self._letters.qsize()

    def receive(self, timeout: float | None = None) -> Letter | None:
        """The next letter, or None after `timeout` seconds, or if the inbox was closed."""
        if self.is_closed:
            return None
        if timeout is None:  # maybe a long wait: leave the packets to the threads that wait for an answer
            return self._letters.get()
        until = time.monotonic() + timeout
        if timeout > 0 and not len(self):
            self.wire.transport.attend(self._letters.qsize, until)
        left = until - time.monotonic()
        try:
            return self._letters.get(timeout=left) if left > 0 else self._letters.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """Accept no more letters. Senders of requests without a reply learn that the inbox is gone."""
        self.is_closed = True
        with self.wire.lock:
            self.wire.inboxes.pop(self.name, None)
        self._letters.put(None)

    def deliver(self, header: Header, packed: object, route: object) -> None:
        """A packet of a sender has come."""
        kind, _, _, sender_id, number, done = header
        with self.wire.lock:
            sender = self._senders.get(sender_id)
            if sender is None:
                self._senders[sender_id] = sender = _Sender(route, 0.0)
            sender.route, sender.heard = route, time.monotonic()
            # Usually few numbers, but a stranger may send any.
            for old in range(sender.done, done) if done - sender.done < 1000 else list(sender.replies):
                if old < done:
                    sender.replies.pop(old, None)
            sender.done = max(sender.done, done)
            is_known = number < sender.done or number in sender.replies
            reply = sender.replies.get(number)
            is_new = not is_known and kind != PROBE and len(self) < _MOST_LETTERS
            if is_new:
                sender.replies[number] = None
        if is_new:
            self._accept(sender_id, number, packed)
        elif reply is not None:
            self.wire.send_back(route, *reply, header)
        elif kind == PROBE:
            self.wire.send_back(route, PENDING if is_known else MISSING, None, header)

    def _accept(self, sender_id: str, number: int, packed: object) -> None:
        try:
            letter = Letter(self, sender_id, number, self.wire.transport.unpack(packed))
        except BadMessageError as error:
            self.wire.count("refused")
            self.answer(sender_id, number, ERROR, self.wire.transport.pack(str(error)))
        else:
            try:
                (self._handler or self._letters.put)(letter)
            except Exception as error:  # it fails this letter, not the wire, which others use too
                _log.exception("inbox %s could not take a letter", self.name)
                if not letter.is_answered:
                    letter.fail(f"{type(error).__name__}: {error}")

    def answer(self, sender_id: str, number: int, kind: int, packed: object) -> None:
        """Remember a reply, and send it."""
        with self.wire.lock:
            sender = self._senders.get(sender_id)
            if sender is None or number not in sender.replies:  # the sender does not wait any more
                return
            sender.replies[number] = (kind, packed)
        self.wire.transport.send(sender.route, (kind, "", self.name, sender_id, number, 0), packed)

    def forget_silent(self, before: float) -> None:
        """Forget the senders whose last packet came before this time."""
        with self.wire.lock:
            for sender_id in [key for key, sender in self._senders.items() if sender.heard < before]:
                del self._senders[sender_id]


class Wire:
    """One end of a wire: its inboxes, its peers, and the thread of `transport`. Each worker has one.

    `close` ends all of them. `on_tick` functions run in its thread every 50 ms, and must not block.
    """

    def __init__(self, transport: Transport) -> None:
        self.id = uuid.uuid4().hex[:12]
        self.lock = threading.RLock()
        self.transport = transport
        self.inboxes: dict[str, Inbox] = {}
        self.on_tick: list[Callable[[float], None]] = []
        self.numbers = iter(range(2**62))
        self.counts: dict[str, int] = {"refused": 0}
        self._peers: dict[str, Peer] = {}
        self._forget_at = time.monotonic() + _FORGET_SECONDS
        self._is_closed = False
        transport.start(self)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called, or the transport has failed."""
        return self._is_closed

    @property
    def address(self) -> str:
        """Where others reach this wire."""
        return self.transport.address

    def open(self, name: str, handler: Callable[[Letter], None] | None = None) -> Inbox:
        """Open an inbox; `Inbox` explains `handler`. Raises `ClusterError` if this wire has one of this name."""
        with self.lock:
            if name in self.inboxes or self._is_closed:
                raise ClusterError(f"this wire {'is closed' if self._is_closed else f'has an inbox {name!r} already'}")
            self.inboxes[name] = inbox = Inbox(self, name, handler)
        return inbox

    def reach(self, address: str, name: str, *, target: str = "", lost_after: float = LOST_SECONDS) -> Peer:
        """The inbox `name` at `address`, of the wire whose id is `target` ("": the wire that has the address now). It
        counts as lost after `lost_after` seconds of silence. Raises `PeerLostError` if this wire is closed."""
        peer = Peer(self, name, address, target, lost_after)
        with self.lock:
            if self._is_closed:  # nothing would end the requests of this peer
                raise PeerLostError(f"{name} is lost: this wire was closed")
            self._peers[peer._id] = peer
        return peer

    def close(self) -> None:
        """Close the inboxes, fail the requests that wait, and end the thread. Calling it again does nothing."""
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
        for inbox in list(self.inboxes.values()):
            inbox.close()
        self.transport.close()
        for peer in list(self._peers.values()):
            peer.lose("this wire was closed")

    # ---- for the transport, inboxes and peers ----------------------------------------------

    def deliver(self, header: Any, packed: Any, route: Any) -> None:
        """A packet has come. The transport calls this, in any thread."""
        if not is_header(header):
            return self.count("refused")
        kind, target, name, sender, number, _ = header
        if kind in (ASK, PROBE):
            inbox = self.inboxes.get(name) if target in ("", self.id) else None
            if inbox is None:
                return self.send_back(route, GONE, None, header)
            return inbox.deliver(header, packed, route)
        peer = self._peers.get(sender)
        return None if peer is None else peer.heard(kind, number, packed)

    def send_back(self, route: object, kind: int, packed: object, header: Header) -> None:
        """Send a packet back to the sender of `header`."""
        self.transport.send(route, (kind, "", *header[2:]), packed)

    def tick(self) -> None:
        """The transport calls this in its thread, every `TICK_SECONDS`."""
        now = time.monotonic()
        for peer in list(self._peers.values()):
            if peer._requests:
                peer.tick(now)
        for function in list(self.on_tick):
            try:
                function(now)
            except Exception:  # the others, and the wire, go on
                _log.exception("a function of a wire has failed")
        if now > self._forget_at:
            self._forget_at = now + _FORGET_SECONDS
            for inbox in list(self.inboxes.values()):
                inbox.forget_silent(now - _FORGET_SECONDS)

    def forget(self, peer: Peer) -> None:
        """`peer` is lost."""
        with self.lock:
            self._peers.pop(peer._id, None)
            is_last = all(other.address != peer.address for other in self._peers.values())
        if is_last and not self._is_closed:
            self.transport.disconnect(peer.address)

    def count(self, what: str) -> None:
        """Count something that went wrong."""
        with self.lock:
            self.counts[what] = self.counts.get(what, 0) + 1
