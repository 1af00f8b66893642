"""Sample streams, from producers to consumers, and inference streams, from clients to servers. They find each other by
name."""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NoReturn

from penstock.arguments import integer
from penstock.distributed.names import NameClient, is_place
from penstock.distributed.wire import Call, Node, Peer
from penstock.errors import ConfigError, NoReplyError, PeerLostError

_LOOK_SECONDS = 0.5  # between two tries to reach an inbox that was lost


class Inboxes:
    """The inboxes that can be reached, of all that the name table has below `root`.

    If one is silent, or its name has gone, its process may be busy or suspended. So it is lost only if there is another
    one, or if another process has its name. Until then, what was sent to it is not sent again.
    """

    def __init__(self, names: NameClient, root: str) -> None:
        self._names, self._root = names, root
        self._peers: dict[str, Peer] = {}
        self._live: list[Peer] = []
        self._version, self._look_at = -1, 0.0
        self._lock = threading.Lock()

    def live(self) -> list[Peer]:
        """Peers for them, sorted by name. One that was lost is tried again every half second."""
        self._names.require_own()
        with self._lock:
            if self._version < 0:
                self._names.follow(self._root)
            now, version = time.monotonic(), self._names.version
            if version != self._version or now >= self._look_at:
                self._version, self._look_at = version, now + _LOOK_SECONDS
                self._look()
            return [peer for peer in self._live if not peer.is_dead]

    def _look(self) -> None:
        places = {key: place for key, place in self._names.followed(self._root).items() if is_place(place)}
        for key, place in places.items():
            old = self._peers.get(key)
            if old is None or old.is_dead or old.place != list(place):
                self._peers[key] = self._names.reach(place, lost_after=float("inf"))
                if old is not None:
                    old.lose("another process has its name")
        self._live = [peer for key, peer in sorted(self._peers.items()) if key in places and not peer.is_silent]
        if self._live:
            for key in [key for key, peer in self._peers.items() if peer not in self._live]:
                self._peers.pop(key).lose("it is silent, or its name has gone")


class NamedInbox:
    """A new inbox, which the name table lists as `key`. It replaces an older inbox of this name, which has ended.
    `Inbox` explains `handler` and `repeatable`."""

    def __init__(
        self,
        wire: Node,
        names: NameClient,
        key: str,
        handler: Callable[[Call], None] | None = None,
        *,
        repeatable: bool = False,
    ) -> None:
        self._names, self._key, self._inbox = names, key, wire.open(key, handler, repeatable=repeatable)
        try:
            names.announce(key, self._inbox, replace=True)
        except BaseException:
            self._inbox.close()
            raise

    def close(self) -> None:
        """Answer no more, and delete the name. In a fork of its process it does nothing."""
        if self._inbox.node.left:
            return
        self._inbox.close()
        with contextlib.suppress(PeerLostError, NoReplyError):  # the name table has ended, and the name with it
            self._names.delete(self._key)


class SampleProducer:
    """Puts pieces into a sample stream.

    A piece waits at the consumer until it is taken. When `credit` pieces wait there, `put` waits. So the memory is
    bounded, and no piece is dropped.

    If a consumer ends, it may have pieces that it has not taken. The next `put` or `flush` sends them to another
    consumer. If a consumer ends just when it takes a piece, or is silent for more than 3 seconds while there is another
    one, a piece may be consumed twice. Do not change a piece after `put`.

    Args:
        wire, names: the worker's.
        stream: the name of the stream.
        credit: how many pieces of this producer may wait at one consumer.
    """

    def __init__(self, wire: Node, names: NameClient, stream: str, *, credit: int = 4) -> None:
        integer("credit", credit, 1)
        self._consumers, self._credit = Inboxes(names, f"streams/{stream}"), credit
        self._lock = threading.Lock()  # of what the callback changes too
        self._returned: list[Any] = []  # pieces of consumers that have ended
        self._n_waiting = 0  # how often a piece was sent that its consumer has not taken yet
        self._refused: BaseException | None = None  # what a consumer that could not read a piece has reported

    def put(self, piece: Any, timeout: float) -> bool:
        """Send a piece. Returns False if no consumer had room for it within `timeout` seconds: put it again then.

        Raises `RequestError` if a consumer could not read or use an earlier piece.
        """
        deadline = time.monotonic() + timeout
        while True:
            if self._flush_returned() and self._try(piece):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)

    def has_room(self) -> bool:
        """Whether `put` would send a piece at once."""
        return self._flush_returned() and self._next_consumer() is not None

    def flush(self, timeout: float) -> bool:
        """Wait until consumers have taken every piece. Returns whether they have."""
        deadline = time.monotonic() + timeout
        while True:
            self._flush_returned()
            with self._lock:
                if not self._returned and not self._n_waiting and self._refused is None:
                    return True
            if time.monotonic() >= deadline:
                return False
            self._consumers.live()  # pieces of a consumer whose name has gone come back
            time.sleep(0.001)

    def _flush_returned(self) -> bool:
        if self._refused is not None:
            raise self._refused
        with self._lock:
            pieces, self._returned = self._returned, []
        for i, piece in enumerate(pieces):
            if not self._try(piece):
                with self._lock:
                    self._returned += pieces[i:]
                return False
        return True

    def _next_consumer(self) -> Peer | None:
        """The one with the fewest waiting pieces. None if there is no consumer, or none has room."""
        peer = min(self._consumers.live(), key=lambda peer: peer.n_waiting, default=None)
        return peer if peer is not None and peer.n_waiting < self._credit else None

    def _try(self, piece: object) -> bool:
        if (peer := self._next_consumer()) is None:
            return False
        try:
            taken = peer.ask(piece, float("inf"))
        except PeerLostError:  # it has ended just now
            return False
        with self._lock:
            self._n_waiting += 1
        taken.add_done_callback(partial(self._on_taken, piece))
        return True

    def _on_taken(self, piece: object, future: Future[Any]) -> None:
        error = future.exception()
        with self._lock:
            self._n_waiting -= 1
            if isinstance(error, PeerLostError):
                self._returned.append(piece)
            elif error is not None:
                self._refused = self._refused or error


class SampleConsumer(NamedInbox):
    """Takes the pieces of a sample stream.

    Args:
        wire, names: the worker's.
        stream: the name of the stream.
        name: of this consumer; the consumers of a stream have different names.
        holds: a piece that was taken counts as waiting until `release` is called.
        check: returns why a piece cannot be used, or "". Then the piece is dropped, and its producer fails with this
            text.
    """

    def __init__(
        self,
        wire: Node,
        names: NameClient,
        stream: str,
        name: str,
        *,
        holds: bool = False,
        check: Callable[[Any], str] = lambda piece: "",
    ) -> None:
        super().__init__(wire, names, f"streams/{stream}/{name}")
        self._holds, self._held, self._check = holds, list[Call](), check

    def get(self, timeout: float) -> Any:
        """The next piece. Raises `NoReplyError` if none comes within `timeout` seconds."""
        while (call := self._inbox.receive(timeout)) is not None:
            if reason := self._check(call.message):
                call.fail(reason)
                continue
            self._held.append(call)
            if not self._holds:
                self.release()
            return call.message
        raise NoReplyError(f"no piece has come through {self._key} within {timeout:g} s")

    def release(self) -> None:
        """The producers of the pieces that were taken may send as many more."""
        held, self._held = self._held, []
        for call in held:
            call.reply()

    def __len__(self) -> int:
        return len(self._inbox)


class InferenceClient:
    """Asks the servers of an inference stream. It always asks the same server, chosen by `name`. If that server ends,
    it asks another one.

    Args:
        wire, names: the worker's.
        stream: the name of the stream.
        name: of this client.
        timeout: seconds without an answer, after which `ask` raises.
        is_over: returns whether to stop waiting for an answer. Then `ask` raises too.
        generation: how often this client was started again.
    """

    def __init__(
        self,
        wire: Node,
        names: NameClient,
        stream: str,
        name: str,
        *,
        timeout: float = 60.0,
        is_over: Callable[[], bool] = lambda: False,
        generation: int = 0,
    ) -> None:
        self._generation = generation
        self._servers = Inboxes(names, f"policies/{stream}")
        self._wire, self._stream, self._name, self._timeout = wire, stream, name, timeout
        self._index, self._is_over = zlib.crc32(name.encode()), is_over
        self._server: str | None = None  # the place of the server that was asked last
        #: How often it had to ask another server, or had lost one and reached it again.
        self.n_moves = 0

    @property
    def generation(self) -> int:
        """Of the random streams: another one for each client that was started again, and each change of the server."""
        return (self._generation << 16) + self.n_moves

    def ask(self, message: dict[str, Any]) -> Any:
        """The answer to `message`, to which this adds a `session`: the first request to a server begins a new session.

        Raises `NoReplyError` if no server answers in time, and `RequestError` if a server refuses.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or self._is_over():
                raise NoReplyError(
                    f"no server of the inference stream {self._stream} has answered in time: check that its policy "
                    "workers run"
                )
            servers = self._servers.live()
            if not servers:
                time.sleep(0.05)
                continue
            server = next((peer for peer in servers if str(peer.place) == self._server), None)
            if server is None:
                server = servers[self._index % len(servers)]
                self.n_moves += self._server is not None
                self._server = str(server.place)
            try:
                session = {"session": f"{self._wire.id}.{self.n_moves}", "generation": self.generation}
                future = server.ask({**message, **session}, left)
                while not self._is_over():
                    if wait([future], _LOOK_SECONDS).done:
                        return future.result()
                    self._servers.live()  # if the server has ended, this ends the future with a PeerLostError
            except PeerLostError:
                # Ask another server. If it is the same one, it may have acted for this request already: then its
                # recurrent state is one step ahead, and a new session is needed as well.
                self._server = ""

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "an agent that asks an inference stream cannot go into other processes: give the actor a GpuSampler, an "
            "AlternatingSampler or a SerialSampler"
        )


class InferenceInbox(NamedInbox):
    """The inbox of a server of an inference stream.

    Args:
        wire, names: the worker's.
        stream: the name of the stream.
        name: of this server.
    """

    def __init__(self, wire: Node, names: NameClient, stream: str, name: str) -> None:
        super().__init__(wire, names, f"policies/{stream}/{name}")

    def receive(self, timeout: float) -> Call | None:
        """The next request, or None."""
        return self._inbox.receive(timeout)
