"""Ports that are one owner's until they are given back, even while nothing is bound to them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NoReturn, overload

from penstock.ports.files import lock_folder
from penstock.ports.holdings import Holding
from penstock.ports.probe import Place, PortProtocol, place_of
from penstock.ports.search import PortSearch, range_of

__all__ = ["PortLease", "PortLeases", "lease_port", "leases"]


class PortLease:
    """One port, this process's until `release`, the end of a `with` block, or the end of the process.

    No other lease of penstock's, of any process or user of this machine, has the same port meanwhile, whether anything
    is bound to it or not. It cannot keep a program from the port that does not ask for leases; such a one is found
    when the lease is taken, not later.

    A fork inherits nothing: there, `held` is False and `release` does nothing. A lease that is garbage collected is
    released, with a ResourceWarning: keep it as long as the port is used. Made by `lease_port` and `leases`.
    """

    def __init__(self, holding: Holding, place: Place) -> None:
        self._holding, self._place = holding, place

    @property
    def port(self) -> int:
        """The port's number."""
        return self._holding.port

    @property
    def host(self) -> str:
        """The host that it was leased for."""
        return self._place.host

    @property
    def protocol(self) -> PortProtocol:
        """Either "tcp" or "udp"."""
        return self._place.protocol

    @property
    def since(self) -> float:
        """When it was taken, in seconds since the epoch."""
        return self._holding.since

    @property
    def held(self) -> bool:
        """Whether the port is this process's: False after `release`, and in a fork."""
        return self._holding.is_held

    def release(self) -> None:
        """Give the port back, from any thread; again is harmless. Stop what is bound to it first."""
        self._holding.drop()

    def __enter__(self) -> PortLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if self.held:
            try:
                warnings.warn(f"{self!r} was not released", ResourceWarning, stacklevel=2, source=self)
            finally:  # warnings may be errors
                self.release()

    def __repr__(self) -> str:
        state = "held" if self.held else "released, or another process's"
        return f"<PortLease {self.protocol} {self.host} {self.port}, {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} belongs to the process that took it: pass on its number, lease.port")


class PortLeases(Sequence[PortLease]):
    """Several leases that are given back together; a context manager. See `leases`."""

    def __init__(self, each: Sequence[PortLease]) -> None:
        self._each = tuple(each)

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports' numbers, from the lowest."""
        return tuple(lease.port for lease in self._each)

    def release(self) -> None:
        """Give all of them back; again is harmless."""
        for lease in self._each:
            lease.release()

    @overload
    def __getitem__(self, index: int) -> PortLease: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PortLease]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._each[index]

    def __len__(self) -> int:
        return len(self._each)

    def __enter__(self) -> PortLeases:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
    """Lease one port of `range(start, stop)`: a context manager, with the number in `lease.port`.

    Where `start` and `stop` are not given: a stretch that the kernel does not give to outgoing connections. `host` is
    where the server will listen: an address of IPv4 or IPv6, or a name, of which all addresses must be free. After
    `timeout` seconds without a free port (the range is searched once in any case) it is a `PortLeaseError` that lists
    who has them. Arguments that make no sense are a `ConfigError`.
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
    """Lease `n` ports, all or none; with `consecutive=True` n in a row, for servers that count up from a base port.

    See `lease_port` for the rest.
    """
    search = PortSearch(n, range_of(start, stop), place_of(host, protocol), lock_folder(), consecutive, timeout)
    return PortLeases([PortLease(holding, search.place) for holding in search.run()])
