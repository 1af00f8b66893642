"""Requests between processes, over ZeroMQ. Each is run at most once, and once if both processes live.

A `Node` has one thread, which owns its sockets: a ROUTER for what others ask, and one that connects to each address
that this node asks. A sender numbers its requests. The receiver runs each number once, and keeps the reply until the
sender has it. When a connection was lost and made anew, the sender sends again what has no reply: a number that is
known is not run again, but answered again. ZeroMQ's heartbeats break connections that are dead.

CURVE encrypts everything. Without the client key of the trial, no connection is accepted. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import select
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgpack
import zmq
from zmq.utils import z85

from penstock.arguments import integer
from penstock.buffers.reports import format_exception
from penstock.distributed.messages import BadMessageError, decode, describe, encode, packer, sendable
from penstock.errors import ClusterError, ConfigError, NameTableError, NoReplyError, PeerLostError, RequestError
from penstock.workers import sigint
from penstock.workers.forks import leave_in_forks
from penstock.workers.gates import WakeUp, clear, notify

if TYPE_CHECKING:
    from penstock.distributed.keys import Connection

_log = logging.getLogger("penstock")

# The kinds of packets. GONE: there is no such inbox, or another process has the address.
REQUEST, REPLY, ERROR, GONE = range(4)
# kind, id of the receiving node ("" for any), inbox, sender, number of the request, oldest number without an answer,
# number of the sender's connection
Header = tuple[int, str, str, str, int, int, int]
_TYPES = [int, str, str, str, int, int, int]

TICK_SECONDS = 0.05
LOST_SECONDS = 5.0  # without a connection, after which another side counts as lost
_MOST_STEP = 1.0  # a process that has not looked at its clock for longer was suspended
_MOST_WAITING = 10_000  # requests of one inbox without a reply; more are refused
_MOST_SENDERS = 2**16  # that a node remembers; others are refused
_MOST_KEPT, _MOST_KEPT_BYTES = 2**16, 2**30  # replies that a node keeps; with more, it forgets the oldest
_FORGET_SECONDS = 600.0  # a sender that was silent for so long, and has all answers, is forgotten
_MOST_FRAME = 2**20  # bytes: no frame of a message has as many, also not one with a header
_MOST_PACKETS = 100  # of one socket, before the others have their turn
# In milliseconds. Who asks sends a heartbeat after the first of these times, and gives the connection up if no answer
# comes within the second. Who is asked expects the next one within the last. They are long: on a busy machine
# heartbeats come late, and each one costs the panel.
_HEARTBEATS = 3000, 5000, 10_000
_LINGER = 500  # milliseconds in which `close` sends what waits
# As int: zmq's own type of flags takes half a microsecond for each `&`.
_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
_SNDMORE = int(zmq.SNDMORE) | _NOBLOCK

#: A message as it is sent to many, who share its memory. Without `copy`, that would be the memory of the array itself.
pack_once = partial(encode, frame=partial(zmq.Frame, copy=True))


@dataclass
class Line:
    """The connection to one address."""

    address: str
    number: int = 0  # of this connection, and ZeroMQ's name for it. A later one has a larger number; 0: there is none
    is_up: bool = False
    down_since: float = float("inf")  # by the node's clock
    peers: dict[str, Peer] = field(default_factory=dict)


class Peer:
    """An inbox of another node. Make it with `names.reach(place)` or `node.reach(...)`.

    If that node is closed and another one opens an inbox with the same name, make a new peer.
    """

    def __init__(self, node: Node, name: str, line: Line, target: str, lost_after: float) -> None:
        self.node = node  #: the one that asks
        self._line, self.name, self._target, self._lost_after = line, name, target, lost_after
        self.id, self._next, self._lost = f"{node.id}.{next(node.numbers)}", 0, ""
        self.requests: dict[int, tuple[Future[Any], list[Any], float]] = {}  #: future of the reply, packed, deadline
        #: Address, node id and name of the inbox: what the name table holds.
        self.place = [line.address, target, name]

    @property
    def is_dead(self) -> bool:
        """Whether the other side is known to have ended, or could not be reached for too long."""
        return bool(self._lost)

    @property
    def is_silent(self) -> bool:
        """Whether requests wait, and there was no connection for some seconds."""
        return self.n_waiting > 0 and self.node.clock - self._line.down_since > LOST_SECONDS

    @property
    def n_waiting(self) -> int:
        """How many requests have no answer yet."""
        return len(self.requests)

    def ask(self, message: object, timeout: float) -> Future[Any]:
        """Send a request. The future gets the reply, or `NoReplyError` after `timeout` seconds, `PeerLostError`, or
        `RequestError` with what the other side reported. Raises `BadMessageError` if `message` cannot be sent, and
        `PeerLostError` if the other side has ended."""
        packed, future = encode(message), Future[Any]()
        future.set_running_or_notify_cancel()  # it cannot be cancelled: it is on its way
        with sigint.deferred(), self.node.lock:  # Ctrl-C must not leave a number that is never sent
            if self._lost:
                raise PeerLostError(self._lost)
            number, self._next = self._next, self._next + 1
            self.requests[number] = future, packed, self.node.clock + timeout
            self.node.do(self.send, number)
        return future

    def lose(self, reason: str) -> None:
        """The other side has ended, or is not needed any more: fail all requests with `PeerLostError`."""
        with self.node.lock:
            if self._lost:
                return
            self._lost = f"{self.name} is lost: {reason}"
            requests, self.requests = self.requests, {}
        self.node.forget(self, self._line)
        for future, *_ in requests.values():
            future.set_exception(PeerLostError(self._lost))

    def leave_to_parent(self, reason: str) -> None:
        """In a fork, which has no thread that could end these requests."""
        self._lost, requests = f"{self.name} is lost: {reason}", [*self.requests.values()]
        self.requests = {}
        for future, *_ in requests:
            vars(future).update(_condition=threading.Condition(), _done_callbacks=[])  # the parent calls these
            if not future.done():
                future.set_exception(PeerLostError(self._lost))

    # ---- in the node's thread --------------------------------------------------------------

    def send(self, *numbers: int) -> None:
        """Send these requests, or without numbers all that have no answer."""
        if not self._line.number:
            self.node.connect(self._line)
        for number in (numbers or list(self.requests)) if self._line.is_up else ():
            with self.node.lock:
                request, oldest = self.requests.get(number), next(iter(self.requests), number)
            if request is not None:
                header = REQUEST, self._target, self.name, self.id, number, oldest, self._line.number
                self.node.send(self._line, header, request[1])

    def heard(self, kind: int, number: int, packed: list[Any]) -> None:
        """A packet has come back."""
        if kind == GONE:
            return self.lose("it has closed its inbox, or another process has its address now")
        with self.node.lock:
            future, *_ = self.requests.pop(number, (None,))
        if future is None:  # it was answered before, or its time was up
            return None
        try:
            message = decode(packed)
        except BadMessageError as error:
            self.node.counts["refused"] += 1
            return future.set_exception(error)
        if kind == REPLY:
            return future.set_result(message)
        return future.set_exception(RequestError(f"{self.name}: {message}"))

    def tick(self, now: float) -> None:
        """Fail the requests whose time is up, or all of them after too long without a connection."""
        with self.node.lock:
            late = [number for number, (*_, deadline) in self.requests.items() if deadline <= now]
            futures = [self.requests.pop(number)[0] for number in late]
        for future in futures:
            text = f"{self.name} did not answer in time: it may be busy. Use a longer timeout"
            future.set_exception(NoReplyError(text))
        if self.requests and now - self._line.down_since > self._lost_after:
            self.lose(f"there was no connection to it for {self._lost_after:g} s")


class Call:
    """A request that has come. The receiver calls `reply` or `fail` once, at any time, in any thread."""

    def __init__(self, inbox: Inbox, header: Header) -> None:
        self._inbox, self._header = inbox, header
        self.message: Any = None
        self.is_answered = False  #: whether `reply` or `fail` was called

    def reply(self, message: object = None) -> None:
        """Send the result. Raises `BadMessageError` if it cannot be sent."""
        self.reply_packed(encode(message))

    def reply_packed(self, packed: list[Any], kind: int = REPLY) -> None:
        """Send what `pack_once` has: many replies may share it."""
        self._inbox.node.require_own()
        with sigint.deferred():
            if self.is_answered:
                raise ClusterError(f"inbox {self._header[2]}: this request was answered already")
            self.is_answered = True
            self._inbox.node.do(self._inbox.node.answer, self._inbox, self._header, kind, packed)

    def fail(self, reason: str) -> None:
        """Say why there is no result: the sender gets a `RequestError`."""
        self.reply_packed(encode(sendable(reason[:20_000])), ERROR)

    @property
    def command(self) -> str | None:
        """The `command` in the message."""
        command = self.message.get("command") if isinstance(self.message, dict) else None
        return command if isinstance(command, str) else None

    def run(self, handlers: Mapping[str, Callable[..., Any]]) -> None:
        """Reply with what the handler for `command` returns for the `kwargs` in the message, or fail with its error."""
        command = self.command
        if command is None or command not in handlers:
            known = ", ".join(sorted(handlers)) or "none"
            return self.fail(f"there is no command {command!r}; the commands are {known}")
        try:
            return self.reply(handlers[command](**self.message.get("kwargs", {})))
        except BaseException as error:  # the user's handler may raise anything
            if isinstance(error, RequestError | NameTableError):
                return self.fail(describe(error).partition(": ")[2])
            self.fail(f"{command} raised {describe(error)}\n{format_exception(error)}")
            if not isinstance(error, Exception):  # SystemExit ends this process, and the sender knows why
                raise


class Inbox:
    """The requests that come to a node under one name. With a `handler`, the node's thread calls it for each `Call`,
    and it must not block. Otherwise they wait until somebody receives them. If they are `repeatable`, the node keeps no
    replies: a request whose reply was lost with its connection is run again."""

    def __init__(self, node: Node, name: str, handler: Callable[[Call], None] | None, repeatable: bool) -> None:
        self.node, self.name, self.is_closed, self.is_repeatable = node, name, False, repeatable
        self.n_open = 0  #: requests that have come and have no reply
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self.put = handler or self._calls.put

    def __len__(self) -> int:
        return self._calls.qsize()

    def receive(self, timeout: float | None = None) -> Call | None:
        """The next request, or None after `timeout` seconds, or if the inbox was closed."""
        self.node.require_own()
        with contextlib.suppress(queue.Empty):
            if not self.is_closed:
                return self._calls.get(timeout != 0, timeout)
        return None

    def close(self) -> None:
        """Accept no more requests. Senders of those without a reply learn that the inbox is gone."""
        if self.node.left:
            return
        self.is_closed = True
        with self.node.lock:
            self.node.inboxes.pop(self.name, None)
        self._calls.put(None)
        self.node.do(self.node.end, self.name)


@dataclass
class _Sender:
    """What a node remembers of a peer that asks it."""

    inbox: str
    route: Any = None  # the way back through its newest connection
    connection: int = -1  # its number. Late bytes of an older one may come, and nothing would arrive through that
    heard: float = 0.0  # when its last packet came
    done: int = 0  # it has the answers to all requests below this number
    replies: dict[int, tuple[int, Any] | None] = field(default_factory=dict)  # to its other requests; None: not yet
    dropped: int = -1  # the largest number whose reply was forgotten before it had that


class Node:
    """One end of all connections: its inboxes, its peers, and one thread. Each worker has a node.

    `on_tick` functions run in its thread every 50 ms, and must not block.

    Args:
        keys: of the trial.
        host: the address of this machine at which other machines reach it, as ZeroMQ writes it.
        port: 0 for any free one.

    Raises `ConfigError` for an address that cannot be used.
    """

    def __init__(self, keys: Connection, host: str, port: int) -> None:
        integer("port", port, 0, 65_535)  # zmq would take other numbers modulo 65,536
        self.id, self.lock, self._keys, self.is_closed = uuid.uuid4().hex[:12], threading.RLock(), keys, False
        self.left = ""  #: in a fork of the process that it belongs to: why it cannot be used
        #: Seconds that pass while this process runs: those in which it was suspended do not count.
        self.clock = 0.0
        self.on_tick: list[Callable[[float], None]] = []
        self.numbers, self.counts = iter(range(1, 2**62)), Counter[str]()  #: counts: what went wrong
        self.inboxes: dict[str, Inbox] = {}
        self._peers: dict[str, Peer] = {}
        self._lines: dict[str, Line] = {}  # by address
        self._routes: dict[int, Line] = {}  # those that are connected, or try to be, by number
        self.senders: dict[str, _Sender] = {}
        self.kept, self.kept_bytes = dict[tuple[str, int], int](), 0  # replies, the oldest first: bytes of each
        self._next_look = 0.0  # when it is time to forget some of them
        self._todo: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._sleeps = False  # whether the thread must be woken: it waits, or will not look at `_todo` before it waits
        self._wake, self._poll, self._context = WakeUp(), select.poll(), zmq.Context()
        self._router, self._caller = self._context.socket(zmq.ROUTER), self._context.socket(zmq.ROUTER)
        try:
            self._open_sockets(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._release()
            raise ConfigError(f"cannot listen at host={host!r}, port={port}: {error}") from error
        endpoint: Any = self._router.last_endpoint
        self.address: str = endpoint.decode()  #: where others reach this node
        self._thread = threading.Thread(target=self._run, name="node", daemon=True)
        self._thread.start()
        leave_in_forks(self)

    def _open_sockets(self, endpoint: str) -> None:
        keys, router, caller = self._keys, self._router, self._caller
        self._zap, self._monitor = self._context.socket(zmq.REP), self._context.socket(zmq.PAIR)
        self._zap.bind("inproc://zeromq.zap.01")  # here ZeroMQ asks which clients may connect
        for each in (router, caller):
            each.linger, each.maxmsgsize, each.sndhwm = _LINGER, _MOST_FRAME, 0
        router.curve_server, router.zap_domain, router.probe_router = True, b"penstock", True
        router.curve_publickey, router.curve_secretkey = keys.server_public.encode(), keys.server_secret.encode()
        caller.curve_publickey, caller.curve_secretkey = keys.client_public.encode(), keys.client_secret.encode()
        caller.curve_serverkey, self._key = keys.server_public.encode(), z85.decode(keys.client_public.encode())
        caller.heartbeat_ivl, caller.heartbeat_timeout, caller.heartbeat_ttl = _HEARTBEATS
        caller.reconnect_ivl, caller.reconnect_ivl_max = 50, 1000
        caller.monitor("inproc://connections", zmq.EVENT_DISCONNECTED)
        self._monitor.rcvhwm = 0  # otherwise ZeroMQ's thread could wait for this one
        self._monitor.connect("inproc://connections")
        router.ipv6 = "[" in endpoint
        router.bind(endpoint)
        self._sources = {source.fileno(): source for source in (self._zap, router, caller, self._monitor)}
        for fd in (self._wake.reader.fd, *self._sources):
            self._poll.register(fd, select.POLLIN)
        for source in self._sources.values():  # they signal once somebody has found them empty
            self.do(self._receive, source)

    # ---- for every thread ------------------------------------------------------------------

    def open(self, name: str, handler: Callable[[Call], None] | None = None, *, repeatable: bool = False) -> Inbox:
        """Open an inbox, as `Inbox` explains. Raises `ClusterError` if this node has one of this name."""
        self.require_own()
        with self.lock:
            if name in self.inboxes or self.is_closed:
                raise ClusterError(f"this wire {'is closed' if self.is_closed else f'has an inbox {name!r} already'}")
            self.inboxes[name] = inbox = Inbox(self, name, handler, repeatable)
        return inbox

    def reach(self, address: str, name: str, *, target: str = "", lost_after: float = LOST_SECONDS) -> Peer:
        """The inbox `name` at `address`, of the node whose id is `target` ("": the node that has the address now). It
        counts as lost after `lost_after` seconds without a connection. Raises `PeerLostError` if this node is
        closed."""
        self.require_own()
        with self.lock:
            if self.is_closed:  # nothing would end the requests of this peer
                raise PeerLostError(f"{name} is lost: this wire was closed")
            line = self._lines.setdefault(address, Line(address))
            peer = Peer(self, name, line, target, lost_after)
            self._peers[peer.id] = line.peers[peer.id] = peer
        return peer

    def close(self) -> None:
        """Close the inboxes, fail the requests that wait, and end the thread. Calling it again does nothing, and nor
        does a call in a fork of its process."""
        if self.left:
            return
        with self.lock:
            for inbox in list(self.inboxes.values()):
                inbox.close()
            if not self.is_closed:
                self.is_closed = True
                notify(self._wake.writer.fd)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for peer in list(self._peers.values()):
            peer.lose("this wire was closed")

    def leave_to_parent(self, pid: int) -> None:
        """This process is a fork of process `pid`, which has the thread and the sockets."""
        self.left = f"this wire belongs to process {pid}, of which this process is a fork: make a new one here, with "
        self.left += "the connection file"
        self.lock, self.is_closed = threading.RLock(), True
        for peer in list(self._peers.values()):
            peer.leave_to_parent(self.left)

    def require_own(self) -> None:
        """Raise `ClusterError` in a fork of the process that has made this node."""
        if self.left:
            raise ClusterError(self.left)

    def do(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call `function` soon, in the node's thread."""
        self._todo.put((function, *arguments))
        if self._sleeps:  # the first of many calls wakes it: the thread looks at `_todo` after it has set this
            with self.lock:
                if self._sleeps and not self.is_closed:
                    self._sleeps = False
                    notify(self._wake.writer.fd)

    def forget(self, peer: Peer, line: Line) -> None:
        """`peer` is lost."""
        with self.lock:
            self._peers.pop(peer.id, None)
            line.peers.pop(peer.id, None)
            if not line.peers and self._lines.get(line.address) is line:
                del self._lines[line.address]
                self.do(self._disconnect, line)

    # ---- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        looked = now = time.monotonic()
        while not self.is_closed:
            # ZeroMQ signals a packet once, and sending may take the signal: so ask before the thread sleeps.
            ready = [each for each in (self._router, self._caller) if int(each.get(_EVENTS)) & _POLLIN]
            self._sleeps = True
            is_busy = bool(ready) or not self._todo.empty()
            for fd, _ in self._poll.poll(0.0 if is_busy else 1000 * max(0.0, looked + TICK_SECONDS - now)):
                if fd == self._wake.reader.fd:
                    clear(fd)
                elif (source := self._sources[fd]) not in ready:
                    ready.append(source)
            self._sleeps = False
            for source in ready:
                self._guard(self._receive, source)
            for _ in range(self._todo.qsize()):
                self._guard(*self._todo.get())
            if (now := time.monotonic()) >= looked + TICK_SECONDS:
                self.clock += min(now - looked, _MOST_STEP)
                looked = now
                self._tick()
        while not self._todo.empty():
            self._guard(*self._todo.get())
        self._release()

    def _guard(self, function: Callable[..., Any], *arguments: Any) -> None:
        """An exception fails what has raised it. The node goes on."""
        try:
            function(*arguments)
        except Exception:
            _log.exception("a function of a node has failed")

    def _tick(self) -> None:
        for peer in list(self._peers.values()):
            if peer.n_waiting:
                peer.tick(self.clock)
        for function in list(self.on_tick):
            self._guard(function, self.clock)
        if self.clock < self._next_look:  # at thousands of senders it would be work at each tick
            return
        self._next_look = self.clock + _FORGET_SECONDS / 100
        for key, sender in list(self.senders.items()):
            if sender.heard < self.clock - _FORGET_SECONDS and None not in sender.replies.values():
                self._forget_sender(key)

    def _release(self) -> None:
        self._caller.disable_monitor()
        self._context.destroy(linger=_LINGER)
        with self.lock:  # `close` may be about to write to it
            self._wake.close()

    def connect(self, line: Line) -> None:
        """Begin to connect."""
        line.number, line.is_up, line.down_since = next(self.numbers), False, self.clock
        self._routes[line.number] = line
        if line.address == self.address:
            self._has_connected(line.number)
        else:
            with contextlib.suppress(zmq.ZMQError):  # no address: it is never up
                self._caller.connect_routing_id, self._caller.ipv6 = b"%d" % line.number, "[" in line.address
                self._caller.connect(line.address)

    def _disconnect(self, line: Line) -> None:
        if self._routes.pop(line.number, None) is not None and line.address != self.address:
            # ZeroMQ may have taken the first frame of the next packet. It fails if that is of this connection.
            while int(self._caller.get(_EVENTS)) & _POLLIN:
                self._receive(self._caller)
            with contextlib.suppress(zmq.ZMQError):  # it was no address
                self._caller.disconnect(line.address)

    def send(self, route: Any, header: Header, packed: list[Any]) -> None:
        """Send a packet through a `Line`, or back on the route on which a packet came. It never blocks."""
        source = self._router
        if isinstance(route, Line):
            if route.address == self.address:
                buffers = [frame.buffer if isinstance(frame, zmq.Frame) else frame for frame in packed]
                return self.do(self.received, header, buffers, route)
            source, route = self._caller, b"%d" % route.number
        frames = to_frames(packer().pack(header), packed)
        for frame in (route, *frames[:-1]):  # as `send_multipart`, but without its enums
            source.send(frame, _SNDMORE)
        source.send(frames[-1], _NOBLOCK)
        return None

    def _receive(self, source: Any) -> None:
        """Take the packets that have come to this socket, but not without end."""
        for _ in range(_MOST_PACKETS):
            if not int(source.get(_EVENTS)) & _POLLIN:
                return
            parts = [source.recv(_NOBLOCK, copy=False)]
            while parts[-1].more:  # to ask the socket, as `recv_multipart` does, takes 3 µs for each part
                parts.append(source.recv(_NOBLOCK, copy=False))
            frames = [part.bytes for part in parts]
            if source is self._zap:
                is_ours = len(frames) == 7 and frames[5:] == [b"CURVE", self._key]  # RFC 27
                self.counts["refused"] += not is_ours
                source.send_multipart([*frames[:2], b"200" if is_ours else b"400", b"", b"", b""])
            elif source is self._monitor:
                self._lost_connection(frames[1].decode())
            elif source is self._caller and frames[1:] == [b""]:
                self._has_connected(int(frames[0]))
            else:
                self._guard(self._parse, frames[1:], frames[0] if source is self._router else None)
        self.do(self._receive, source)  # it may not signal what is left

    def _has_connected(self, number: int) -> None:
        """The router at the other end sends an empty frame through each new connection (`probe_router`)."""
        if (line := self._routes.get(number)) is not None:
            line.is_up, line.down_since = True, float("inf")
            for peer in list(line.peers.values()):
                peer.send()

    def _lost_connection(self, endpoint: str) -> None:
        """A connection was lost. Another one takes its place: what waits in it would be sent twice."""
        for line in [other for other in self._routes.values() if other.is_up and other.address == endpoint]:
            self._disconnect(line)
            self.connect(line)

    def _parse(self, frames: list[bytes], route: Any) -> None:
        try:
            first = frames[0]
            end = 4 + int.from_bytes(first[:4], "big")
            header = msgpack.unpackb(first[4:end], max_array_len=7)
            if end > 4096 or [*map(type, header)] != _TYPES or not 0 <= header[5] <= header[4] < 2**62:
                raise ValueError
            if not (REQUEST if route else REPLY) <= header[0] <= GONE or len(header[2]) + len(header[3]) > 1000:
                raise ValueError
        except Exception:  # msgpack may raise anything for the bytes of a stranger
            self.counts["refused"] += 1
            return None
        return self.received(header, [first[end:], *frames[1:]], route)

    def received(self, header: Any, packed: list[Any], route: Any) -> None:
        """A packet has come."""
        kind, target, name, sender_id, number, done, connection = header
        if kind != REQUEST:
            peer = self._peers.get(sender_id)
            return None if peer is None else peer.heard(kind, number, packed)
        inbox = self.inboxes.get(name) if target in ("", self.id) else None
        if inbox is None:
            return self.send(route, (GONE, "", *header[2:]), [b""])
        if (sender := self.senders.get(sender_id)) is None:
            if len(self.senders) >= _MOST_SENDERS:
                self.counts["refused"] += 1
                return self.send(route, (ERROR, *header[1:]), encode(f"this node has {_MOST_SENDERS:,} senders"))
            self.senders[sender_id] = sender = _Sender(name)
        if connection >= sender.connection:
            sender.route, sender.connection = route, connection
        sender.heard = self.clock
        # Usually few numbers, but a stranger may send any.
        for old in range(sender.done, done) if done - sender.done < 1000 else list(sender.replies):
            if old < done:
                self._drop(sender_id, sender, old)
        sender.done = max(sender.done, done)
        return self._take(inbox, sender, header, packed)

    def _take(self, inbox: Inbox, sender: _Sender, header: Header, packed: list[Any]) -> None:
        """Run a request, or send its reply again."""
        number = header[4]
        if number < sender.done or number <= sender.dropped or number in sender.replies:  # it was run before
            self.counts["again"] += 1
            reply = sender.replies.get(number, (ERROR, encode("the reply to this request was forgotten")))
            if number >= sender.done and reply is not None:
                self.send(sender.route, (reply[0], *header[1:]), reply[1])
            return None
        sender.replies[number] = None
        inbox.n_open += 1
        call = Call(inbox, header)
        try:
            if inbox.n_open > _MOST_WAITING:
                raise BadMessageError(f"the inbox {inbox.name} is full: {_MOST_WAITING:,} requests wait")
            call.message = decode(packed)
            return inbox.put(call)
        except Exception as error:  # it fails this request, not the node, which others use too
            self.counts["refused"] += 1
            return None if call.is_answered else call.fail(describe(error).removeprefix("BadMessageError: "))

    def answer(self, inbox: Inbox, header: Header, kind: int, packed: list[Any]) -> None:
        """Send a reply, and keep it until the sender has it."""
        inbox.n_open -= 1
        _, _, _, key, number, *_ = header
        sender = self.senders.get(key)
        if sender is None or sender.replies.get(number, 0) is not None:  # nobody waits any more
            return
        if inbox.is_repeatable:
            del sender.replies[number]
        else:
            sender.replies[number] = (kind, packed)
            self.kept[key, number] = size = sum(map(len, packed))
            self.kept_bytes += size
        self.send(sender.route, (kind, *header[1:]), packed)
        while len(self.kept) > _MOST_KEPT or (self.kept_bytes > _MOST_KEPT_BYTES and len(self.kept) > 1):
            key, number = next(iter(self.kept))
            self.senders[key].dropped = max(number, self.senders[key].dropped)
            self._drop(key, self.senders[key], number)

    def _drop(self, key: str, sender: _Sender, number: int) -> None:
        """Forget a request of this sender."""
        if sender.replies.pop(number, None) is not None:
            self.kept_bytes -= self.kept.pop((key, number))

    def _forget_sender(self, key: str) -> None:
        sender = self.senders.pop(key)
        for number in list(sender.replies):
            self._drop(key, sender, number)

    def end(self, name: str) -> None:
        """An inbox was closed: tell those who wait for its replies."""
        for key, sender in [item for item in self.senders.items() if item[1].inbox == name]:
            for number in [number for number, reply in sender.replies.items() if reply is None]:
                self.send(sender.route, (GONE, "", name, key, number, 0, 0), [b""])
            self._forget_sender(key)


def to_frames(header: bytes, packed: list[Any]) -> list[Any]:
    """A packet: the length of the header in 4 bytes, the header and the first frame of the message, then the others."""
    return [len(header).to_bytes(4, "big") + header + packed[0], *packed[1:]]
