"""GameProcess: a game in a process of its own, from its start on a leased port to its certain end."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from penstock.arguments import integer, seconds, true_or_false
from penstock.errors import ConfigError, GameError
from penstock.games.game_socket import GameSocket
from penstock.games.running import Connects, GameOptions, Listens, PortTaken, Ready, RunningGame
from penstock.ports.search import PortProtocol

if TYPE_CHECKING:
    from typing_extensions import Self

_MOST_PORTS = 1000
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_WATCH_SECONDS = 0.05  # how often the watchdog looks
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class GameProcess:
    """A game in a process of its own, on ports that it leases. It ends with this object, or with this process.

    The constructor starts the game and does not wait, so that several games start side by side. `connect`, or
    `wait_ready` for a library that has its own connection, waits until it is ready.

    Args:
        command: the program and its arguments. `{port}`, `{port0}`, `{port1}` and `{ports}` are replaced by the leased
            ports, in `environ` too; the variable PENSTOCK_PORTS has them as well.
        ports: how many ports to lease; 0 for a client that has no port of its own.
        protocol, consecutive, start, stop, host: as in `penstock.ports.leases`.
        ready: when the game is ready: `Listens()`, `Connects()`, `Prints(pattern)` or `Answers(fn)`.
        start_timeout: seconds from the start until it must be ready.
        start_tries: how often to start it, each time on other ports, if another program takes its port in between.
        reply_timeout: seconds for each reply through `connect()`.
        quit: asks the game to end, with this object as its argument, before SIGTERM does.
        stop_timeout: seconds that `quit` may take, that the game has to end after it, and again after SIGTERM. Then all
            its processes are killed. If `quit` takes longer, they are killed at once.
        log_lines: most lines of the game's output that an error quotes.
        log_file: where to append the output, `{port}` included; None keeps the end of it in a file without a name.
        renew_every: `end_episode` starts the game again after so many episodes.
        max_rss: bytes, or text such as "4 GB": `end_episode` starts the game again if all its processes use more. In an
            episode, only `request` of the connection looks at the memory, every 5 s. With more than twice as much, it
            raises `GameError`.
        spares: how many started games to keep in reserve, for this command and in this process.
        environ: environment variables of the game, besides those of this process.
        cwd: the folder of the game.

    Raises `ConfigError` for arguments that cannot work, and `GameError` if the game cannot be started.
    """

    _run: RunningGame | None = None
    _pool: _Spares | None = None

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        ports: int = 1,
        protocol: PortProtocol = "tcp",
        consecutive: bool = False,
        start: int | None = None,
        stop: int | None = None,
        host: str = "127.0.0.1",
        ready: Ready = Listens(),  # noqa: B008 - it cannot change
        start_timeout: float = 60.0,
        start_tries: int = 3,
        reply_timeout: float = 10.0,
        quit: Callable[[GameProcess], object] | None = None,
        stop_timeout: float = 2.0,
        log_lines: int = 200,
        log_file: str | Path | None = None,
        renew_every: int | None = None,
        max_rss: int | str | None = None,
        spares: int = 0,
        environ: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> None:
        if isinstance(command, str | bytes) or not command or not all(isinstance(p, str | Path) for p in command):
            raise ConfigError(f'command must be a list such as ["./game", "--port", "{{port}}"], got {command!r}')
        if not isinstance(ready, Ready):
            raise ConfigError(f"ready must be Listens(), Connects(), Prints(pattern) or Answers(fn), got {ready!r}")
        if quit is not None and not callable(quit):
            raise ConfigError(f"quit must be a function with the game as its argument, or None, got {quit!r}")
        if isinstance(ready, Listens | Connects) and (ports == 0 or (protocol == "udp" and ready.binds_ports)):
            raise ConfigError(
                f"ready={ready} does not fit ports={ports}, protocol={protocol!r}: give Prints or Answers"
            )
        self._options = GameOptions(
            command=tuple(map(str, command)),
            ports=integer("ports", ports, 0, _MOST_PORTS),
            protocol=protocol,
            consecutive=true_or_false("consecutive", consecutive),
            start=start,
            stop=stop,
            host=host,
            ready=ready,
            start_timeout=seconds("start_timeout", start_timeout),
            start_tries=integer("start_tries", start_tries, 1),
            stop_timeout=seconds("stop_timeout", stop_timeout, zero=True),
            log_lines=integer("log_lines", log_lines, 0),
            log_file=None if log_file is None else os.fspath(log_file),
            environ=tuple((str(name), str(value)) for name, value in (environ or {}).items()),
            cwd=None if cwd is None else os.fspath(cwd),
        )
        self._reply_timeout, self._quit = seconds("reply_timeout", reply_timeout), quit
        self._renew_every = None if renew_every is None else integer("renew_every", renew_every, 1)
        self._max_rss = 0 if max_rss is None else _bytes(max_rss)
        self._owner, self._episodes, self._sockets = os.getpid(), 0, list[GameSocket]()
        #: How often the game was started again.
        self.renewal = 0
        self._pool = _Spares.of(self._options, integer("spares", spares, 0))
        try:
            self._launch()
        except BaseException:
            self.close()
            raise

    def _launch(self) -> None:
        assert self._pool is not None
        self._run = self._pool.take(self.renewal)
        self._pool.fill()

    # ---- the game --------------------------------------------------------------------------

    @property
    def running(self) -> RunningGame:
        """The started game. Raises `GameError` after `close`, and in a fork of the process that has started it."""
        if self._run is None or self._owner != os.getpid():
            raise GameError(
                f"the game {self._options.command[0]!r} was closed, or belongs to the process that this one is a fork "
                "of: make a new GameProcess"
            )
        return self._run

    @property
    def ports(self) -> tuple[int, ...]:
        """The leased ports, lowest first. `renew` changes them."""
        return self.running.ports

    @property
    def pid(self) -> int:
        """The process id of the game, which is also that of its group and session."""
        return self.running.pid

    def wait_ready(self) -> None:
        """Wait until the game is ready. Raises `GameError` if it ends, or is not ready within `start_timeout`."""
        for attempt in range(1, self._options.start_tries + 1):
            try:
                self.running.wait_ready()
                break
            except PortTaken as taken:
                if attempt == self._options.start_tries:
                    raise self.error(
                        f"was started {attempt} times (start_tries), and each time another program had its port. The "
                        f"last one: {taken}. Give start= and stop= a range that nobody else uses"
                    ) from None
                self._end()
                self._launch()

    def connect(self, port: int = 0) -> GameSocket:
        """Wait until the game is ready, and connect to its port number `port`; with `Connects`, accept its connection.

        Raises `GameError` if it is not ready in time, or refuses the connection.
        """
        if not self._options.ports:
            instead = "use wait_ready() and your own connection"
            raise ConfigError(f"connect needs a port, but the game has ports=0: {instead}")
        number = integer("port", port, 0, self._options.ports - 1)
        if self._options.protocol != "tcp":
            raise ConfigError("connect is for TCP: use a socket of your own with game.ports")
        self.wait_ready()
        game, host = self.running, self._options.host
        try:
            if game.listeners:
                game.listeners[number].settimeout(self._reply_timeout)
                connection, _ = game.listeners[number].accept()
            else:
                address = _ANYWHERE.get(host, host), game.ports[number]
                connection = socket.create_connection(address, timeout=self._reply_timeout)
        except OSError as error:
            what = f"accepts no connection: {error}"
            if game.listeners and isinstance(error, TimeoutError):
                what = f"made no connection to port {game.ports[number]} within reply_timeout={self._reply_timeout:g} s"
            raise self.error(f"ended with {ended}" if (ended := game.exit_text()) else what) from None
        self._sockets = [each for each in self._sockets if each.socket.fileno() >= 0]
        self._sockets.append(GameSocket(connection, game, self._reply_timeout, self._max_rss))
        return self._sockets[-1]

    def tail(self, n: int = 20) -> list[str]:
        """The last `n` lines of its output. Fewer if they are very long."""
        return self.running.tail(n)

    def rss(self) -> int:
        """How many bytes of memory its processes use."""
        return self.running.rss()

    def error(self, what: str) -> GameError:
        """A `GameError` that says `what` the game has done, for checks of your own: "sent no score". It has the command
        and the end of the output."""
        return self.running.error(what)

    @contextmanager
    def deadline(self, limit: float) -> Iterator[None]:
        """Kill the game if the `with` block takes more than `limit` seconds, so that a library that waits for the game
        in C returns or raises. Then the block raises `GameError`."""
        game, until = self.running, time.monotonic() + seconds("limit", limit)
        watched = _watchdog.watch(game, until)
        try:
            yield
        except Exception as error:
            if game.was_killed:
                raise _late(game, limit) from error
            raise
        finally:
            _watchdog.forget(watched)
        if game.was_killed:
            raise _late(game, limit)

    # ---- renewal and end -------------------------------------------------------------------

    def end_episode(self) -> bool:
        """Call this between two episodes: starts the game again if `renew_every` or `max_rss` says so, and keeps the
        log short. Returns whether it did; then call `connect` again."""
        self._episodes += 1
        self.running.trim_log()
        if (self._renew_every and self._episodes % self._renew_every == 0) or (
            self._max_rss and self.rss() > self._max_rss
        ):
            self.renew()
            return True
        return False

    def renew(self) -> None:
        """End the game and start it again, on other ports. With `spares`, a started one takes its place."""
        self._end()
        self.renewal += 1
        self._launch()

    def _end(self) -> None:
        """End the game that runs."""
        game = self._run
        if game is None:
            return
        try:
            if self._quit is not None and self._owner == os.getpid() and not game.exit_text():
                self._ask_to_quit(game, self._quit)
        finally:
            for each in self._sockets:
                each.close()
            game.end()
            self._run, self._sockets = None, []

    def _ask_to_quit(self, game: RunningGame, quit: Callable[[GameProcess], object]) -> None:
        limit = max(self._options.stop_timeout, _WATCH_SECONDS)
        try:
            with self.deadline(limit):
                quit(self)
        except Exception as error:  # it is ended in any case
            what = f"raised {type(error).__name__}: {error}"
            if game.was_killed:
                what = f"took more than {limit:g} s, so the game was killed"
            warnings.warn(f"quit of the game {what}", RuntimeWarning, stacklevel=4)
        game.ends_within(limit)

    def close(self) -> None:
        """End the game and release its ports. It calls `quit` and waits, then sends SIGTERM and waits, then kills all
        processes of the game. Each of these takes at most `stop_timeout` seconds; if `quit` takes longer, the game is
        killed at once. It may be called twice. In a fork of this process, it only closes descriptors."""
        try:
            self._end()
        finally:
            pool, self._pool = self._pool, None
            if pool is not None and self._owner == os.getpid():
                pool.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._run is not None and self._owner == os.getpid():
            try:
                warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)
            finally:  # the warning may be raised as an error
                self.close()

    def __repr__(self) -> str:
        state = f"pid {self._run.pid}, ports {list(self._run.ports)}" if self._run is not None else "closed"
        return f"<GameProcess {self._options.command[0]!r}, {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} belongs to the process that has started it: make one in each worker")


def _late(game: RunningGame, limit: float) -> GameError:
    return game.error(f"was killed, because the block `with game.deadline({limit:g})` took longer")


def _bytes(value: int | str) -> int:
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if found is None or found[2].upper() not in _UNITS:
            raise ConfigError(f'max_rss must be a number of bytes, or text such as "4 GB" or "512 MiB", got {value!r}')
        value = int(float(found[1]) * _UNITS[found[2].upper()])
    return integer("max_rss", value, 1)


# ---- spares ------------------------------------------------------------------------------------


@dataclass
class _Spares:
    """The started games in reserve for one command in one process."""

    options: GameOptions
    n: int = 0
    users: int = 0
    games: list[RunningGame] = field(default_factory=list)

    @classmethod
    def of(cls, options: GameOptions, n: int) -> _Spares:
        """The reserve for `options`. It counts the caller as a user."""
        own = _spares.setdefault((os.getpid(), options), cls(options))
        own.n, own.users = max(own.n, n), own.users + 1
        return own

    def take(self, renewal: int) -> RunningGame:
        """A game in reserve that still runs, or a new one."""
        while self.games:
            game = self.games.pop(0)
            if not game.exit_text():
                game.renewal = renewal
                return game
            game.end()
        return RunningGame(self.options, renewal)

    def fill(self) -> None:
        """Start as many as are missing."""
        while len(self.games) < self.n:
            self.games.append(RunningGame(self.options))

    def leave(self) -> None:
        """One user less; the last one ends the games."""
        self.users -= 1
        if not self.users:
            _spares.pop((os.getpid(), self.options), None)
            while self.games:
                self.games.pop().end()


_spares: dict[tuple[int, GameOptions], _Spares] = {}


@contextmanager
def spares_kept() -> Iterator[None]:
    """Inside, an environment may be closed before another takes its place: the games in reserve stay."""
    kept = [pool for (pid, _), pool in list(_spares.items()) if pid == os.getpid()]
    for pool in kept:
        pool.users += 1
    try:
        yield
    finally:
        for pool in kept:
            pool.leave()


# ---- deadlines ---------------------------------------------------------------------------------


class _Watchdog:
    """One thread of this process, which kills games whose deadline has passed. It runs while there are deadlines."""

    def __init__(self) -> None:
        self._watched: dict[object, tuple[RunningGame, float]] = {}
        self._lock, self._thread = threading.Lock(), list[threading.Thread]()

    def watch(self, game: RunningGame, until: float) -> object:
        """Kill `game` at `until`, unless `forget` comes first."""
        key = object()
        with self._lock:
            self._watched[key] = game, until
            if not self._thread:
                self._thread.append(threading.Thread(target=self._run, name="penstock-games", daemon=True))
                self._thread[0].start()
        return key

    def forget(self, key: object) -> None:
        """The block is left."""
        self._watched.pop(key, None)

    def _run(self) -> None:
        idle = 0
        while True:
            time.sleep(_WATCH_SECONDS)
            now = time.monotonic()
            for game, until in list(self._watched.values()):
                if now > until:
                    game.was_killed = True
                    game.kill()
            idle = 0 if self._watched else idle + 1
            if idle > 1 / _WATCH_SECONDS:  # a game that is stepped again and again keeps its thread
                with self._lock:
                    if not self._watched:
                        self._thread.clear()
                        return


_watchdog = _Watchdog()


def _after_fork() -> None:
    global _watchdog  # noqa: PLW0603 - a fork has no threads, and no games
    _watchdog = _Watchdog()
    _spares.clear()


os.register_at_fork(after_in_child=_after_fork)
