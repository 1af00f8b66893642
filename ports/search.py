"""The search for ports that nobody has leased and nothing is bound to."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError, PortLeaseError
from penstock.ports.census import describe_takers
from penstock.ports.holdings import Holding, hold
from penstock.ports.probe import Place, default_ports
from penstock.workers.arguments import integer

__all__ = ["PortSearch", "range_of"]

_MOST_PORTS = 65_536
# A port may be taken for a moment only: processes that look at one hold it meanwhile.
_LOOK_AGAIN_SECONDS = 0.01


def range_of(start: int | None, stop: int | None) -> range:
    """The ports from `start` to `stop - 1`, by default as `default_ports` says. Raises `ConfigError`."""
    first = None if start is None else integer("start", start)
    last = None if stop is None else integer("stop", stop)
    if first is None or last is None:
        default = default_ports()
        if last is None and first is not None and first >= default.stop:
            default = range(first, _MOST_PORTS)  # all that lie beyond the default stretch
        first, last = default.start if first is None else first, default.stop if last is None else last
    if not 1 <= first < last <= _MOST_PORTS:
        raise ConfigError(f"start and stop must be numbers with 1 <= start < stop <= 65536, got {first} and {last}")
    return range(first, last)


@dataclass(frozen=True)
class PortSearch:
    """What is sought, where, and for how long. Raises `ConfigError` if it makes no sense."""

    n: int
    ports: range
    place: Place
    folder: Path  #: of lock files
    consecutive: bool  #: n in a row
    timeout: float  #: seconds; the range is searched once in any case

    def __post_init__(self) -> None:
        if not 1 <= integer("n", self.n) <= len(self.ports):
            raise ConfigError(
                f"n must be a number of ports from 1 to {len(self.ports)}, as many as the range has, got {self.n!r}"
            )
        is_number = isinstance(self.timeout, int | float) and not isinstance(self.timeout, bool)
        if not is_number or not self.timeout >= 0:
            raise ConfigError(f"timeout must be a number of seconds from 0 on, got {self.timeout!r}")

    def run(self) -> list[Holding]:
        """Hold `n` free ports, sorted. Raises `PortLeaseError`, and holds none, if there are not so many."""
        began = time.monotonic()
        found: list[Holding] = []
        try:
            while not self._search_once(found):
                if time.monotonic() - began >= self.timeout:
                    raise PortLeaseError(self._exhausted(found, time.monotonic() - began))
                time.sleep(_LOOK_AGAIN_SECONDS)
        except BaseException:
            _drop_all(found)
            raise
        return sorted(found, key=lambda holding: holding.port)

    def _search_once(self, found: list[Holding]) -> bool:
        """Go through the range once, and add to `found` until there are `n`; returns whether there are."""
        if self.consecutive:
            _drop_all(found)
        for port in self._order():
            if self.consecutive and found and port != found[-1].port + 1:
                _drop_all(found)
            holding = self._claim(port)
            if holding is not None:
                found.append(holding)
                if len(found) == self.n:
                    return True
            elif self.consecutive:
                _drop_all(found)
        return False

    def _order(self) -> Iterator[int]:
        """All ports, from a random one on: what was just given back is not the next to be taken, and those who
        search together do not stand in each other's way. Some come twice, so that no row is torn."""
        start, stop = self.ports.start, self.ports.stop
        first = start + secrets.randbelow(stop - start)  # draws from nobody's seeded generator
        yield from range(first, stop)
        yield from range(start, min(first + self.n - 1, stop) if self.consecutive else first)

    def _claim(self, port: int) -> Holding | None:
        # Held before it is bound, not after: binding a port that somebody else has leased would be in the way of
        # the server that is to be started there.
        holding = hold(port, self.folder)
        if holding is None:
            return None
        is_free = False
        try:
            is_free = self.place.can_bind(port)
        finally:
            if not is_free:
                holding.drop()
        return holding if is_free else None

    def _exhausted(self, found: list[Holding], seconds: float) -> str:
        _drop_all(found)  # they are not what is missing
        wanted = "a free port" if self.n == 1 else f"{self.n} free ports" + (" in a row" if self.consecutive else "")
        return (
            f"{wanted} could not be found in {seconds:.1f} s among {self.place.protocol} ports {self.ports.start} to "
            f"{self.ports.stop - 1} of {self.place.host}: give a wider range, or release what is not used. They are\n"
            + describe_takers(self.ports, self.place, self.folder)
        )


def _drop_all(found: list[Holding]) -> None:
    while found:
        found.pop().drop()
