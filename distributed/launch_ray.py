"""Starts workers as actors of Ray, which chooses their machines. They speak over the same sockets as other workers."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace

import ray
from ray import exceptions as ray_errors

from penstock.buffers import pickling
from penstock.distributed.keys import Connection
from penstock.distributed.placement import actor_options
from penstock.distributed.role import Worker

_START_SECONDS = 120.0


class ActorProcess:
    """The process of a worker."""

    def pid(self) -> int:
        """The process id."""
        return os.getpid()

    def run(self, code: bytes) -> str:
        """Run a worker until it ends. Its node listens at the address that this machine has in the cluster. Returns its
        status."""
        make, connection, name = pickle.loads(code)
        return str(make().run(replace(connection, host=ray.util.get_node_ip_address()), name).value)


class LaunchedActor:
    """A worker in a Ray actor, on whichever node has room for it. Ray ends it with the process that has made it."""

    def __init__(
        self, make: Callable[[], Worker], connection: Connection, name: str, resources: Mapping[str, float]
    ) -> None:
        # Two methods at once: `pid` is called while `run` runs.
        self._actor = ray.remote(ActorProcess).options(**actor_options(resources), max_concurrency=2).remote()
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
