"""Remote calls in a few lines: a server on a port, with handlers, and clients. It needs no name table.

with RpcServer() as server:
    server.register_handler("double", lambda x: 2 * x)
    server.write("server.json")             # where it is, and the keys: a file that only you can read
    while True:
        server.handle_requests(timeout=1)

with RpcClient("server.json") as client:    # in another process
    print(client.request("double", x=21))
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.arguments import seconds
from penstock.distributed.closing import Closing
from penstock.distributed.keys import Connection
from penstock.distributed.role import check_handler
from penstock.errors import ClusterError, ConfigError

_INBOX = "calls"


class RpcServer(Closing):
    """Answers requests in the thread that calls `handle_requests`.

    Args:
        port: 0 for any free one.
        host: the address of this machine at which other machines reach it; by default only this machine does.
    """

    def __init__(self, port: int = 0, *, host: str = "127.0.0.1") -> None:
        self._handlers: dict[str, Callable[..., Any]] = {}
        keys = Connection.make("remote calls", host=host)
        self._wire = keys.wire(port)
        self._inbox = self._wire.open(_INBOX)
        #: What a client needs.
        self.connection = replace(keys, address=self._wire.address)

    def write(self, path: str | Path) -> None:
        """Write the connection file, with mode 0600."""
        self.connection.write(path)

    def register_handler(self, command: str, handler: Callable[..., Any]) -> None:
        """Answer requests of `command` with `handler(**kwargs)`."""
        check_handler(command, handler)
        self._handlers[command] = handler

    def handle_requests(self, timeout: float = 0.0) -> int:
        """Wait at most `timeout` seconds for a request, and answer all that wait. Returns how many.

        Raises `ClusterError` if the server was closed before, and in a fork of its process.
        """
        self._wire.require_own()
        if self._wire.is_closed:
            raise ClusterError("this server was closed: make another one")
        call, n = self._inbox.receive(seconds("timeout", timeout, zero=True)), 0
        while call is not None:
            n += 1
            call.run(self._handlers)
            call = self._inbox.receive(0.0)
        return n

    def close(self) -> None:
        """Close the port. Calling it again does nothing."""
        self._wire.close()


class RpcClient(Closing):
    """Sends requests to one server.

    Args:
        connection: `server.connection`, or the file that the server has written.

    Raises `ConfigError` for the file of another user, or one without an address. An address alone is not enough: a
    client needs the keys.
    """

    def __init__(self, connection: Connection | str | Path, port: object = None) -> None:
        if port is not None:
            raise ConfigError(
                f"RpcClient({connection!r}, {port!r}): an address is not enough, since a client needs the keys of the "
                "server. Call server.write(file), and give its file to the client: RpcClient(file)"
            )
        if not isinstance(connection, Connection):
            connection = Connection.read(connection)
        if not connection.address:
            raise ConfigError("this connection has no address: use server.connection, or the file of server.write")
        self._wire = replace(connection, host="127.0.0.1").wire()
        self._peer = self._wire.reach(connection.address, _INBOX)

    def request(self, command: str, *, timeout: float = 30.0, **kwargs: object) -> Any:
        """The result of `command` on the server, which runs it once.

        Raises `RequestError` with what the handler raised, `NoReplyError` after `timeout` seconds, or `PeerLostError`
        if the server has ended.
        """
        return self.async_request(command, timeout=timeout, **kwargs).result()

    def async_request(self, command: str, *, timeout: float = 30.0, **kwargs: object) -> Future[Any]:
        """As `request`, but returns a future, which gets the result or the error."""
        return self._peer.ask({"command": command, "kwargs": kwargs}, seconds("timeout", timeout))

    def close(self) -> None:
        """Close the connection."""
        self._wire.close()
