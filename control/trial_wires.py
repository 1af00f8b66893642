"""The begin of a trial on each wire: the panel's own wire, the name table, and how workers are started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from penstock.control.launched import LaunchedProcess, LaunchedThread
from penstock.control.name_table import NameHost
from penstock.control.wire import Wire
from penstock.control.wire_local import LocalConnection, LocalHub
from penstock.control.worker import Connection, Worker
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.control.launch_ray import LaunchedActor

    Launched: TypeAlias = LaunchedThread | LaunchedProcess | LaunchedActor

WireName = Literal["local", "zmq", "ray"]
WIRES: tuple[str, ...] = get_args(WireName)


@dataclass
class OpenTrial:
    """What a panel owns. Closing `resources` ends the name table, then the wire, then what is below."""

    wire: Wire
    connection: Connection
    #: Starts a worker: its maker, the connection, its name, and the resources that it needs.
    launch: Callable[[Callable[[], Worker], Connection, str, Mapping[str, float]], Launched]
    resources: ExitStack


def open_trial(name: str, wire: WireName, host: str | None, port: int, file: str | Path | None) -> OpenTrial:
    """Begin a trial. Raises `ConfigError` for a wire that does not exist, or an address that cannot be used."""
    if wire not in WIRES:
        raise ConfigError(f"wire must be one of {', '.join(WIRES)}, got {wire!r}")
    if wire != "zmq" and (host or port or file):
        raise ConfigError(f'host, port and file are for wire="zmq", not for {wire!r}')
    with ExitStack() as resources:
        connection: Any
        launch: Any = LaunchedThread
        if wire == "local":
            connection = LocalConnection(name, "", LocalHub())
            own = connection.wire()
        else:
            connection, launch = _sockets(name, wire, host, resources)
            own = connection.wire(port)
        resources.callback(own.close)
        resources.callback(NameHost(own).close)
        connection = replace(connection, address=own.address)
        if file is not None:
            connection.write(file)
        return OpenTrial(own, connection, launch, resources.pop_all())


def _sockets(name: str, wire: str, host: str | None, resources: ExitStack) -> tuple[Any, Any]:
    """New keys, and what starts workers that have them."""
    if wire == "zmq":
        from penstock.control.keys import Connection as Keys

        return Keys.make(name, host=host or "127.0.0.1"), LaunchedProcess
    from penstock.cluster.placement import connect
    from penstock.control.launch_ray import LaunchedActor, RayConnection

    resources.callback(connect(None, 1, dashboard=False))
    return RayConnection.make(name), LaunchedActor
