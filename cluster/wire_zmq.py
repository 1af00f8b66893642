"""A wire over ZMQ: a ROUTER receives, a DEALER sends to each address, one thread owns all of them.

CURVE encrypts everything. Without the client key of the trial, no connection is accepted. Nothing from a socket is
ever unpickled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from typing import Any

import msgpack
import zmq
from zmq.utils import z85

from penstock.cluster import messages
from penstock.cluster.keys import Connection
from penstock.cluster.transport import TICK_SECONDS, Header, Transport
from penstock.cluster.wire import Wire
from penstock.errors import ConfigError
from penstock.workers.arguments import integer

_log = logging.getLogger("penstock")

_MOST_HEADER = 4096
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
    """Owns the sockets. Other threads put packets into a queue, and wake the thread."""

    def __init__(self, connection: Connection, host: str, port: int) -> None:
        if host in ("", "*", "0.0.0.0", "::"):
            raise ConfigError(
                f"host={host!r} would open a port on every network of this machine: give the address of one network"
            )
        integer("port", port, 0, 65_535)  # zmq would take other numbers modulo 65,536
        self._keys = connection
        self._context = zmq.Context()
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._unused: set[str] = set()
        self._poller = zmq.Poller()
        self._outgoing: deque[tuple[Any, Header | None, Any]] = deque()
        self._is_closing, self._has_ended = False, False
        self._wake_lock = threading.Lock()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
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
        for source in (self._zap, self._router, self._wake_reader):
            self._poller.register(source, zmq.POLLIN)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = int(_LINGER_SECONDS * 1000)
        socket.maxmsgsize = messages.MOST_BYTES
        socket.heartbeat_ivl, socket.heartbeat_timeout = 1000, 3000
        socket.sndhwm = 10_000
        socket.reconnect_ivl, socket.reconnect_ivl_max = 50, 1000
        return socket

    # ---- for every thread ------------------------------------------------------------------

    def start(self, wire: Wire) -> None:
        self._wire = wire
        self._thread = threading.Thread(target=self._run, name="zmq wire", daemon=True)
        self._thread.start()

    def pack(self, message: Any) -> Any:
        return messages.encode(message)

    def unpack(self, packed: Any) -> Any:
        return messages.decode(packed)

    def send(self, route: Any, header: Header, packed: Any) -> None:
        self._outgoing.append((route, header, packed))
        if threading.current_thread() is not self._thread:
            self._wake()

    def disconnect(self, address: str) -> None:
        self._outgoing.append((address, None, None))

    def close(self) -> None:
        self._is_closing = True
        if threading.current_thread() is not self._thread:
            self._wake()
            self._thread.join()

    def _wake(self) -> None:
        with self._wake_lock, contextlib.suppress(BlockingIOError):  # the pipe is full: the thread will read it
            if not self._has_ended:
                os.write(self._wake_writer, b"w")

    # ---- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            next_tick = time.monotonic()
            while not self._is_closing:
                wait = max(0.0, next_tick - time.monotonic())
                for source, _ in self._poller.poll(0 if self._outgoing else int(wait * 1000) + 1):
                    self._receive(source)
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK_SECONDS
                    self._wire.tick()
                self._send_queued()
                self._disconnect_unused()
            self._send_queued()
        except Exception:
            _log.exception("a thread of a wire has failed: the wire is closed")
            self._wire.close()
        finally:
            self._release()

    def _receive(self, source: Any) -> None:
        if source == self._wake_reader:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_reader, 4096)
            return
        for _ in range(100):  # not without a limit: the other sockets have packets too
            try:
                frames = source.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if source is self._zap:
                source.send_multipart(self._admit(frames))
            elif source is self._router:
                self._deliver(frames[1:], frames[0])
            else:
                self._deliver(frames, None)
            self._send_queued()

    def _deliver(self, frames: list[bytes], route: Any) -> None:
        try:
            if not frames or len(frames[0]) > _MOST_HEADER:
                raise ValueError("no header")
            header = msgpack.unpackb(frames[0], max_array_len=6)
        except Exception:  # msgpack may raise anything for the bytes of a stranger
            return self._wire.count("refused")
        return self._wire.deliver(header, frames[1:], route)

    def _admit(self, frames: list[bytes]) -> list[bytes]:
        """The answer to ZMQ's request (RFC 27, ZAP), which asks whether a client may connect."""
        key = z85.decode(self._keys.client_public.encode())
        is_ours = len(frames) == 7 and frames[5] == b"CURVE" and frames[6] == key
        if not is_ours:
            self._wire.count("refused")
        return [*frames[:2], *((b"200", b"OK", b"client") if is_ours else (b"400", b"No", b"")), b""]

    def _send_queued(self) -> None:
        while self._outgoing:
            route, header, packed = self._outgoing.popleft()
            if header is None:  # from `disconnect`
                self._unused.add(route)
                continue
            frames = [msgpack.packb(header), *(packed or ())]
            try:
                if isinstance(route, bytes):
                    self._router.send_multipart([route, *frames], zmq.NOBLOCK)
                elif route is not None:
                    (self._dealers.get(route) or self._connect(route)).send_multipart(frames, zmq.NOBLOCK)
            except zmq.ZMQError:
                self._wire.count("unsent")  # the queue is full, or the address is wrong. The peer sends it again

    def _disconnect_unused(self) -> None:
        """Close the sockets of addresses that are not needed. Only when no packet is being received: it may come from
        one of these sockets."""
        for address in self._unused & self._dealers.keys():
            self._poller.unregister(self._dealers[address])
            self._dealers.pop(address).close()
        self._unused.clear()

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
        self._poller.register(dealer, zmq.POLLIN)
        return dealer

    def _release(self) -> None:
        self._context.destroy(linger=int(_LINGER_SECONDS * 1000))
        with self._wake_lock:
            self._has_ended = True
            os.close(self._wake_reader)
            os.close(self._wake_writer)
