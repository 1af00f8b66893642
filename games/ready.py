"""When a game is ready: it listens, connects, prints a line, or a function of the user says so."""

from __future__ import annotations

import os
import re
import select
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import psutil

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.games.running import RunningGame

_LISTENS = {"tcp": "0A", "udp": "07"}


class PortTaken(Exception):
    """A stranger has the port of a game. The text says which, and who."""


class Ready:
    """Base of the conditions. `is_met(game)` says whether the game is ready now."""

    binds_ports: ClassVar[bool] = False  #: whether penstock listens at the ports, and not the game

    def is_met(self, game: RunningGame) -> bool:
        """Whether the game is ready. May raise what a user's function raises."""
        raise NotImplementedError


@dataclass(frozen=True)
class Listens(Ready):
    """The game listens at all its ports. penstock reads this from /proc, and does not connect: the game may take the
    first connection for its player. A stranger's server at the port does not count."""

    def is_met(self, game: RunningGame) -> bool:
        """Raises `PortTaken` if another program listens there."""
        return all(_has_port(game, port) for port in game.ports)


@dataclass(frozen=True)
class Connects(Ready):
    """The game connects to its ports: penstock listens there from before the start. `GameProcess.connect` accepts."""

    binds_ports: ClassVar[bool] = True

    def is_met(self, game: RunningGame) -> bool:
        """A connection to each port waits to be accepted."""
        poll = select.poll()
        for listener in game.listeners:
            poll.register(listener, select.POLLIN)
        return len(poll.poll(0)) == len(game.listeners)


@dataclass(frozen=True)
class Prints(Ready):
    """The game prints what the regular expression `pattern` finds. A program in C writes in blocks where its output is
    no terminal: start it through `stdbuf -oL`."""

    pattern: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except (re.error, TypeError) as error:
            raise ConfigError(f"Prints needs a regular expression, got {self.pattern!r}: {error}") from error

    def is_met(self, game: RunningGame) -> bool:
        """Its output has the pattern."""
        return re.search(self.pattern, game.output(1 << 20)) is not None


@dataclass(frozen=True)
class Answers(Ready):
    """`fn(ports)` returns True: for a game in a container, or with a protocol of its own. An `OSError` that it raises,
    such as a refused connection, means that the game is not ready; other exceptions reach you."""

    fn: Callable[[tuple[int, ...]], bool]

    def is_met(self, game: RunningGame) -> bool:
        """The function says so."""
        with suppress(OSError):
            return bool(self.fn(game.ports))
        return False


def _has_port(game: RunningGame, port: int) -> bool:
    found = sockets_at(port, game.protocol, listening=True)
    if not found:
        return False
    if not found & game.socket_inodes():
        raise PortTaken(f"port {port}, {_owner(port, game.protocol)}")
    return True


def refuse_taken_ports(game: RunningGame) -> None:
    """Raise `PortTaken` if a stranger uses a port of a game that has ended: this may be why it has."""
    for port in game.ports:
        if sockets_at(port, game.protocol) - game.socket_inodes():
            raise PortTaken(f"port {port}, {_owner(port, game.protocol)}")


def sockets_at(port: int, protocol: str, *, listening: bool = False) -> set[str]:
    """Inodes of the sockets whose own port this is. The one of a closed connection is 0, and is left out."""
    wanted, found = f":{port:04X}", set()
    for name in (protocol, f"{protocol}6"):
        with suppress(OSError), open(f"/proc/net/{name}") as table:
            for line in table:
                parts = line.split()
                if parts[1].endswith(wanted) and (not listening or parts[3] == _LISTENS[protocol]):
                    found.add(parts[9])
    return found - {"0"}


def _owner(port: int, protocol: str) -> str:
    with suppress(psutil.Error, OSError):
        for each in psutil.net_connections(protocol):
            if each.laddr and each.laddr.port == port and each.pid:
                return f"pid {each.pid} ({psutil.Process(each.pid).name()})"
    return f"a process that pid {os.getpid()} cannot see"
