"""The newest parameters of a policy: a trainer publishes them, and actors and policy workers ask for newer ones."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from penstock.control.name_table import NameClient
from penstock.control.streams import offer, withdraw
from penstock.control.wire import Letter, Peer, Wire
from penstock.errors import ClusterError, PeerLostError

_FOR_EVER = 1e9  # seconds


class ParameterServer:
    """Answers a request for parameters as soon as it has newer ones than the sender. Call `serve` often.

    Args:
        wire, names: the worker's.
        name: of the policy.
    """

    def __init__(self, wire: Wire, names: NameClient, name: str) -> None:
        self._names, self._key = names, f"parameters/{name}"
        self._inbox = offer(wire, names, self._key)
        self._id, self._waiting = wire.id, list[Letter]()
        self._newest: dict[str, Any] | None = None

    def publish(self, version: int, parameters: Mapping[str, Any]) -> None:
        """From now on these are the newest parameters. They are copied."""
        copies = {name: value.copy() for name, value in parameters.items()}
        self._newest = {"version": version, "server": self._id, "parameters": copies}
        self.serve()

    def serve(self) -> None:
        """Answer the workers that do not have the newest parameters."""
        while (letter := self._inbox.receive(0)) is not None:
            self._waiting.append(letter)
        if self._newest is None:
            return
        have = [self._newest["server"], self._newest["version"]]
        for letter in self._waiting:
            if letter.message != have:
                letter.reply(self._newest)
        self._waiting = [letter for letter in self._waiting if letter.message == have]

    def close(self) -> None:
        """Answer no more requests."""
        withdraw(self._names, self._key, self._inbox)


class ParameterClient:
    """Follows the parameters of one policy. It never waits for newer ones.

    Args:
        wire, names: the worker's.
        name: of the policy.
    """

    def __init__(self, wire: Wire, names: NameClient, name: str) -> None:
        self._names, self._key = names, f"parameters/{name}"
        self._peer: Peer | None = None
        self._answer: Future[Any] | None = None
        self._have: list[Any] = ["", 0]
        #: The version that `newer` has returned last; 0 before that.
        self.version = 0

    def newer(self) -> dict[str, Any] | None:
        """Parameters by name, as writable arrays, if newer ones have arrived since the last call. Otherwise None.
        Raises `ClusterError` if what arrived cannot be read."""
        if self._answer is None:
            self._ask()
        if self._answer is None or not self._answer.done():
            return None
        answer, self._answer = self._answer, None
        if isinstance(answer.exception(), PeerLostError):  # the trainer has ended, and may be started again
            self._peer = None
            return None
        message = answer.result()
        self._have, self.version = [message["server"], message["version"]], message["version"]
        self._ask()
        return {name: value.copy() for name, value in message["parameters"].items()}

    def _ask(self) -> None:
        try:
            if self._peer is None or self._peer.is_dead:
                self._peer = self._names.peer(self._key)
            self._answer = self._peer.ask(self._have, _FOR_EVER)
        except ClusterError:  # there is no trainer now
            self._peer = self._answer = None
