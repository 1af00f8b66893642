"""The newest parameters of a policy: a trainer publishes them, and actors and policy workers ask for newer ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from penstock.control.name_table import NameClient
from penstock.control.streams import Inboxes, offer, withdraw
from penstock.control.wire import Letter, Wire
from penstock.errors import NoReplyError, PeerLostError

_FOR_EVER = 1e9  # seconds
_FIRST_SECONDS = 100.0  # how long a worker waits for the first parameters


class ParameterServer:
    """Answers a request for parameters as soon as it has newer ones than the sender. Call `serve` often.

    Args:
        wire, names: the worker's.
        name: of the policy.
    """

    def __init__(self, wire: Wire, names: NameClient, name: str) -> None:
        self._names, self._key = names, f"parameters/{name}"
        self._inbox = offer(wire, names, self._key)
        #: Which life of a trainer this is. A version is (lineage, number).
        self.lineage = int(wire.id, 16)
        self._waiting = list[Letter]()
        self._newest: dict[str, Any] | None = None

    def publish(self, version: int, parameters: Mapping[str, Any]) -> None:
        """From now on these are the newest parameters. They are copied."""
        copies = {name: value.copy() for name, value in parameters.items()}
        self._newest = {"version": [self.lineage, version], "parameters": copies}
        self.serve()

    def serve(self) -> None:
        """Answer the workers that do not have the newest parameters."""
        while (letter := self._inbox.receive(0)) is not None:
            self._waiting.append(letter)
        if self._newest is None:
            return
        have = self._newest["version"]
        for letter in self._waiting:
            if letter.message != have:
                letter.reply(self._newest)
        self._waiting = [letter for letter in self._waiting if letter.message == have]

    def close(self) -> None:
        """Answer no more requests."""
        withdraw(self._names, self._key, self._inbox)


class ParameterClient:
    """Follows the parameters of one policy. If another trainer takes its name, it follows that one.

    Args:
        wire, names: the worker's.
        name: of the policy.
    """

    def __init__(self, wire: Wire, names: NameClient, name: str) -> None:
        self._name, self._servers = name, Inboxes(wire, names, f"parameters/{name}", 1)
        self._answer: Future[Any] | None = None
        #: The version that was returned last: lineage and number. The first number is 1.
        self.version = (0, 0)

    def first(self, is_over: Callable[[], bool]) -> dict[str, Any]:
        """Wait for the first parameters: nobody acts before. Raises `NoReplyError` if none come within 100 s, or if
        `is_over()`."""
        until = time.monotonic() + _FIRST_SECONDS
        while (parameters := self.newer()) is None:
            if is_over() or time.monotonic() > until:
                raise NoReplyError(f"no parameters of {self._name!r} have come: check that its trainer runs")
            time.sleep(0.01)
        return parameters

    def newer(self) -> dict[str, Any] | None:
        """Parameters by name, as writable arrays, if newer ones have arrived since the last call. Otherwise None.
        Raises `ClusterError` if what arrived cannot be read."""
        servers = self._servers.live()  # if the trainer has gone, this ends the request
        if self._answer is None and servers:
            with suppress(PeerLostError):  # it has ended just now
                self._answer = servers[0].ask(list(self.version), _FOR_EVER)
        if self._answer is None or not self._answer.done():
            return None
        answer, self._answer = self._answer, None
        if isinstance(answer.exception(), PeerLostError):
            return None
        message = answer.result()
        self.version = tuple(message["version"])
        parameters = {name: value.copy() for name, value in message["parameters"].items()}
        return self.newer() or parameters  # asks again
