"""A wire over ZMQ: a ROUTER receives, and a DEALER sends to each address.

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
from typing import Any

import msgpack
import zmq
from zmq.utils import z85

from penstock.arguments import integer
from penstock.control import messages
from penstock.control.keys import Connection
from penstock.control.wire import TICK_SECONDS, Header, Transport, Wire
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


def zmq_wire(connection: Connection, *, host: str = "127.0.0.1", port: int = 0) -> Wire:
    """A new wire.

    Args:
        connection: the keys of the trial.
        host: the address of this machine at which other machines reach it. By default only this machine does.
        port: 0 for any free one.

    Raises `ConfigError` for an address that cannot be used.
    """
    return Wire(ZmqTransport(connection, host, port))


class ZmqTransport(Transport):
    """Owns the sockets. Any thread may send. A thread holds `_lock` while it uses a socket.

    A thread that waits for a packet receives it itself (see `attend`), if no other thread does: so no other thread must
    wake it. While no thread waits, the thread of this transport receives. It also keeps the time.
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
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._sources: dict[int, zmq.Socket[bytes]] = {}  # by the descriptor that ZMQ signals
        self._ready: set[int] = set()  # sockets that have packets, although their descriptors do not say so
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
            self._router = self._socket(zmq.ROUTER)
            self._router.curve_server = True
            self._router.curve_secretkey = connection.server_secret.encode()
            self._router.curve_publickey = connection.server_public.encode()
            self._router.zap_domain = b"penstock"
            self._router.bind(f"tcp://{host}:{port or '*'}")
            endpoint: Any = self._router.last_endpoint
            self.address = endpoint.decode()
        except zmq.ZMQError as error:
            self._release()
            raise ConfigError(f"cannot listen at host={host!r}, port={port}: {error}") from error
        self._watch(self._router)
        self._zap_fd = self._zap.fileno()
        self._quiet.register(self._zap_fd, select.EPOLLIN)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = int(_LINGER_SECONDS * 1000)
        socket.maxmsgsize = _MOST_FRAME
        socket.heartbeat_ivl, socket.heartbeat_timeout = 1000, 3000
        socket.sndhwm = 10_000
        socket.reconnect_ivl, socket.reconnect_ivl_max = 50, 1000
        return socket

    def _watch(self, source: zmq.Socket[bytes]) -> None:
        fd = source.fileno()
        self._sources[fd] = source
        self._ready.add(fd)
        self._input.register(fd, select.EPOLLIN)

    # ---- for every thread ------------------------------------------------------------------

    def start(self, wire: Wire) -> None:
        self._wire = wire
        self._thread = threading.Thread(target=self._run, name="zmq wire", daemon=True)
        self._thread.start()

    pack = staticmethod(messages.encode)
    unpack = staticmethod(messages.decode)

    def send(self, route: Any, header: Header, packed: Any) -> None:
        if route is None:  # a stranger has answered a request, as if it were one
            return
        frames = to_frames(messages.packer().pack(header), packed)
        if isinstance(route, bytes):
            frames.insert(0, route)
        is_sent, has_input = True, False
        with sigint.deferred(), self._lock:  # Ctrl-C must not come between two frames of a packet
            if self._has_ended:
                return
            try:
                source = self._router if isinstance(route, bytes) else self._dealers.get(route) or self._connect(route)
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
        with self._lock:
            dealer = self._dealers.pop(address, None)
            if dealer is not None and not self._has_ended:
                fd = dealer.fileno()
                self._input.unregister(fd)
                del self._sources[fd]
                self._ready.discard(fd)
                dealer.close()

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
        packets: list[tuple[list[bytes], zmq.Socket[bytes]]] = []
        with self._lock:
            for fd in self._ready.union(fired):
                if fd == self._wake_reader:
                    with contextlib.suppress(BlockingIOError):
                        os.read(fd, 4096)
                elif (source := self._sources.get(fd)) is not None:
                    if _drain(source, packets, is_router=source is self._router):
                        self._ready.discard(fd)
                    else:
                        self._ready.add(fd)
            is_rest = bool(self._ready)
        if is_rest:
            self._wake()
        for frames, source in packets:
            if source is self._router:
                self._deliver(frames[1:], frames[0])
            else:
                self._deliver(frames, None)

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

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        dealer = self._socket(zmq.DEALER)
        dealer.curve_serverkey = self._keys.server_public.encode()
        dealer.curve_publickey = self._keys.client_public.encode()
        dealer.curve_secretkey = self._keys.client_secret.encode()
        try:
            dealer.connect(address)
        except zmq.ZMQError:
            dealer.close(0)
            raise
        self._dealers[address] = dealer
        self._watch(dealer)
        return dealer

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


def _drain(source: zmq.Socket[bytes], packets: list[tuple[list[bytes], zmq.Socket[bytes]]], *, is_router: bool) -> bool:
    """Append the packets that have come to `source`. Returns False if there may be more."""
    for _ in range(100):  # not without a limit: the other sockets have packets too
        try:
            frames = [source.recv(_NOBLOCK)]
        except zmq.Again:  # rare: usually there is a packet, and asking first costs more
            return True
        if is_router:  # the first frame is the route, and others follow
            frames.append(source.recv(_NOBLOCK))
        while source.get(_MORE):
            frames.append(source.recv(_NOBLOCK))
        packets.append((frames, source))
        if not int(source.get(_EVENTS)) & _POLLIN:
            return True
    return False
