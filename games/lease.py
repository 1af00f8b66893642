"""Leases of network ports: the search for free ports, and what users take and release. A report says who uses the ports
if too few are free."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import socket
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import psutil

from penstock import system
from penstock.arguments import integer, seconds, true_or_false
from penstock.errors import ConfigError, PortLeaseError
from penstock.workers.claims import Claim, claim

PortProtocol = Literal["tcp", "udp"]
_SOCKET_TYPES = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}

_MAX_STOP = 65_536
_LOWEST_DEFAULT = 10_000  # many ports below it belong to well-known programs
_FEWEST_DEFAULT = 1_000

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
    low, high = system.ephemeral_ports()
    longest = max(range(_LOWEST_DEFAULT, low), range(max(high + 1, _LOWEST_DEFAULT), _MAX_STOP), key=len)
    if len(longest) < _FEWEST_DEFAULT:
        raise ConfigError(
            f"this machine gives the ports {low} to {high} to outgoing connections, so too few are left to lease: "
            "pass start= and stop=, or make the range net.ipv4.ip_local_port_range smaller"
        )
    return longest


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
        for port in self.order():
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

    def order(self) -> Iterator[int]:
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
        f"  {intervals(used)}: {user}"
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


def intervals(ports: Sequence[int]) -> str:
    """Sorted numbers as text. Numbers in a row become "first-last"."""
    numbers = set(ports)
    firsts = [port for port in ports if port - 1 not in numbers]
    lasts = [port for port in ports if port + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts, strict=True))


class PortLease:
    """One port that this process owns until `release`, the end of a `with` block, or the end of the process.

    During this time no other lease of this user has the same port, in any process of this machine, even if nothing is
    bound to it. Other users, containers with another folder, and programs that do not use leases can still bind the
    port. penstock notices them only if they have bound it before the lease is taken.

    A fork does not inherit the lease: there, `is_active` is False and `release` does nothing. Keep the object while the
    port is used: a lease that is garbage collected is released, with a ResourceWarning. Use `lease_port` or `leases` to
    make one.
    """

    def __init__(self, claim: Claim, address: ServerAddress) -> None:
        self._claim, self._address = claim, address

    @property
    def port(self) -> int:
        """The port's number."""
        return self._claim.number

    @property
    def host(self) -> str:
        """The host that was passed to `lease_port` or `leases`."""
        return self._address.host

    @property
    def protocol(self) -> PortProtocol:
        """Either "tcp" or "udp"."""
        return self._address.protocol

    @property
    def since(self) -> float:
        """The time when the lease was taken, in seconds since the epoch."""
        return self._claim.since

    @property
    def is_active(self) -> bool:
        """Whether this process owns the port: False after `release`, and in a fork."""
        return self._claim.is_active

    def release(self) -> None:
        """Release the port. First stop the server that uses it. Any thread may call this, and more than once."""
        self._claim.release()

    def __enter__(self) -> PortLease:
        if not self.is_active:
            raise PortLeaseError(f"{self!r} was released, or is that of another process: take a new lease")
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __del__(self) -> None:
        if self.is_active:
            try:
                warnings.warn(f"{self!r} was not released", ResourceWarning, stacklevel=2, source=self)
            finally:  # the warning may be raised as an error
                self.release()

    def __repr__(self) -> str:
        state = "active" if self.is_active else "not active in this process"
        return f"<PortLease {self.protocol} {self.host} {self.port}, {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} belongs to the process that took it: pass its number, lease.port, instead")


class PortLeases(tuple[PortLease, ...]):
    """Several leases, sorted by port, that are released together. A tuple and a context manager. See `leases`."""

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports' numbers, lowest first."""
        return tuple(lease.port for lease in self)

    def release(self) -> None:
        """Release all of them. A second call does nothing."""
        for lease in self:
            lease.release()

    def __enter__(self) -> PortLeases:
        for lease in self:
            lease.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<PortLeases of {', '.join(map(str, self.ports))}>"


def lease_port(
    start: int | None = None,
    stop: int | None = None,
    host: str = "127.0.0.1",
    *,
    protocol: PortProtocol = "tcp",
    timeout: float = 2.0,
) -> PortLease:
    """Lease one port of `range(start, stop)`. The lease is a context manager; `lease.port` is the number.

    By default the range contains only ports that the kernel does not use for outgoing connections. `host` is where
    the server will listen: an IPv4 or IPv6 address, or a name. The port must be free at all addresses of a name.
    `timeout` is in seconds; the range is searched at least once.

    Raises `ConfigError` for invalid arguments. Raises `PortLeaseError` if no port became free in time, and lists
    which processes use the ports.
    """
    return leases(1, start, stop, host, protocol=protocol, timeout=timeout)[0]


def leases(
    n: int,
    start: int | None = None,
    stop: int | None = None,
    host: str = "127.0.0.1",
    *,
    protocol: PortProtocol = "tcp",
    consecutive: bool = False,
    timeout: float = 2.0,
) -> PortLeases:
    """Lease `n` ports, or none if there are not enough.

    With `consecutive=True` they are `n` ports in a row, for servers that count up from a base port. `lease_port`
    explains the other arguments.
    """
    search = PortSearch(n, port_range(start, stop), resolve(host, protocol), consecutive, timeout)
    return PortLeases(PortLease(claim, search.address) for claim in search.run())
