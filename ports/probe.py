"""Whether a port can be bound now, at which addresses, and which ports the kernel gives to others."""

from __future__ import annotations

import contextlib
import errno
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.errors import ConfigError

__all__ = ["Place", "PortProtocol", "default_ports", "place_of"]

PortProtocol = Literal["tcp", "udp"]
_TYPES = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}

# Of these ports many are other programs' by custom.
_LOWEST = 10_000
_FEWEST = 1_000
# Where the kernel does not say: IANA's range for ports that are given to whoever asks for none (RFC 6335).
_EPHEMERAL = (49_152, 65_535)


@dataclass(frozen=True)
class Place:
    """Where a server will listen: a host, all addresses that it stands for, and TCP or UDP."""

    host: str
    protocol: PortProtocol
    addresses: tuple[tuple[int, Any], ...]  #: (family, socket address with port 0)

    def can_bind(self, port: int) -> bool:
        """Whether `port` can be bound at all addresses now, and is free again afterwards.

        Bound as strictly as there is: without SO_REUSEADDR, so that a port with a connection in TIME_WAIT is not
        free. Raises `ConfigError` if the system does not let this process bind it at all.
        """
        with contextlib.ExitStack() as stack:
            for family, address in self.addresses:
                probe = stack.enter_context(socket.socket(family, _TYPES[self.protocol]))
                try:
                    probe.bind((address[0], port, *address[2:]))
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        return False
                    raise ConfigError(
                        f"this process may not bind {self.protocol} port {port} of {self.host}: {error}. Ports below "
                        "1024 are often reserved for the administrator: give another start"
                    ) from error
        return True


def place_of(host: str, protocol: PortProtocol) -> Place:
    """The place that a user means. Raises `ConfigError` if there is no such address on this machine."""
    if not isinstance(protocol, str) or protocol not in _TYPES:
        raise ConfigError(f'protocol must be "tcp" or "udp", got {protocol!r}')
    if not isinstance(host, str) or not host:
        raise ConfigError(f'host must be an address or a name, as "127.0.0.1" or "::1", got {host!r}')
    try:
        found = socket.getaddrinfo(host, 0, type=_TYPES[protocol])
    except OSError as error:
        raise ConfigError(f"host {host!r} is neither an address nor a known name: {error}") from error
    addresses, complaints = [], []
    for family, _, _, _, address in found:
        try:
            with socket.socket(family, _TYPES[protocol]) as probe:
                probe.bind(address)
        except OSError as error:
            # A name often stands for an address of IPv6 where that is switched off.
            complaints.append(str(error))
        else:
            addresses.append((int(family), address))
    if not addresses:
        raise ConfigError(f"no server can listen at host {host!r} on this machine: {'; '.join(complaints)}")
    return Place(host, protocol, tuple(addresses))


def default_ports() -> range:
    """The ports to lease where nobody says: the longer stretch from 10000 on that the kernel keeps its hands off.

    The kernel gives ephemeral ports to outgoing connections, at any moment. Raises `ConfigError` where these are
    all.
    """
    low, high = _ephemeral_ports()
    stretches = range(_LOWEST, low), range(max(high + 1, _LOWEST), 65_536)
    longest = max(stretches, key=len)
    if len(longest) < _FEWEST:
        raise ConfigError(
            f"this machine gives the ports {low} to {high} to outgoing connections, which leaves none to lease: pass "
            "start= and stop=, or narrow net.ipv4.ip_local_port_range"
        )
    return longest


def _ephemeral_ports() -> tuple[int, int]:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:
        return _EPHEMERAL
    return int(low), int(high)
