"""The search for free ports, and the report of who uses the ports if too few are free."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from penstock.arguments import integer, seconds, true_or_false
from penstock.errors import ConfigError, PortLeaseError
from penstock.workers.claims import Claim, claim

PortProtocol = Literal["tcp", "udp"]
_SOCKET_TYPES = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}

_MAX_STOP = 65_536
_LOWEST_DEFAULT = 10_000  # many ports below it belong to well-known programs
_FEWEST_DEFAULT = 1_000
_EPHEMERAL = (49_152, 65_535)  # IANA's range for outgoing connections (RFC 6335), for systems without /proc

_RETRY_SECONDS = 0.01  # a search claims each port while it tests it, so a port may be free again very soon
_MAX_REPORT_LINES = 20


@dataclass(frozen=True)
class ServerAddress:
    """Where a server will listen: a host with all its addresses, and TCP or UDP."""

    host: str
    protocol: PortProtocol
    addresses: tuple[tuple[int, Any], ...]  #: (family, socket address with port 0)

    def can_bind(self, port: int) -> bool:
        """Whether `port` is free at all addresses now.

        The test binds without SO_REUSEADDR, so a port with a connection in TIME_WAIT is not free. Raises `ConfigError`
        if this process may not bind the port.
        """
        with contextlib.ExitStack() as stack:
            for family, address in self.addresses:
                probe = stack.enter_context(socket.socket(family, _SOCKET_TYPES[self.protocol]))
                try:
                    probe.bind((address[0], port, *address[2:]))
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        return False
                    raise ConfigError(
                        f"this process may not bind {self.protocol} port {port} of {self.host}: {error}. Ports below "
                        "1024 are often reserved for the administrator: pass a higher start"
                    ) from error
        return True


def resolve(host: str, protocol: PortProtocol) -> ServerAddress:
    """The addresses of `host` on this machine. Raises `ConfigError` if there are none."""
    if not isinstance(protocol, str) or protocol not in _SOCKET_TYPES:
        raise ConfigError(f'protocol must be "tcp" or "udp", got {protocol!r}')
    if not isinstance(host, str) or not host:
        raise ConfigError(f'host must be an address or a name, such as "127.0.0.1" or "localhost", got {host!r}')
    try:
        found = socket.getaddrinfo(host, 0, type=_SOCKET_TYPES[protocol])
    except OSError as error:
        raise ConfigError(f"host {host!r} is neither an address nor a known name: {error}") from error
    addresses, failures = [], []
    for family, _, _, _, address in found:
        try:
            with socket.socket(family, _SOCKET_TYPES[protocol]) as probe:
                probe.bind(address)
        except OSError as error:
            failures.append(str(error))  # a name often has an IPv6 address although IPv6 is switched off
        else:
            addresses.append((int(family), address))
    if not addresses:
        raise ConfigError(f"no server can listen at host {host!r} on this machine: {'; '.join(failures)}")
    return ServerAddress(host, protocol, tuple(addresses))


def port_range(start: int | None, stop: int | None) -> range:
    """`range(start, stop)`, with defaults from `default_ports`. Raises `ConfigError` if it is not valid."""
    first = default_ports().start if start is None else integer("start", start)
    last = default_ports().stop if stop is None else integer("stop", stop)
    if stop is None and first >= last:
        last = _MAX_STOP
    if not 1 <= first < last <= _MAX_STOP:
        raise ConfigError(f"start and stop must be numbers with 1 <= start < stop <= 65536, got {first} and {last}")
    return range(first, last)


def default_ports() -> range:
    """The longest range of ports from 10000 on that the kernel does not use for outgoing connections.

    The kernel may take a port for an outgoing connection at any moment. Raises `ConfigError` if too few ports are left.
    """
    low, high = _ephemeral_ports()
    longest = max(range(_LOWEST_DEFAULT, low), range(max(high + 1, _LOWEST_DEFAULT), _MAX_STOP), key=len)
    if len(longest) < _FEWEST_DEFAULT:
        raise ConfigError(
            f"this machine gives the ports {low} to {high} to outgoing connections, so too few are left to lease: "
            "pass start= and stop=, or make the range net.ipv4.ip_local_port_range smaller"
        )
    return longest


def _ephemeral_ports() -> tuple[int, int]:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:
        return _EPHEMERAL
    return int(low), int(high)


@dataclass(frozen=True)
class PortSearch:
    """A search for `n` free ports. Raises `ConfigError` for invalid arguments."""

    n: int
    ports: range
    address: ServerAddress
    consecutive: bool  #: whether the n ports must be in a row
    timeout: float  #: seconds; the range is searched at least once

    def __post_init__(self) -> None:
        if not 1 <= integer("n", self.n) <= len(self.ports):
            raise ConfigError(
                f"n must be a number of ports from 1 to {len(self.ports)}, as many as the range has, got {self.n!r}"
            )
        seconds("timeout", self.timeout, zero=True)
        true_or_false("consecutive", self.consecutive)

    def run(self) -> list[Claim]:
        """Claim `n` free ports, sorted. If there are too few, release all and raise `PortLeaseError`."""
        start_time = time.monotonic()
        found: list[Claim] = []
        try:
            while not self._search_once(found):
                took = time.monotonic() - start_time
                if took >= self.timeout:
                    _release(found)  # before the report, which must show them as free
                    raise PortLeaseError(self._failure(took))
                time.sleep(_RETRY_SECONDS)
        except BaseException as error:
            _release(found)
            if isinstance(error, OSError | RuntimeError):
                raise PortLeaseError(
                    f"no port can be leased here: {error}. A sandbox may forbid it, or this process has too many open "
                    "files. Or name a folder on a local disk in the environment variable PENSTOCK_PORT_FOLDER"
                ) from error
            raise
        return sorted(found, key=lambda each: each.number)

    def _search_once(self, found: list[Claim]) -> bool:
        """Search the range once and add claims to `found`. Returns whether there are `n` now."""
        for port in self._order():
            if self.consecutive and found and port != found[-1].number + 1:
                _release(found)
            # Claim first, then bind: binding another owner's port could stop the owner's server from starting.
            new = claim("port", port)
            if not isinstance(new, Claim):
                continue
            found.append(new)
            if not self.address.can_bind(port):
                found.pop().release()
            elif len(found) == self.n:
                return True
        if self.consecutive:
            _release(found)
        return False

    def _order(self) -> Iterator[int]:
        """All ports, beginning at a random one. So a lease rarely gets a port that was just released, and simultaneous
        searches rarely try the same port.

        If `consecutive`, the search continues past the starting port, so that a row can include it.
        """
        start, stop = self.ports.start, self.ports.stop
        first = start + secrets.randbelow(stop - start)  # leaves the user's seeded generators unchanged
        yield from range(first, stop)
        yield from range(start, min(first + self.n - 1, stop) if self.consecutive else first)

    def _failure(self, took: float) -> str:
        wanted = "a free port" if self.n == 1 else f"{self.n} free ports" + (" in a row" if self.consecutive else "")
        return (
            f"{wanted} could not be found in {took:.1f} s among {self.address.protocol} ports {self.ports.start} to "
            f"{self.ports.stop - 1} of {self.address.host}. Pass a wider range, or release unused ports. "
            "The ports are:\n" + describe_ports(self.ports, self.address)
        )


def _release(found: list[Claim]) -> None:
    while found:
        found.pop().release()


def describe_ports(ports: Sequence[int], address: ServerAddress) -> str:
    """One line per process: its ports, how it uses them, and when it leased the first one."""
    bound: dict[int, int | None] = {}
    with contextlib.suppress(psutil.Error):  # some systems tell only the administrator
        bound = {each.laddr.port: each.pid for each in psutil.net_connections(address.protocol) if each.laddr}
    process = functools.cache(describe_process)  # for this report only: a later process may have the same pid
    ports_by_user: dict[str, list[int]] = defaultdict(list)
    since: dict[str, float] = {}
    for port in ports:
        found = claim("port", port)
        if not isinstance(found, Claim):
            user = f"leased by {process(found[0])}"
            since[user] = min(found[1], since.get(user, found[1]))
        else:
            found.release()
            is_bound = port in bound or not address.can_bind(port)
            user = f"not leased, but bound by {process(bound.get(port))}" if is_bound else "free now"
        ports_by_user[user].append(port)
    lines = [
        f"  {_intervals(used)}: {user}"
        + (time.strftime(", since %Y-%m-%d %H:%M:%S", time.localtime(since[user])) if user in since else "")
        for user, used in ports_by_user.items()
    ]
    if len(lines) > _MAX_REPORT_LINES:
        lines[_MAX_REPORT_LINES:] = [f"  and {len(lines) - _MAX_REPORT_LINES} more processes"]
    return "\n".join(lines)


def describe_process(pid: int | None) -> str:
    """The process as text. A `pid` of None or 0 stands for a process that cannot be seen from here."""
    text = f"pid {pid}" if pid else "a process that cannot be seen from here"
    if pid:
        with contextlib.suppress(psutil.Error):
            text += f" ({psutil.Process(pid).name()})"
    return f"{text}, this process" if pid == os.getpid() else text


def _intervals(ports: Sequence[int]) -> str:
    """Sorted numbers as text. Numbers in a row become "first-last"."""
    numbers = set(ports)
    firsts = [port for port in ports if port - 1 not in numbers]
    lasts = [port for port in ports if port + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts, strict=True))
