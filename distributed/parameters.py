"""The newest parameters of a policy: a trainer publishes them, and actors and policy workers ask for newer ones.

The parameters are packed once for each version. Over sockets, the trainer sends them to four workers. It tells the
others which worker to ask: each one sends them on to four more.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from penstock.agents import Agent
from penstock.agents.shared_parameters import parameters_of
from penstock.distributed.names import NameClient
from penstock.distributed.streams import Inboxes, NamedInbox
from penstock.distributed.wire import Call, Node, Peer, PendingReply, pack_once
from penstock.errors import NoReplyError, PeerLostError

_FOR_EVER = 1e9  # seconds
_FIRST_SECONDS = 100.0  # how long a worker waits for the first parameters
_PASS_SECONDS = 120.0  # how long another worker may take to send the parameters on, unless it is silent


def by_policy(agent: Any) -> dict[str, Agent]:
    """A dict of agents as it is; one agent as `{"": agent}`."""
    return dict(agent) if isinstance(agent, Mapping) else {"": agent}


def read_parameters(agent: Any) -> dict[str, Any]:
    """The parameters of an agent, as `parameters_of`. With a dict of agents, names are such as `speaker/weight`."""
    values: dict[str, Any] = {}
    for policy, part in by_policy(agent).items():
        for name, value in parameters_of(part).items():
            values[f"{policy}/{name}" if policy else name] = value
    return values


def write_parameters(agent: Any, parameters: Mapping[str, Any]) -> None:
    """Copy parameters into an agent, or a dict of agents, as `read_parameters` returns them."""
    for policy, part in by_policy(agent).items():
        head = f"{policy}/" if policy else ""
        part.write_parameters({n.removeprefix(head): value for n, value in parameters.items() if n.startswith(head)})


class ParameterServer(NamedInbox):
    """Answers a request for parameters as soon as it has newer ones than the sender. Call `serve` often.

    Args:
        wire, names: the worker's.
        name: of the policy.
    """

    def __init__(self, wire: Node, names: NameClient, name: str) -> None:
        super().__init__(wire, names, f"parameters/{name}", repeatable=True)
        self._wire = wire
        #: Which life of a trainer this is. A version is (lineage, number).
        self.lineage = int(wire.id, 16)
        self._waiting: list[Call] = []
        self._version: list[int] | None = None
        self._packed = list[Any]()
        #: How often this server has sent this version.
        self.n_sent = 0
        self._holders = list[Any]()  # the places that have this version, or get it now

    def publish(self, version: int, parameters: Mapping[str, Any]) -> None:
        """From now on these are the newest parameters. They are copied."""
        self._version, self.n_sent, self._holders = [self.lineage, version], 0, []
        self._packed = []  # its memory may be used again
        message = {"version": self._version, "parameters": dict(parameters)}
        self._packed = pack_once(message)
        self.serve()

    def serve(self) -> None:
        """Answer the workers that do not have the newest parameters."""
        while (call := self._inbox.receive(0)) is not None:
            self._waiting.append(call)
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            if not isinstance(call.message, dict) or call.message.keys() != {"version", "place", "is_urgent"}:
                call.fail("this is no request for parameters")
            elif self._version is None or call.message["version"] == self._version:
                self._waiting.append(call)
            else:
                self._send(call)

    def _send(self, call: Call) -> None:
        """Send the parameters, or say which of the workers before this one has them, or gets them now."""
        fan, place = self._wire.fan, call.message["place"]
        self._holders.append(place)
        if self.n_sent < fan or call.message["is_urgent"]:
            self.n_sent += 1
            call.reply_packed(self._packed)
        else:
            call.reply({"ask": self._holders[(len(self._holders) - 1) // fan - 1], "version": self._version})


class ParameterClient:
    """Follows the parameters of one policy, and sends them on. If another trainer takes its name, it follows that one.

    Args:
        wire, names: the worker's.
        name: of the policy.
    """

    def __init__(self, wire: Node, names: NameClient, name: str) -> None:
        self._names, self._name, self._lock = names, name, threading.RLock()
        self._trainers = Inboxes(names, f"parameters/{name}")
        self._trainer: Peer | None = None
        self._other: Peer | None = None  # a worker that sends parameters on
        self._come: dict[str, Any] | None = None  # parameters that have arrived, and that `newer` has not returned yet
        self._error: BaseException | None = None
        self._version, self._packed = [0, 0], list[Any]()  # what this worker can send on
        self._waiting: list[Call] = []
        #: The version that was returned last: lineage and number. The first number is 1.
        self.version = (0, 0)
        self._inbox = wire.open(f"parameters/{name}/{next(wire.numbers)}", self._pass_on, repeatable=True)
        #: Where others ask it for parameters: address, node id and name of the inbox.
        self.place = [wire.address, wire.id, self._inbox.name]

    def first(self, is_over: Callable[[], bool]) -> dict[str, Any]:
        """Wait for the first parameters: a worker must not act before they are there. Raises `NoReplyError` if none
        come within 100 s, or if `is_over()`."""
        until = time.monotonic() + _FIRST_SECONDS
        while (parameters := self.newer()) is None:
            if is_over() or time.monotonic() > until:
                raise NoReplyError(f"no parameters of {self._name!r} have come: check that its trainer runs")
            time.sleep(0.01)
        return parameters

    def newer(self) -> dict[str, Any] | None:
        """Parameters by name, as writable arrays, if newer ones have arrived since the last call. Otherwise None.
        Raises `ClusterError` if what arrived cannot be read."""
        trainers = self._trainers.live()
        if trainers and trainers[0] is not self._trainer:
            with self._lock:
                self._trainer = trainers[0]
                self._ask()
        with self._lock:
            message, self._come = self._come, None
            error, self._error = self._error, None
        if error is not None:
            raise error
        if message is None:
            return None
        self.version = tuple(message["version"])
        return {name: value.copy() for name, value in message["parameters"].items()}

    def _ask(self, *, is_urgent: bool = False) -> None:
        """Ask the trainer for a newer version; if it is urgent, for the parameters themselves."""
        if self._trainer is not None:
            request = {"version": self._version, "place": self.place, "is_urgent": is_urgent}
            with contextlib.suppress(PeerLostError):  # it has ended just now
                answer = self._trainer.ask(request, _FOR_EVER)
                answer.add_done_callback(partial(self._told, self._trainer))

    def _told(self, peer: Peer, answer: Future[Any]) -> None:
        """An answer has come, in a thread of the wire."""
        with self._lock:
            error = answer.exception()
            if peer is self._trainer and error is not None:
                self._error = None if isinstance(error, PeerLostError) else error
            elif peer is self._trainer and "ask" in answer.result():
                self._ask_another(answer.result())
            elif peer is self._trainer or (peer is self._other and self._trainer is not None):
                if error is not None or answer.result()["version"][0] != int(self._trainer.place[1], 16):
                    return self._ask(is_urgent=True)  # the other worker has ended, or follows another trainer
                assert isinstance(answer, PendingReply)
                self._come, self._packed = answer.result(), answer.reply
                self._version = self._come["version"]
                waiting, self._waiting = self._waiting, []
                for call in waiting:
                    call.reply_packed(self._packed)
                self._ask()
        return None

    def _ask_another(self, message: dict[str, Any]) -> None:
        """Ask the worker that the trainer has named."""
        if self._other is None or self._other.is_dead or self._other.place != message["ask"]:
            other, self._other = self._other, self._names.reach(message["ask"])
            if other is not None:
                other.lose("it is not needed any more")
        try:
            answer = self._other.ask(message["version"], _PASS_SECONDS)
        except PeerLostError:  # it has ended just now
            return self._ask(is_urgent=True)
        return answer.add_done_callback(partial(self._told, self._other))

    def _pass_on(self, call: Call) -> None:
        """Another worker asks for a version that the trainer has sent here, or sends here soon."""
        with self._lock:
            mine, wanted = self._version, call.message
            if not (isinstance(wanted, list) and [*map(type, wanted)] == [int, int]):
                call.fail("this is no version of parameters")
            elif wanted[0] == mine[0] and wanted[1] <= mine[1]:
                call.reply_packed(self._packed)
            else:
                self._waiting.append(call)
