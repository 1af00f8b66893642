"""Who has which ports of a range: what the error says when none is left."""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from penstock.ports.files import FileNote, read_note
from penstock.ports.holdings import claimed, holding_of
from penstock.ports.names import holder_of_name
from penstock.ports.probe import Place, PortProtocol

__all__ = ["describe_takers"]

_MOST_LINES = 20


@dataclass(frozen=True)
class _Taker:
    """Who has a port, and how."""

    how: str  #: "leased by", "not leased, but bound by" or "free"
    pid: int | None = None  #: None or 0 if it is hidden from this process
    uid: int | None = None  #: if it is not this process's user

    def __str__(self) -> str:
        if self.how == "free":
            return "free now"
        who = f"pid {self.pid}" if self.pid else "a process that cannot be seen from here"
        with contextlib.suppress(psutil.Error, ValueError):
            who += f" ({psutil.Process(self.pid).name()})" if self.pid else ""
        who += f" of user {self.uid}" if self.uid is not None else ""
        return f"{self.how} {who}" + (", this process" if self.pid == os.getpid() else "")


def describe_takers(ports: Sequence[int], place: Place, folder: Path) -> str:
    """One line for each process that has some of `ports`: how, since when (its first lease here), and which."""
    bound = _bound_ports(place.protocol)
    by_taker: dict[_Taker, list[int]] = defaultdict(list)
    since: dict[_Taker, float] = {}
    for port in ports:
        taker, when = _taker(port, place, folder, bound)
        by_taker[taker].append(port)
        if when is not None:
            since[taker] = min(when, since.get(taker, when))
    lines = [
        f"  {_stretches(taken)}: {taker}" + (f", since {_clock(since[taker])}" if taker in since else "")
        for taker, taken in by_taker.items()
    ]
    more = [f"  and {len(lines) - _MOST_LINES} processes more"] if len(lines) > _MOST_LINES else []
    return "\n".join(lines[:_MOST_LINES] + more)


def _taker(port: int, place: Place, folder: Path, bound: dict[int, int | None]) -> tuple[_Taker, float | None]:
    if (own := holding_of(port)) is not None:
        return _Taker("leased by", os.getpid()), own.since
    named, note = holder_of_name(port), _note(folder, port)
    if named is not None:
        pid, uid = named
        is_same = note is not None and note.pid == pid
        return _Taker("leased by", pid, None if uid == os.geteuid() else uid), note.since if note and is_same else None
    if note is not None:
        return _Taker("leased by", note.pid), note.since
    if port in bound or not place.can_bind(port):
        return _Taker("not leased, but bound by", bound.get(port)), None
    return _Taker("free"), None


def _note(folder: Path, port: int) -> FileNote | None:
    """What the lock file says, if its owner still lives."""
    with claimed(port) as mine:
        note = read_note(folder, port) if mine is not None else None
    return note if note is not None and psutil.pid_exists(note.pid) else None


def _bound_ports(protocol: PortProtocol) -> dict[int, int | None]:
    """Every port that a socket is bound to, and the process, if it may be seen."""
    with contextlib.suppress(psutil.Error):  # some systems tell the administrator alone
        return {each.laddr.port: each.pid for each in psutil.net_connections(protocol) if each.laddr}
    return {}


def _clock(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def _stretches(ports: Sequence[int]) -> str:
    """Sorted numbers, those in a row as "first-last"."""

    def parts() -> Iterator[str]:
        first = last = ports[0]
        for port in [*ports[1:], 0]:
            if port == last + 1:
                last = port
                continue
            yield str(first) if first == last else f"{first}-{last}"
            first = last = port

    return ", ".join(parts())
