"""Leases of network ports, as users take and release them."""

from __future__ import annotations

import warnings
from typing import NoReturn

from penstock.errors import PortLeaseError
from penstock.games.search import PortProtocol, PortSearch, ServerAddress, port_range, resolve
from penstock.workers.claims import Claim


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
