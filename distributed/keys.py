"""The connection file: where the name table of a trial is, and the keys that open its sockets."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from penstock.arguments import must_be
from penstock.distributed.wire import Node
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Connection:
    """What a process needs to join a trial. Everybody who can read this can join: keep it in a file with mode 0600.

    Attributes:
        trial: names of the experiment and the trial, joined by a slash.
        address: where the name table is.
        server_public, server_secret, client_public, client_secret: CURVE keys of this trial alone.
        host: the address of this machine at which the nodes of this process can be reached.
    """

    trial: str
    address: str
    server_public: str
    server_secret: str
    client_public: str
    client_secret: str
    host: str = "127.0.0.1"

    @classmethod
    def make(cls, trial: str, *, host: str = "127.0.0.1") -> Self:
        """New keys for `trial`. The address is empty."""
        server, client = ([key.decode() for key in zmq.curve_keypair()] for _ in range(2))
        return cls(trial, "", server[0], server[1], client[0], client[1], host)

    def wire(self, port: int = 0) -> Node:
        """A new node with these keys, at this port; 0 for any free one. Raises `ConfigError` for an address that cannot
        be used."""
        return Node(self, _own_address(self.host), port)

    def write(self, path: str | Path) -> None:
        """Write the file, readable for its owner alone. An older file is replaced.

        Raises `ConfigError` if it cannot be written.
        """
        path = Path(path)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            part.unlink(missing_ok=True)
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                json.dump(asdict(self), file)
            part.replace(path)
        except OSError as error:
            raise ConfigError(f"the connection file {path} cannot be written: {error.strerror}") from error

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Raises `ConfigError` if the file is not this user's own, can be read by others, or is no connection file."""
        try:
            with open(path, encoding="utf-8") as file:
                facts = os.fstat(file.fileno())
                if stat.S_IMODE(facts.st_mode) & 0o077 or facts.st_uid != os.getuid():
                    raise ConfigError(
                        f"the connection file {path} holds keys. It must be your own, and must be readable for you "
                        f"alone: chmod 600 {path}"
                    )
                values = json.load(file)
            return cls(**{name: str(values[name]) for name in cls.__dataclass_fields__})
        except ConfigError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no connection file of penstock: {type(error).__name__}: {error}") from error


def _own_address(host: str) -> str:
    """Where a node listens, as ZeroMQ writes it. Raises `ConfigError` for every network at once, in any spelling."""
    must_be("host", host, isinstance(host, str), "an address or a name of this machine")
    name = host.strip("[]")
    if name in (interface for _, interface in socket.if_nameindex()):
        return name
    try:
        found = socket.getaddrinfo("0" if name in ("", "*") else name, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # ValueError: it cannot be a name
        raise ConfigError(f"cannot listen at host={host!r}: {error}") from error
    addresses = [ipaddress.ip_address(str(info[4][0])) for info in found]
    if any((getattr(each, "ipv4_mapped", None) or each).is_unspecified for each in addresses):
        raise ConfigError(
            f"host={host!r} would open a port on every network of this machine: give the address of one network"
        )
    first = min(addresses, key=lambda each: each.version)
    return str(first) if first.version == 4 else f"[{first}]"
