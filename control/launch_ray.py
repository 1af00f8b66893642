"""Workers, and the name table, in Ray actors. Each has a separate actor, which has a name and ends with the panel."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

import cloudpickle
import psutil
import ray
from ray import exceptions as ray_errors

from penstock.cluster.placement import actor_options
from penstock.control.name_table import NameHost
from penstock.control.wire_ray import NAMESPACE, Packet, RayConnection, RayHub, new_name
from penstock.control.worker import Connection, Worker
from penstock.errors import ConfigError

_START_SECONDS = 120.0


class ActorProcess:
    """What runs in the process of an actor. Its methods compute nothing: a worker has a separate thread.

    All methods except `put` are called with `_call`, so that they do not keep packets waiting.

    Args:
        name: of the actor.
        owner: node, process id and start time of the process that has made it.
    """

    def __init__(self, name: str, owner: tuple[str, int, float]) -> None:
        self._hub = RayHub.of_this_process(name)
        threading.Thread(target=_end_with, args=owner, name="watchdog", daemon=True).start()

    def put(self, packets: list[Packet]) -> None:
        """Another process sends packets to the wires of this one."""
        self._hub.receive(packets)

    def pid(self) -> int:
        """The process id."""
        return os.getpid()

    def host_names(self) -> str:
        """Host a name table from now on. Returns its address."""
        wire = RayConnection("").wire()
        self._names = NameHost(wire)
        return wire.address

    def run(self, code: bytes) -> str:
        """Run a worker until it ends. Returns its status."""
        result: Future[str] = Future()

        def work() -> None:
            try:
                make, connection, name = cloudpickle.loads(code)
                result.set_result(make().run(connection, name).value)
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=work, name="worker", daemon=True).start()
        wait([result])
        self._hub.flush()  # its last replies arrive before the panel learns that it has ended
        return result.result()


def new_actor(purpose: str, resources: Mapping[str, float]) -> Any:
    """An actor, on whichever node has room for it."""
    name = new_name(purpose)
    cls = ray.remote(concurrency_groups={"control": 3})(ActorProcess)
    owner = _node(), os.getpid(), psutil.Process().create_time()
    options = {"name": name, "namespace": NAMESPACE, **actor_options(resources)}
    # A worker may be called a thousand times a second: Ray would record each call in its head node.
    return cls.options(enable_task_events=False, **options).remote(name, owner)


def _node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _end_with(node: str, pid: int, start_time: float) -> None:
    """End this process as soon as its owner has ended, if that is on this machine. Ray does it some seconds later."""
    with contextlib.suppress(psutil.Error):  # this container does not see the processes of the owner's
        if node == _node() and (owner := psutil.Process(pid)).create_time() == start_time:
            owner.wait()
            os.kill(os.getpid(), signal.SIGKILL)


def _call(actor: object, method: str, *args: Any) -> Any:
    return getattr(actor, method).options(concurrency_group="control").remote(*args)


class RayNames:
    """A name table in an actor. Raises `ConfigError` if Ray cannot start it."""

    def __init__(self, trial: str) -> None:
        self._actor = new_actor(f"names of {trial}", {})
        try:
            self.address: str = ray.get(_call(self._actor, "host_names"), timeout=_START_SECONDS)
        except ray_errors.RayError as error:
            self.close()
            raise ConfigError(f"Ray has not started the actor of the name table: {error}") from error

    def close(self) -> None:
        """End the actor."""
        if ray.is_initialized():
            ray.kill(self._actor)


class LaunchedActor:
    """A worker in a Ray actor, which ends with the process that has made it."""

    def __init__(
        self, make: Callable[[], Worker], connection: Connection, name: str, resources: Mapping[str, float]
    ) -> None:
        self._actor = new_actor(name, resources)
        self._ended: Future[str] = _call(self._actor, "run", cloudpickle.dumps((make, connection, name))).future()

    @property
    def pid(self) -> int:
        """Its process id, on its node."""
        return int(ray.get(_call(self._actor, "pid"), timeout=_START_SECONDS))

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
