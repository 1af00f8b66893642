"""The begin of a trial on each wire: the panel's own wire, the name table, and how workers are started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, get_args

from penstock.control.launched import LaunchedProcess, LaunchedThread
from penstock.control.name_table import NameHost
from penstock.control.wire import Wire
from penstock.control.wire_local import LocalConnection, LocalHub
from penstock.control.worker import Connection, Worker
from penstock.errors import ConfigError

WireName = Literal["local", "zmq", "ray"]
WIRES: tuple[str, ...] = get_args(WireName)


class Launched(Protocol):
    """A worker that was started here: `LaunchedThread`, `LaunchedProcess` or `LaunchedActor`."""

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    def ending(self) -> str | None:
        """How it has ended, or None while it runs."""
        ...

    def wait(self, timeout: float) -> bool:
        """Wait until it has ended. Returns whether it has."""
        ...

    def kill(self) -> None:
        """Kill it, if that is possible."""
        ...


Launch = Callable[[Callable[[], Worker], Connection, str, Mapping[str, float]], Launched]


@dataclass
class OpenTrial:
    """What a panel owns. Closing `resources` ends the name table, then the wire, then what is below."""

    wire: Wire
    connection: Connection
    launch: Launch
    resources: ExitStack


def open_trial(name: str, wire: WireName, host: str | None, port: int, file: str | Path | None) -> OpenTrial:
    """Begin a trial. Raises `ConfigError` for a wire that does not exist, or an address that cannot be used."""
    if wire not in WIRES:
        raise ConfigError(f"wire must be one of {', '.join(WIRES)}, got {wire!r}")
    if wire != "zmq" and (host or port or file):
        raise ConfigError(f'host, port and file are for wire="zmq", not for {wire!r}')
    with ExitStack() as resources:
        if wire == "local":
            trial = _local(name, resources)
        elif wire == "zmq":
            trial = _zmq(name, resources, host, port, file)
        else:
            trial = _ray(name, resources)
        trial.resources = resources.pop_all()
    return trial


def _local(name: str, resources: ExitStack) -> OpenTrial:
    hub = LocalHub()
    wire = hub.wire()
    resources.callback(wire.close)
    resources.callback(NameHost(wire).close)
    launch: Launch = lambda make, connection, worker, _: LaunchedThread(make, connection, worker)  # noqa: E731
    return OpenTrial(wire, LocalConnection(name, wire.address, hub), launch, resources)


def _zmq(name: str, resources: ExitStack, host: str | None, port: int, file: str | Path | None) -> OpenTrial:
    from penstock.control.keys import Connection as Keys
    from penstock.control.wire_zmq import zmq_wire

    keys = Keys.make(name, host=host or "127.0.0.1")
    wire = zmq_wire(keys, host=keys.host, port=port)
    resources.callback(wire.close)
    resources.callback(NameHost(wire).close)
    connection = replace(keys, address=wire.address)
    if file is not None:
        connection.write(file)
    launch: Launch = lambda make, connection, worker, _: LaunchedProcess(make, connection, worker)  # noqa: E731
    return OpenTrial(wire, connection, launch, resources)


def _ray(name: str, resources: ExitStack) -> OpenTrial:
    from penstock.cluster.placement import connect
    from penstock.control.launch_ray import LaunchedActor, RayNames
    from penstock.control.wire_ray import RayConnection

    resources.callback(connect(None, 1, dashboard=False))
    names = RayNames(name)
    resources.callback(names.close)
    connection = RayConnection(name, names.address)
    wire = connection.wire()
    resources.callback(wire.close)
    return OpenTrial(wire, connection, LaunchedActor, resources)
