"""A wire over ZMQ: one ROUTER receives from all who connect, and another one connects to every address.

CURVE encrypts everything. Without the client key of the trial, no connection is accepted. Nothing from a socket is
ever unpickled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgpack
import zmq
from zmq.utils import z85

from penstock.arguments import integer
from penstock.distributed import messages
from penstock.distributed.keys import Connection
from penstock.distributed.wire import TICK_SECONDS, Header, Wire
from penstock.errors import ConfigError
from penstock.workers import sigint

_log = logging.getLogger("penstock")

# As int: zmq's own type of flags takes half a microsecond for each `&`.
_EVENTS, _MORE, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.RCVMORE), int(zmq.POLLIN), int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_ONCE = select.EPOLLIN | select.EPOLLONESHOT

_MOST_HEADER = 4096
_MOST_FRAME = messages.MOST_BYTES + 2**20  # ZMQ breaks a connection through which more comes
_LINGER_SECONDS = 0.5  # how long `close` waits for packets that are not sent yet


class ZmqTransport:
    """Owns the sockets. Any thread may send. A thread holds `_lock` while it uses a socket.

    A thread that waits for a packet receives it itself (see `attend`), if no other thread does: so no other thread must
    wake it. While no thread waits, the thread of this transport receives. It also keeps the time.

    Args:
        connection: the keys of the trial.
        host: the address of this machine at which other machines reach it. By default only this machine does.
        port: 0 for any free one.

    Raises `ConfigError` for an address that cannot be used.
    """

    def __init__(self, connection: Connection, host: str, port: int) -> None:
        if host in ("", "*", "0.0.0.0", "::"):
            raise ConfigError(
                f"host={host!r} would open a port on every network of this machine: give the address of one network"
            )
        integer("port", port, 0, 65_535)  # zmq would take other numbers modulo 65,536
        self._keys = connection
        self._context = zmq.Context()
        self._lock = threading.Lock()  # a thread that holds it does not call the wire
        self._routes: dict[str, bytes] = {}  # by address; ZMQ's name for a connection is used once
        self._numbers = iter(range(2**62))
        self._sources: dict[int, zmq.Socket[bytes]] = {}  # by the descriptor that ZMQ signals
        self._ready: set[int] = set()  # sockets that have packets, although their descriptors do not say so
        self._early: list[tuple[list[bytes], zmq.Socket[bytes]]] = []  # packets that were received, not delivered
        self._is_closing, self._has_ended = False, False
        self._attending = threading.Lock()  # a thread that waits has it while it receives
        self._attendant: int | None = None  # that thread
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        # `_input` has all descriptors that announce packets. The thread of this transport waits for `_quiet`, which has
        # `_input`, except while another thread receives. `_quiet` signals once, until `_rearm`.
        self._input, self._quiet = select.epoll(), select.epoll()
        self._input.register(self._wake_reader, select.EPOLLIN)
        self._input_fd = self._input.fileno()
        self._quiet.register(self._input_fd, _ONCE)
        try:
            self._zap = self._context.socket(zmq.REP)  # here ZMQ asks which clients may connect
            self._zap.bind("inproc://zeromq.zap.01")
            self._router, self._caller = self._socket(), self._socket()
            self._router.curve_server = True
            self._router.curve_secretkey = connection.server_secret.encode()
            self._router.curve_publickey = connection.server_public.encode()
            self._router.zap_domain = b"penstock"
            self._caller.curve_serverkey = connection.server_public.encode()
            self._caller.curve_publickey = connection.client_public.encode()
            self._caller.curve_secretkey = connection.client_secret.encode()
            self._caller.router_mandatory = True  # tells when a queue is full
            # In milliseconds. Only this end sends heartbeats. The other end answers each one, and expects the next
            # within the last of these times. They are long: on a busy machine heartbeats come late, and new connections
            # would make it busier.
            self._caller.heartbeat_ivl, self._caller.heartbeat_timeout, self._caller.heartbeat_ttl = 2000, 6000, 8000
            self._router.bind(f"tcp://{host}:{port or '*'}")
            endpoint: Any = self._router.last_endpoint
            self.address = endpoint.decode()
        except zmq.ZMQError as error:
            self._release()
            raise ConfigError(f"cannot listen at host={host!r}, port={port}: {error}") from error
        for socket in (self._router, self._caller):
            self._sources[fd := socket.fileno()] = socket
            self._ready.add(fd)
            self._input.register(fd, select.EPOLLIN)
        self._zap_fd = self._zap.fileno()
        self._quiet.register(self._zap_fd, select.EPOLLIN)

    def _socket(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = int(_LINGER_SECONDS * 1000)
        socket.maxmsgsize = _MOST_FRAME
        socket.sndhwm = 10_000
        socket.reconnect_ivl, socket.reconnect_ivl_max = 50, 1000
        return socket

    # ---- for every thread ------------------------------------------------------------------

    def start(self, wire: Wire) -> None:
        self._wire = wire
        self._thread = threading.Thread(target=self._run, name="zmq wire", daemon=True)
        self._thread.start()

    fan = 4
    pack = staticmethod(messages.encode)
    # ZMQ counts who still needs a frame. Without `copy`, a large one would be the memory of the array itself.
    pack_once = staticmethod(partial(messages.encode, frame=partial(zmq.Frame, copy=True)))
    unpack = staticmethod(messages.decode)

    def send(self, route: Any, header: Header, packed: Any) -> None:
        if route is None:  # a stranger has answered a request, as if it were one
            return
        if route == self.address:  # this wire
            own = [frame.buffer if isinstance(frame, zmq.Frame) else frame for frame in packed or ()]
            with sigint.deferred():  # Ctrl-C must not come while the name table changes, for example
                return self._wire.deliver(header, own, self.address)
        frames = to_frames(messages.packer().pack(header), packed)
        is_sent, has_input = True, False
        with sigint.deferred(), self._lock:  # Ctrl-C must not come between two frames of a packet
            if self._has_ended:
                return
            try:
                source = self._router if isinstance(route, bytes) else self._caller
                source.send(route if source is self._router else self._route_to(route), _NOBLOCK_MORE)
                for frame in frames[:-1]:
                    source.send(frame, _NOBLOCK_MORE)
                source.send(frames[-1], _NOBLOCK)
                has_input = self._has_input(source)
            except zmq.ZMQError:  # the queue is full, or the address is wrong. The peer sends it again
                is_sent = False
                self._ready.update(self._sources)  # the signal that a packet has come may be taken: look everywhere
        if has_input or not is_sent:
            self._wake()
        if not is_sent:
            self._wire.count("unsent")

    def disconnect(self, address: str) -> None:
        with self._lock, contextlib.suppress(zmq.ZMQError):  # ZMQ has closed it
            if self._routes.pop(address, None) is not None and not self._has_ended:
                # ZMQ may have taken the first frame of the next packet. It fails if that is of this connection.
                while not _drain(self._caller, self._early):
                    pass
                self._caller.disconnect(address)
        self._wake()

    def attend(self, is_done: Callable[[], Any], until: float) -> None:
        with sigint.deferred():  # otherwise Ctrl-C could lose packets
            if not self._attending.acquire(blocking=False):
                return  # another thread receives
            try:
                self._attendant = threading.get_ident()
                if not self._is_closing:
                    self._receive_until(is_done, until)
            except Exception:
                self._fail()
            finally:
                self._attendant = None
                self._attending.release()
                self._rearm()  # not earlier: if the other thread finds the lock taken, it sleeps until the next call

    def _rearm(self) -> None:
        """Let the thread of this transport wake up when a packet comes."""
        with self._lock:
            if not self._has_ended:
                self._quiet.modify(self._input_fd, _ONCE)

    def _receive_until(self, is_done: Callable[[], Any], until: float) -> None:
        self._quiet.modify(self._input_fd, 0)
        while not is_done() and not self._is_closing and not sigint.is_pending():
            left = until - time.monotonic()
            if left <= 0:
                break
            self._receive(min(left, TICK_SECONDS))  # not longer: `is_done` may change without a packet

    def close(self) -> None:
        self._is_closing = True
        self._wake()
        if threading.get_ident() not in (self._thread.ident, self._attendant):
            self._thread.join()

    def _wake(self) -> None:
        """End the wait of the thread that receives."""
        with self._lock, contextlib.suppress(BlockingIOError):  # the pipe is full: the thread will read it
            if not self._has_ended:
                os.write(self._wake_writer, b"w")

    # ---- receiving -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            next_tick = time.monotonic()
            while not self._is_closing:
                signaled = [fd for fd, _ in self._quiet.poll(max(0.0, next_tick - time.monotonic()))]
                if self._zap_fd in signaled:
                    self._answer_zap()
                if self._input_fd in signaled and not self._attending.locked():
                    self._receive(0.0)
                    if self._attending.locked():  # what that thread waits for may have come, or its wake-up was taken
                        self._wake()
                    self._rearm()
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK_SECONDS
                    self._wire.tick()
        except Exception:
            self._fail()
        finally:
            with self._attending:
                self._release()

    def _fail(self) -> None:
        _log.exception("a thread of a wire has failed: the wire is closed")
        self._wire.close()

    def _receive(self, seconds: float) -> None:
        """Deliver the packets that have come, or that come within this time."""
        fired = [fd for fd, _ in self._input.poll(seconds)]
        with self._lock:
            packets, self._early = self._early, []
            for fd in self._ready.union(fired):
                if fd == self._wake_reader:
                    with contextlib.suppress(BlockingIOError):
                        os.read(fd, 4096)
                elif (source := self._sources.get(fd)) is not None:
                    if _drain(source, packets):
                        self._ready.discard(fd)
                    else:
                        self._ready.add(fd)
            is_rest = bool(self._ready)
        if is_rest:
            self._wake()
        for frames, source in packets:
            self._deliver(frames[1:], frames[0] if source is self._router else None)

    def _answer_zap(self) -> None:
        """Tell ZMQ which clients may connect. Only the thread of this transport uses this socket."""
        while int(self._zap.get(_EVENTS)) & _POLLIN:
            self._zap.send_multipart(self._admit(self._zap.recv_multipart()))

    def _has_input(self, source: zmq.Socket[bytes]) -> bool:
        """After sending, which may take the signal that a packet has come: whether one has."""
        if int(source.get(_EVENTS)) & _POLLIN:
            self._ready.add(source.fileno())
            return True
        return False

    def _deliver(self, frames: list[bytes], route: object) -> None:
        try:
            first = frames[0]
            end = 4 + int.from_bytes(first[:4], "big")
            if end > _MOST_HEADER:
                raise ValueError("no header")
            header = msgpack.unpackb(first[4:end], max_array_len=6)
        except Exception:  # msgpack may raise anything for the bytes of a stranger
            return self._wire.count("refused")
        return self._wire.deliver(header, [first[end:], *frames[1:]], route)

    def _admit(self, frames: list[bytes]) -> list[bytes]:
        """The answer to ZMQ's request (RFC 27, ZAP), which asks whether a client may connect."""
        key = z85.decode(self._keys.client_public.encode())
        is_ours = len(frames) == 7 and frames[5] == b"CURVE" and frames[6] == key
        if not is_ours:
            self._wire.count("refused")
        return [*frames[:2], *((b"200", b"OK", b"client") if is_ours else (b"400", b"No", b"")), b""]

    def _route_to(self, address: str) -> bytes:
        if (route := self._routes.get(address)) is None:
            route = b"%d" % next(self._numbers)
            self._caller.connect_routing_id = route
            self._caller.connect(address)
            self._routes[address] = route
        return route

    def _release(self) -> None:
        with self._lock:
            self._has_ended = True
        self._context.destroy(linger=int(_LINGER_SECONDS * 1000))
        for each in (self._input, self._quiet):
            each.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)


def to_frames(header: bytes, packed: Sequence[bytes] | None) -> list[bytes]:
    """A packet: the length of the header in 4 bytes, the header and the first frame of the message, then the others."""
    first, *others = packed or (b"",)
    return [len(header).to_bytes(4, "big") + header + first, *others]


def _drain(source: zmq.Socket[bytes], packets: list[tuple[list[bytes], zmq.Socket[bytes]]]) -> bool:
    """Append the packets that have come to `source`. Returns False if there may be more."""
    for _ in range(100):  # not without a limit: the other sockets have packets too
        try:
            frames = [source.recv(_NOBLOCK)]  # the route; others follow
        except zmq.Again:  # rare: usually there is a packet, and asking first costs more
            return True
        while source.get(_MORE):
            frames.append(source.recv(_NOBLOCK))
        packets.append((frames, source))
        if not int(source.get(_EVENTS)) & _POLLIN:
            return True
    return False
