"""The newest parameters of a policy: a trainer publishes them, and actors and policy workers ask for newer ones."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from penstock.agents import Agent
from penstock.distributed.names import NameClient
from penstock.distributed.streams import Inboxes, NamedInbox
from penstock.distributed.wire import Call, Node, Peer, pack_once
from penstock.errors import ConfigError, NoReplyError, PeerLostError

PARAMETERS = "policy"  #: the name under which the trainer of an experiment publishes
_FOR_EVER = 1e9  # seconds
_FIRST_SECONDS = 100.0  # how long a worker waits for the first parameters


def by_policy(agent: Any) -> dict[str, Agent]:
    """A dict of agents as it is; one agent as `{"": agent}`."""
    return dict(agent) if isinstance(agent, Mapping) else {"": agent}


def read_parameters(agent: Any) -> dict[str, Any]:
    """The parameters of an agent, as arrays by name. With a dict of agents, names are such as `speaker/weight`.

    The function of a `FunctionAgent` is not one of them: no code crosses a wire. Each machine has its own.
    """
    values: dict[str, Any] = {}
    for policy, part in by_policy(agent).items():
        for name, value in part._parameters_to_send().items():
            values[f"{policy}/{name}" if policy else name] = value
    return values


def write_parameters(agent: Any, parameters: Mapping[str, Any]) -> None:
    """Copy parameters into an agent, or a dict of agents, as `read_parameters` returns them. Raises `ConfigError` if
    the agent has others."""
    own, given = layout_of(read_parameters(agent)), layout_of(parameters)
    if own != given:
        name = min(name for name in {*own, *given} if own.get(name) != given.get(name))
        raise ConfigError(
            f"the parameters of the trainer do not fit the agent of this worker: {name!r} is "
            f"{given.get(name, 'missing')}, and here {own.get(name, 'missing')}. Names, shapes and dtypes must stay "
            "the same, and all machines must have the same code"
        )
    for policy, part in by_policy(agent).items():
        head = f"{policy}/" if policy else ""
        if values := {n.removeprefix(head): value for n, value in parameters.items() if n.startswith(head)}:
            part.write_parameters(values)


def layout_of(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Dtype and shape of each array, by name."""
    return {name: f"{array.dtype}{list(array.shape)}" for name, array in arrays.items()}


class ParameterServer(NamedInbox):
    """Answers a request for parameters as soon as it has newer ones than the sender. It answers in the thread of the
    node, so a worker gets them while the trainer is in a step."""

    def __init__(self, wire: Node, names: NameClient, name: str) -> None:
        #: Which start of a trainer this is. A version is (lineage, number).
        self.lineage = int(wire.id, 16)
        self._lock = threading.Lock()
        self._waiting: list[Call] = []  # from those that have the newest version
        self._version: list[int] | None = None
        self._packed = list[Any]()  # once for all
        super().__init__(wire, names, f"parameters/{name}", self._answer, repeatable=True)

    def publish(self, version: int, parameters: Mapping[str, Any]) -> None:
        """From now on these are the newest parameters. They are copied."""
        packed = pack_once({"version": [self.lineage, version], "parameters": dict(parameters)})
        with self._lock:
            self._version, self._packed = [self.lineage, version], packed
            waiting, self._waiting = self._waiting, []
        for call in waiting:
            call.reply_packed(packed)

    def _answer(self, call: Call) -> None:
        with self._lock:
            packed = self._packed
            if not (isinstance(call.message, list) and [*map(type, call.message)] == [int, int]):
                return call.fail("this is no version of parameters")
            if call.message == self._version or self._version is None:
                return self._waiting.append(call)
        return call.reply_packed(packed)


class ParameterClient:
    """Follows the parameters with this name. If another trainer takes the name, it follows that one."""

    def __init__(self, names: NameClient, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._trainers = Inboxes(names, f"parameters/{name}")
        self._trainer: Peer | None = None
        self._come: dict[str, Any] | None = None  # parameters that have arrived, and that `newer` has not returned yet
        self._error: BaseException | None = None
        #: The version that was returned last: lineage and number. The first number is 1.
        self.version = (0, 0)

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
                self._trainer, self._come, self._error = trainers[0], None, None
            self._ask(trainers[0], list(self.version))
        with self._lock:
            message, self._come = self._come, None
            error, self._error = self._error, None
        if error is not None:
            raise error
        if message is None:
            return None
        self.version = tuple(message["version"])
        return {name: value.copy() for name, value in message["parameters"].items()}

    def _ask(self, trainer: Peer, version: list[int]) -> None:
        """Ask for what is newer than this version."""
        with contextlib.suppress(PeerLostError):  # it has ended just now
            trainer.ask(version, _FOR_EVER).add_done_callback(partial(self._told, trainer))

    def _told(self, trainer: Peer, answer: Future[Any]) -> None:
        """An answer has come, in a thread of the wire."""
        error = answer.exception()
        with self._lock:
            if trainer is not self._trainer or isinstance(error, PeerLostError):
                return
            self._error = error
            if error is None:
                self._come = answer.result()
        if error is None:
            self._ask(trainer, answer.result()["version"])
