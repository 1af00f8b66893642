"""Workers in Ray actors, which Ray places and watches. Messages between them go over sockets, as without Ray; but large
ones, such as pieces of images, go through Ray's object store."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import psutil
import ray
from ray import exceptions as ray_errors

from penstock.buffers import pickling
from penstock.distributed.keys import Connection
from penstock.distributed.placement import actor_options
from penstock.distributed.role import Worker
from penstock.distributed.wire import Header, Line, Node, Peer

_START_SECONDS = 120.0
_LARGE = 4 * 2**20  # bytes of a message from which on the object store takes less CPU time than sockets
_NAMESPACE = "penstock"  # of the names of the actors

_own_name = ""  # the name of the actor that this process runs; empty in other processes
_nodes: dict[str, RayNode] = {}  # those of this process, by address


class RayNode(Node):
    """Sends small messages over sockets. A large one is the argument of a call of the actor that gets it: Ray puts it
    into its object store, from which the receiver reads it without a copy. The address of a node in an actor ends with
    "#" and the name of the actor."""

    def __init__(self, keys: Connection, host: str, port: int) -> None:
        super().__init__(keys, host, port)
        self.address += f"#{_own_name}"
        self._actors: dict[str, Any] = {}  # by name
        _nodes[self.address] = self

    def send(self, route: Any, header: Header, packed: list[Any]) -> None:
        """Send a packet. A way back is the address of its sender, if the request has come through Ray."""
        if isinstance(route, str):
            with self.lock:
                line = self._lines.setdefault(route, Line(route))
                line.peers.setdefault("", _WayBack(self, "", line, "", float("inf")))
            if not line.route:
                self.connect(line)
            route = line  # ZeroMQ keeps what is sent until it is connected
        name = route.address.partition("#")[2] if isinstance(route, Line) and route.address != self.address else ""
        if not name or sum(map(len, packed)) < _LARGE:
            return super().send(route, header, packed)
        try:
            if name not in self._actors:
                self._actors[name] = ray.get_actor(name, _NAMESPACE)
            frames = [np.frombuffer(frame, np.uint8) for frame in packed]
            self._actors[name].bring.remote(header, route.address, self.address, frames)
        except (ValueError, ray_errors.RayError):  # it has ended
            self._actors.pop(name, None)
            self.count("unsent")
        return None

    def bring(self, header: Header, route: str, frames: list[Any]) -> None:
        """A large packet has come from the node at the address `route`."""
        self.count("large")
        self.do(self.received, header, [memoryview(frame) for frame in frames], route)

    def close(self) -> None:
        """As `Node.close`."""
        _nodes.pop(self.address, None)
        super().close()


class _WayBack(Peer):
    """In the place of a peer, for the senders of large messages: their requests have not come through the connection
    that their replies take. If it was lost and made anew, only this end knows that replies may have been lost."""

    def send(self, *numbers: int) -> None:
        """Send all replies again that the senders at this address may not have."""
        for key, sender in self.node.senders.items():
            for number, reply in sender.replies.items() if sender.route == self._line.address else ():
                if reply is not None:
                    self.node.send(sender.route, (reply[0], "", sender.inbox, key, number, 0, 0), reply[1])


class RayConnection(Connection):
    """What a process of a Ray cluster needs to join a trial. Its nodes listen at the address that its machine has in
    the cluster."""

    def wire(self, port: int = 0) -> Node:
        """A new node."""
        return RayNode(self, ray.util.get_node_ip_address(), port)


class ActorProcess:
    """What runs in the process of an actor. Its methods compute nothing: a worker has a separate thread.

    Args:
        name: of this actor.
        owner: node, process id and start time of the process that has made it.
    """

    def __init__(self, name: str, owner: tuple[str, int, float]) -> None:
        global _own_name  # noqa: PLW0603 - a property of the process
        _own_name = name
        threading.Thread(target=_end_with, args=owner, name="watchdog", daemon=True).start()

    def pid(self) -> int:
        """The process id."""
        return os.getpid()

    def bring(self, header: Header, address: str, route: str, frames: list[Any]) -> None:
        """A large packet has come for the node at `address`, from the node at `route`."""
        if (node := _nodes.get(address)) is not None:
            node.bring(header, route, frames)

    def run(self, code: bytes) -> str:
        """Run a worker until it ends. Returns its status."""
        result: Future[str] = Future()

        def work() -> None:
            try:
                make, connection, name = pickle.loads(code)
                result.set_result(make().run(connection, name).value)
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=work, name="worker", daemon=True).start()
        return result.result()


def _node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _end_with(node: str, pid: int, start_time: float) -> None:
    """End this process as soon as its owner has ended, if that is on this machine. Ray does it some seconds later."""
    with contextlib.suppress(psutil.Error):  # this container does not see the processes of the owner's
        if node == _node() and (owner := psutil.Process(pid)).create_time() == start_time:
            owner.wait()
            os.kill(os.getpid(), signal.SIGKILL)


class LaunchedActor:
    """A worker in a Ray actor, on whichever node has room for it. It ends with the process that has made it."""

    def __init__(
        self, make: Callable[[], Worker], connection: Connection, name: str, resources: Mapping[str, float]
    ) -> None:
        own_name = f"worker-{uuid.uuid4().hex}"
        options = {**actor_options(resources), "max_concurrency": 4, "name": own_name, "namespace": _NAMESPACE}
        owner = _node(), os.getpid(), psutil.Process().create_time()
        self._actor = ray.remote(ActorProcess).options(**options).remote(own_name, owner)
        self._ended: Future[str] = self._actor.run.remote(pickling.dumps((make, connection, name))).future()

    @property
    def pid(self) -> int:
        """Its process id, on its node."""
        return int(ray.get(self._actor.pid.remote(), timeout=_START_SECONDS))

    def ending(self) -> str | None:
        """How it has ended, or None while it runs."""
        if not self._ended.done():
            return None
        error = self._ended.exception()
        if error is None:
            return f"its worker is {self._ended.result()}"
        if isinstance(error, ray_errors.ActorDiedError):
            return "its Ray actor was killed, or has ended"
        return str(error).strip().splitlines()[-1]

    def wait(self, timeout: float) -> bool:
        """Wait until it has ended. Returns whether it has. Then nothing of it is left."""
        if not wait([self._ended], timeout).done:
            return False
        self.kill()
        return True

    def kill(self) -> None:
        """Kill the actor."""
        if ray.is_initialized():  # otherwise Ray has ended it
            ray.kill(self._actor)

    def stacks(self) -> str:
        """It may be on another machine."""
        return ""
