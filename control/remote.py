"""Remote calls in a few lines: a server on a port, with handlers, and clients. It needs no name table.

with RpcServer() as server:
    server.register("double", lambda x: 2 * x)
    server.write("server.json")             # where it is, and the keys: a file that only you can read
    server.serve(seconds=60)

with RpcClient("server.json") as client:    # in another process
    print(client.call("double", x=21))
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.arguments import seconds
from penstock.control.keys import Connection
from penstock.control.worker import check_handler
from penstock.errors import ConfigError
from penstock.ports import PortLease, lease_port

if TYPE_CHECKING:
    from typing_extensions import Self

_INBOX = "calls"


class RpcServer:
    """Answers calls in the thread that calls `serve`.

    Args:
        host: the address of this machine at which other machines reach it; by default only this machine does.
        port: None leases a port that no other server of this machine uses.
    """

    def __init__(self, *, host: str = "127.0.0.1", port: int | None = None) -> None:
        self._handlers: dict[str, Callable[..., Any]] = {}
        self._lease: PortLease | None = None
        if port is None:
            self._lease = lease_port()
            port = self._lease.port
        try:
            keys = Connection.make("remote calls", host=host)
            self._wire = keys.wire(port)
        except BaseException:
            if self._lease is not None:
                self._lease.release()
            raise
        self._inbox = self._wire.open(_INBOX)
        #: What a client needs.
        self.connection = replace(keys, address=self._wire.address)

    def write(self, path: str | Path) -> None:
        """Write the connection file, with mode 0600."""
        self.connection.write(path)

    def register(self, command: str, handler: Callable[..., Any]) -> None:
        """Answer calls of `command` with `handler(**kwargs)`."""
        check_handler(command, handler)
        self._handlers[command] = handler

    def serve(self, seconds: float) -> int:
        """Answer calls for `seconds`. Returns the number of calls."""
        until, n = time.monotonic() + seconds, 0
        while (left := until - time.monotonic()) > 0:
            letter = self._inbox.receive(left)
            if letter is None:
                break
            n += 1
            command = letter.message.get("command") if isinstance(letter.message, dict) else None
            if isinstance(command, str) and command in self._handlers:
                letter.answer_with(self._handlers[command])
            else:
                known = ", ".join(sorted(self._handlers)) or "none"
                letter.fail(f"there is no command {command!r}; the commands are {known}")
        return n

    def close(self) -> None:
        """Close the port. Calling it again does nothing."""
        self._wire.close()
        if self._lease is not None:
            self._lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class RpcClient:
    """Calls the commands of one server.

    Args:
        connection: `server.connection`, or the file that the server has written.
    """

    def __init__(self, connection: Connection | str | Path) -> None:
        if not isinstance(connection, Connection):
            connection = Connection.read(connection)
        if not connection.address:
            raise ConfigError("this connection has no address: use server.connection, or the file of server.write")
        self._wire = replace(connection, host="127.0.0.1").wire()
        self._peer = self._wire.reach(connection.address, _INBOX)

    def call(self, command: str, *, timeout: float = 30.0, **kwargs: Any) -> Any:
        """The result of `command` on the server, which runs it once.

        Raises `RequestError` with what the handler raised, `NoReplyError` after `timeout` seconds, or `PeerLostError`
        if the server has ended.
        """
        return self._peer.ask({"command": command, "kwargs": kwargs}, seconds("timeout", timeout)).result()

    def close(self) -> None:
        """Close the connection."""
        self._wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
