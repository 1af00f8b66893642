"""An inbox of another wire, as this wire sees it: it sends requests, and sends them again until they are answered."""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cluster.messages import BadMessageError
from penstock.cluster.transport import ASK, ERROR, GONE, MISSING, PENDING, PROBE, REPLY, TELL, Header, Transport
from penstock.errors import NoReplyError, PeerLostError, RequestError

if TYPE_CHECKING:
    from penstock.cluster.wire import Wire


class Answer(Future[Any]):
    """What comes back for one request. The thread that waits for it receives packets meanwhile.

    After it has come, `done`, `result` and `exception` take no lock: each request calls them several times.
    """

    _is_over = False
    _value: Any = None
    _error: BaseException | None = None

    def __init__(self, transport: Transport) -> None:
        super().__init__()
        self._transport = transport

    def cancel(self) -> bool:
        return False  # the request is on its way

    def running(self) -> bool:
        return not self._is_over

    def set_result(self, result: Any) -> None:
        self._value, self._is_over = result, True
        super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        self._error, self._is_over = exception, True
        super().set_exception(exception)

    def done(self) -> bool:
        return self._is_over

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has come, for `timeout` seconds. Returns whether it has."""
        if not self._is_over:
            until = float("inf") if timeout is None else time.monotonic() + timeout
            self._transport.attend(self.done, until)
            if not self._is_over:  # another thread receives
                wait([self], None if timeout is None else until - time.monotonic())
        return self._is_over

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._error if self.wait(timeout) else super().exception(0)

    def result(self, timeout: float | None = None) -> Any:
        error = self.exception(timeout)
        if error is None:
            return self._value
        try:
            raise error
        finally:
            del error, self  # its traceback would keep both


_FIRST_PROBE, _LAST_PROBE = 0.25, 1.0  # seconds without a reply until the first probe, and between the later ones


@dataclass
class _Request:
    future: Answer
    kind: int
    packed: Any
    deadline: float
    probe_at: float
    interval: float = _FIRST_PROBE


class Peer:
    """An inbox of another wire. Make it with `names.peer(key)` or `wire.reach(...)`.

    If that wire is closed and another one opens an inbox with the same name, make a new peer.
    """

    def __init__(self, wire: Wire, name: str, address: str, target: str, credit: int, lost_after: float) -> None:
        self.name, self.address = name, address
        self._wire, self._target, self._credit, self._lost_after = wire, target, credit, lost_after
        self._id = f"{wire.id}.{next(wire.numbers)}"
        self._requests: dict[int, _Request] = {}
        self._next, self._n_told = 0, 0
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
    def n_told(self) -> int:
        """How many messages the other side has not taken from its inbox yet."""
        return self._n_told

    @property
    def has_credit(self) -> bool:
        """Whether `tell` would send a message."""
        return self._lost is None and self._n_told < self._credit

    def ask(self, message: Any, timeout: float) -> Answer:
        """Send a request. The future gets the reply, or `NoReplyError` after `timeout` seconds, `PeerLostError`, or
        `RequestError` with what the other side reported. Raises `BadMessageError` if `message` cannot be sent."""
        future = self._send(ASK, message, timeout)
        assert future is not None  # only `tell` needs credit
        return future

    def tell(self, message: Any) -> bool:
        """Send a message, unless `credit` earlier ones are still in the inbox. Returns whether it was sent. Raises
        `PeerLostError` if the other side has ended: messages that it has not taken are lost."""
        return self.tell_and_hear(message) is not None

    def tell_and_hear(self, message: Any) -> Answer | None:
        """As `tell`, but returns a future that ends when the message is taken, or None without credit."""
        return self._send(TELL, message, float("inf"))

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

    def _send(self, kind: int, message: Any, timeout: float) -> Answer | None:
        if kind == TELL and self._lost is None and not self.has_credit:
            return None
        transport = self._wire.transport
        future = Answer(transport)
        packed = transport.pack(message)
        now = time.monotonic()
        with self._wire.lock:
            if self._lost is not None:
                raise PeerLostError(self._lost)
            if kind == TELL:
                if self._n_told >= self._credit:
                    return None
                self._n_told += 1
            if not self._requests:
                self._silent_since = None  # nothing was expected
            number, self._next = self._next, self._next + 1
            self._requests[number] = _Request(future, kind, packed, now + timeout, now + _FIRST_PROBE)
            header = self._header(kind, number)
        transport.send(self.address, header, packed)
        return future

    def _header(self, kind: int, number: int) -> Header:
        oldest = next(iter(self._requests), self._next)  # the requests are in order
        return kind, self._target, self.name, self._id, number, min(oldest, number)

    def _send_packet(self, kind: int, number: int, packed: Any = None) -> None:
        with self._wire.lock:
            header = self._header(kind, number)
        self._wire.transport.send(self.address, header, packed)

    def release(self) -> None:
        """This peer is not needed any more."""
        self.lose("it was released")

    def heard(self, kind: int, number: int, packed: Any) -> None:
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
                self._n_told -= request.kind == TELL
        if kind == MISSING:
            self._send_packet(request.kind, number, request.packed)
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
                    request.interval = min(request.interval * 2, _LAST_PROBE)
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
            self._send_packet(PROBE, number)
