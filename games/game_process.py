"""GameProcess: a game in a process of its own, from its start on a leased port to its certain end."""

from __future__ import annotations

import atexit
import difflib
import logging
import os
import re
import select
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn
from weakref import WeakSet

import psutil

from penstock import system
from penstock.arguments import integer, seconds, true_or_false
from penstock.buffers.descriptors import anonymous_file
from penstock.envs.factory import announce_end, while_rebuilding
from penstock.errors import ConfigError, GameError, brief
from penstock.games.game_log import GameLog
from penstock.games.game_socket import GameSocket
from penstock.games.lease import PortLeases, PortProtocol, describe_process, leases, resolve
from penstock.workers import sigint
from penstock.workers.marking import MARK_PREFIX, MarkedProcess

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger("penstock")

_MOST_PORTS = 1000
_START_TRIES = 3  # if other programs take its port
_FIRST_PAUSE = 0.002  # seconds between two looks at a game that starts
_LONGEST = 1e6  # seconds; the system has a limit too
_KILL_SECONDS = 1.0  # until a killed game is gone
_MOST_QUOTED = 8_000  # bytes of output in an error: a worker's error is sent with at most 16 kB
_PLACE = re.compile(r"(?<!\$)\{(\w+)\}")  # ${name} is for a shell
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}

#: When a game is ready; see `GameProcess`.
Ready = Literal["listens", "connects"] | re.Pattern[str] | Callable[[tuple[int, ...]], object]


#: The games that were not closed yet.
_all: WeakSet[GameProcess] = WeakSet()


@atexit.register
def _close_all() -> None:
    """At the end of the interpreter. Later no thread can start, and modules may be gone."""
    for game in list(_all):
        with suppress(Exception):
            game.close()


class PortTaken(Exception):
    """Another program has the port of a game. The text says which port, and which program."""


# ---- a started game, and those in reserve ------------------------------------------------------


@dataclass(eq=False)
class _Run:
    """What belongs to one start of a game, and ends with it."""

    stop_timeout: float = 0.0
    process: MarkedProcess | None = None
    leases: PortLeases | None = None
    listeners: list[socket.socket] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    output: GameLog | None = None
    began: float = 0.0  #: by `time.monotonic`
    is_ready: bool = False

    @property
    def is_open(self) -> bool:
        """Whether it was started, by this process, and not ended here."""
        return self.process is not None and self.process.owner == os.getpid()

    @property
    def ports(self) -> tuple[int, ...]:
        """The leased ports; empty if there are none."""
        return self.leases.ports if self.leases else ()

    def announce_end(self) -> None:
        """Its end may take this long; see `GameProcess.close`."""
        for announce in announce_end:
            announce(3 * self.stop_timeout)

    def end(self) -> None:
        """End the game politely, then for certain, and release its ports last."""
        for listener in self.listeners:
            listener.close()
        self.announce_end()
        if self.process is not None and (left := self.process.end(self.stop_timeout)):
            _log.warning("the game (pid %s) is still there after SIGKILL: pids %s", self.process.pid, left)
        if self.leases is not None:
            self.leases.release()
        if self.output is not None:
            self.output.close()
        self.process = self.leases = self.output = None
        self.listeners.clear()


class _Spares:
    """The games that this process has started in reserve with the same options. All `GameProcess` with these options
    share it: `users` are their ids, and `n` is how many games it keeps."""

    def __init__(self) -> None:
        self.n, self.games, self.users = 0, list[_Run](), set[int]()

    def take(self) -> _Run | None:
        """A game in reserve that still runs, if there is one."""
        while self.games:
            run = self.games.pop(0)
            if run.process is not None and not run.process.exit_text():
                return run
            run.end()
        return None

    def leave(self, user: int) -> None:
        """This user takes no more games. When the last user leaves, the games in reserve are ended."""
        self.users.discard(user)
        if not self.users:
            self.n = 0
            while self.games:
                self.games.pop().end()


_spares: dict[Any, _Spares] = {}
os.register_at_fork(after_in_child=_spares.clear)


@contextmanager
def spares_kept() -> Iterator[None]:
    """Inside, an environment may be closed before another takes its place: the games in reserve stay."""
    kept, user = list(_spares.values()), -threading.get_ident()
    for each in kept:
        each.users.add(user)
    try:
        yield
    finally:
        for each in kept:
            each.leave(user)


while_rebuilding.append(spares_kept)


# ---- the game ----------------------------------------------------------------------------------


class GameProcess:
    """A game in a process of its own, on ports that it leases. It ends with this object, or with this process.

    The constructor starts the game and does not wait, so that several games start at the same time. `connect`, or
    `wait_ready` for a library that has its own connection, waits until it is ready. If another program has taken the
    port, the game is started again on another one.

    Args:
        command: the program and its arguments. `{port}`, `{port0}`, `{port1}` and `{ports}` are replaced by the leased
            ports, in `environ` too; the variable PENSTOCK_PORTS has them as well.
        ports: how many ports to lease; 0 for a client that has no port of its own.
        protocol, consecutive, start, stop, host: as in `penstock.games.leases`.
        ready: when the game is ready. "listens": it listens at all its ports; penstock asks the system, since the
            game may take the first connection for its player. "connects": penstock listens at the ports before the
            start, and the game has connected to all of them; `connect` accepts. `re.compile(pattern)`: its output has
            the pattern; a program in C may need `stdbuf -oL`. A function: `fn(ports)` is true; if it raises an
            `OSError`, the game is not ready.
        start_timeout: seconds from the start until it must be ready.
        reply_timeout: seconds for each reply through `connect()`.
        quit: asks the game to end, with this object as its argument, before SIGTERM does. It runs in a thread.
        stop_timeout: seconds that `quit` may take, that the game has to end after it, and again after SIGTERM. Then all
            its processes are killed. If `quit` takes longer, they are killed at once.
        log_lines: most lines of the game's output that an error quotes.
        log_file: where to append the output, `{port}` included. This file is never cut: it grows for as long as the
            game prints. None keeps the newest MiB of the output, and at times what it prints in a quarter of a second,
            in a file without a name.
        renew_every: `end_episode` starts the game again after so many episodes.
        max_rss: bytes, or text such as "4 GB": `end_episode` starts the game again if all its processes use more. In an
            episode, only `request` and `send` of the connection look at the memory, every 5 s. With more than twice as
            much, they raise `GameError`.
        spares: how many started games to keep in reserve, for this command and in this process.
        environ: environment variables of the game, besides those of this process.
        inherit_env: names of the variables that it gets from this process, such as `["PATH", "HOME"]`: so it does not
            get keys of a cloud. None: all.
        cwd: the folder of the game.
        stdin: what each start of the game can read there.

    Raises `ConfigError` for arguments that cannot work, and `GameError` if the game cannot be started.
    """

    _run = _Run()  # no game was started
    _pool: _Spares | None = None
    _quit: Callable[[GameProcess], object] | None = None
    _sockets: list[socket.socket]  # not GameSockets, which have this game: it ends when nobody has it any more
    word = "game"  #: what its errors call it
    renewal = 0  #: how often the game was started again

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
        ready: Ready = "listens",
        start_timeout: float = 60.0,
        reply_timeout: float = 10.0,
        quit: Callable[[GameProcess], object] | None = None,
        stop_timeout: float = 2.0,
        log_lines: int = 200,
        log_file: str | Path | None = None,
        renew_every: int | None = None,
        max_rss: int | str | None = None,
        spares: int = 0,
        environ: Mapping[str, str] | None = None,
        inherit_env: Collection[str] | None = None,
        cwd: str | Path | None = None,
        stdin: bytes = b"",
    ) -> None:
        if isinstance(command, str | bytes) or not command or not all(map(_is_text, command)):
            raise ConfigError(f'command must be a list such as ["./game", "--port", "{{port}}"], got {command!r}')
        by_ports = ready in ("listens", "connects")
        if not (by_ports or (isinstance(ready, re.Pattern) and isinstance(ready.pattern, str)) or callable(ready)):
            raise ConfigError(f'ready must be "listens", "connects", re.compile(pattern) or a function, got {ready!r}')
        if quit is not None and not callable(quit):
            raise ConfigError(f"quit must be a function with the game as its argument, or None, got {quit!r}")
        if by_ports and (ports == 0 or (protocol == "udp" and ready == "connects")):
            what = f"ready={ready!r} does not fit ports={ports}, protocol={protocol!r}"
            raise ConfigError(f"{what}: give re.compile(pattern) or a function")
        # What two games must have in common to take each other's place.
        self._command, self._n_ports = tuple(map(str, command)), integer("ports", ports, 0, _MOST_PORTS)
        self._protocol, self._consecutive = protocol, true_or_false("consecutive", consecutive)
        self._where, self._ready = (start, stop, host), ready
        self._start_timeout = seconds("start_timeout", start_timeout)
        self._stop_timeout = min(seconds("stop_timeout", stop_timeout, zero=True), _LONGEST)
        self._log_lines, self._log_file = integer("log_lines", log_lines, 0), _path("log_file", log_file)
        self._environ, self._inherited = _variables(environ), _names(inherit_env)
        self._cwd, self._stdin = _path("cwd", cwd), stdin
        options = tuple(vars(self).items())
        self._reply_timeout, self._quit = min(seconds("reply_timeout", reply_timeout), _LONGEST), quit
        self._renew_every = None if renew_every is None else integer("renew_every", renew_every, 1)
        self._max_rss, n_spares = 0 if max_rss is None else _bytes(max_rss), integer("spares", spares, 0)
        self._episodes, self._sockets = 0, []
        _all.add(self)
        try:
            with sigint.deferred():  # Ctrl-C could lose a game that is started, or a pipe of `subprocess`
                if n_spares:
                    self._pool = _spares.setdefault(options, _Spares())
                    self._pool.n = max(self._pool.n, n_spares)
                    self._pool.users.add(id(self))
                self._launch()
        except BaseException:
            self.close()
            raise

    # ---- start -----------------------------------------------------------------------------

    def _launch(self) -> None:
        """Take a game from the reserve, or start one."""
        pool = self._pool
        with sigint.deferred():
            self._run = (pool and pool.take()) or self._start()
            while pool is not None and len(pool.games) < pool.n:
                pool.games.append(self._start())

    def _start(self) -> _Run:
        run = _Run(self._stop_timeout)
        try:
            if self._n_ports:
                run.leases = leases(self._n_ports, *self._where, protocol=self._protocol, consecutive=self._consecutive)
            ports, host = run.ports, self._where[2]
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            for port in ports if self._ready == "connects" else ():
                run.listeners.append(socket.create_server((host, port), family=family))
            run.command = [_fill(part, ports) for part in self._command]
            own = {name: _fill(value, ports) for name, value in self._environ}
            run.output = GameLog(None if self._log_file is None else _fill(self._log_file, ports))
            environ = {**_inherited(self._inherited), **own, "PENSTOCK_PORTS": ",".join(map(str, ports))}
            run.began = time.monotonic()
            with closing(anonymous_file("penstock-stdin")) as stdin:
                os.pwrite(stdin.fd, self._stdin, 0)
                how: dict[str, Any] = {"stdin": stdin.fd, "stdout": run.output.file, "stderr": run.output.file}
                run.process = MarkedProcess(run.command, environ, cwd=self._cwd, **how)
            return run
        except BaseException as error:
            run.end()
            if isinstance(error, OSError):
                raise GameError(self._why_not_started(error)) from error
            raise

    def _why_not_started(self, error: OSError) -> str:
        cwd = os.getcwd() if self._cwd is None else self._cwd
        where = f"{self._command[0]!r} (cwd {cwd!r})"
        if not os.path.isdir(cwd):
            return f"cwd={cwd!r} is no folder: give one that exists"
        if isinstance(error, FileNotFoundError):
            return f"command not found: {where}. Give its full path. If it is a script, its interpreter must exist"
        if isinstance(error, PermissionError):
            return f"{where} is not executable: run chmod +x on it"
        return f"{where} cannot be started: {error}"

    def wait_ready(self) -> None:
        """Wait until the game is ready. Raises `GameError` if it ends, or is not ready within `start_timeout`."""
        self._require_started()
        tries, pause = 1, _FIRST_PAUSE
        while not self._run.is_ready:
            try:
                if ended := self.exit_text():
                    self._has_ports()  # raises `PortTaken` if this may be why
                    raise self.error(f"ended with {ended} before it was ready")
                self._run.is_ready = self._meets(self._ready)
                if self._run.is_ready:
                    return
            except PortTaken as taken:
                what = f"was started {tries} times, and each time another program had its port. The last one: {taken}"
                if tries == _START_TRIES:
                    raise self.error(f"{what}. Give start= and stop= a range that nobody else uses") from None
                tries, pause = tries + 1, _FIRST_PAUSE
                self._end()
                self._launch()
            if time.monotonic() > self._run.began + self._start_timeout:
                why = f"it runs, but is not ready (ready={self._ready!r})"
                raise self.error(f"was not ready in start_timeout={self._start_timeout:g} s: {why}")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)

    def _meets(self, ready: Ready) -> bool:
        if isinstance(ready, re.Pattern):
            return ready.search(self.output(1 << 20)) is not None
        if callable(ready):
            with suppress(OSError):  # such as a refused connection
                return bool(ready(self.ports))
            return False
        if ready == "listens":
            return self._has_ports()
        poll = select.poll()
        for listener in self.listeners:
            poll.register(listener, select.POLLIN)
        return len(poll.poll(0)) == len(self.listeners)

    def _has_ports(self) -> bool:
        """Whether the game listens at all its ports. Raises `PortTaken` if another program has one of them."""
        return False not in [self._has_port(port) for port in self.ports if not self._run.listeners]  # it looks at each

    def _has_port(self, port: int) -> bool:
        members = self._require_started().members
        found = system.users_of(port, self._protocol, members)
        if not found and self.exit_text() and not resolve(self._where[2], self._protocol).can_bind(port):
            found = [(None, "")]  # the system does not show who has it (macOS)
        if found and not {pid for pid, _ in found} & set(members()):
            raise PortTaken(f"port {port}, {describe_process(found[0][0])}")
        return any(state in (psutil.CONN_LISTEN, psutil.CONN_NONE) for _, state in found)  # UDP has no states

    def connect(self, port: int = 0) -> GameSocket:
        """Wait until the game is ready, and connect to its port number `port`; with "connects", accept its connection.

        Raises `GameError` if it is not ready in time, or refuses the connection.
        """
        if not self._n_ports or self._protocol != "tcp":
            why = "the game has ports=0" if not self._n_ports else "protocol is 'udp'"
            raise ConfigError(f"connect needs a TCP port, but {why}: use wait_ready() and a connection of your own")
        number = integer("port", port, 0, self._n_ports - 1)
        self.wait_ready()
        try:
            if self.listeners:
                self.listeners[number].settimeout(self._reply_timeout)
                connection, _ = self.listeners[number].accept()
            else:
                address = _ANYWHERE.get(self._where[2], self._where[2]), self.ports[number]
                connection = socket.create_connection(address, timeout=self._reply_timeout)
        except OSError as error:
            what = f"accepts no connection: {error}"
            if self.listeners and isinstance(error, TimeoutError):
                what = f"made no connection to port {self.ports[number]} within reply_timeout={self._reply_timeout:g} s"
            raise self.error(f"ended with {ended}" if (ended := self.exit_text()) else what) from None
        self._sockets = [*(each for each in self._sockets if each.fileno() >= 0), connection]
        return GameSocket(connection, self, self._reply_timeout, self._max_rss)

    # ---- its processes and its output ------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The process id of the game, which is also that of its group and session."""
        return self._require_started().pid

    @property
    def ports(self) -> tuple[int, ...]:
        """The leased ports, lowest first. `renew` changes them."""
        self._require_started()
        return self._run.ports

    @property
    def listeners(self) -> Sequence[socket.socket]:
        """With `ready="connects"`, where the game connects."""
        self._require_started()
        return self._run.listeners

    def _require_started(self) -> MarkedProcess:
        if self._run.process is None or not self._run.is_open:
            raise GameError(
                f"the {self.word} {self._command[0]!r} was closed, or belongs to the process that this one is a fork "
                "of: make a new one"
            )
        return self._run.process

    def exit_text(self) -> str:
        """How the game has ended, such as "exit code 3" or "SIGKILL"; empty while it runs."""
        return "an unknown exit code" if self._run.process is None else self._run.process.exit_text()

    def ends_within(self, limit: float) -> None:
        """Wait for its end, at most `limit` seconds."""
        if (process := self._run.process) is not None:
            process.wait(limit)

    def rss(self) -> int:
        """How many bytes of memory its processes use: the game and its children, and what belongs to it besides, which
        is looked for every few seconds."""
        return sum(map(system.rss, self._require_started().known()))

    def output(self, n_bytes: int) -> str:
        """The last `n_bytes` of its output."""
        return "" if self._run.output is None else self._run.output.end(n_bytes)

    def tail(self, n: int = 20) -> list[str]:
        """The last `n` lines of its output. Fewer if they are very long."""
        return self.output(_MOST_QUOTED).splitlines()[-n:] if n else []

    def error(self, what: str) -> GameError:
        """A `GameError` that says `what` the game has done, for checks of your own: "sent no score". It has the command
        and the end of the output."""
        lines, run = self.tail(self._log_lines), self._run
        where = f"pid {run.process.pid if run.process else 0}"
        where += f", port {str(list(run.ports))[1:-1]}" if run.ports else ""
        renewal = f" (renewal {self.renewal})" if self.renewal else ""
        heading = f"the last {len(lines)} lines of its output:" if lines else "it has printed nothing"
        text = [
            f"the {self.word} ({where}){renewal} {what}",
            f"  command: {' '.join(self._run.command)}",
            f"  {heading}",
        ]
        return GameError("\n".join([*text, *(f"  | {line}" for line in lines)]))

    @contextmanager
    def deadline(self, limit: float) -> Iterator[None]:
        """Kill the game if the `with` block takes more than `limit` seconds, so that a library that waits for the game
        in C returns or raises. Then the block raises `GameError`."""
        self._require_started()
        until, failed = time.monotonic() + seconds("limit", limit), None
        timer = threading.Timer(min(limit, _LONGEST), self.kill)
        timer.daemon = True
        try:
            timer.start()
            yield
        except Exception as error:
            failed = error
        finally:
            timer.cancel()
        if time.monotonic() >= until:
            self.kill()  # the timer may be late
            raise self.error(f"was killed, because the block `with game.deadline({limit:g})` took longer") from failed
        if failed is not None:
            raise failed

    # ---- renewal and end -------------------------------------------------------------------

    def end_episode(self) -> bool:
        """Call this between two episodes: starts the game again if `renew_every` or `max_rss` says so. Returns whether
        it did; then call `connect` again."""
        self._require_started()
        self._episodes += 1
        is_due = self._renew_every is not None and self._episodes % self._renew_every == 0
        if is_due or (self._max_rss and self.rss() > self._max_rss):
            self.renew()
            return True
        return False

    def renew(self) -> None:
        """End the game and start it again, on other ports. With `spares`, a started one takes its place."""
        self._require_started()
        self._end()
        self.renewal += 1
        self._launch()

    def close(self) -> None:
        """End the game and release its ports. It calls `quit` and waits, then sends SIGTERM and waits, then kills all
        processes of the game. Each of these takes at most `stop_timeout` seconds; if `quit` takes longer, the game is
        killed at once. It may be called twice. In a fork of this process, it only closes descriptors."""
        try:
            self._end()
        finally:
            pool, self._pool = self._pool, None
            if pool is not None:
                pool.leave(id(self))

    def _end(self) -> None:
        """End the game that runs."""
        if self._run.process is None:
            return
        self._run.announce_end()
        try:
            if self._quit is not None and not self.exit_text():
                self._ask_to_quit(self._quit)
        finally:
            for each in self._sockets:
                each.close()
            self._run.end()

    def _ask_to_quit(self, quit: Callable[[GameProcess], object]) -> None:
        """In a thread, since `quit` may never return."""
        limit, failed = max(self._stop_timeout, 0.05), list[str]()

        def ask() -> None:
            try:
                quit(self)
            except Exception as error:  # the game is ended in any case
                failed.append(f"raised {type(error).__name__}: {error}")

        thread = threading.Thread(target=ask, name="penstock-quit", daemon=True)
        if sys.is_finalizing():  # the start of a thread would wait for ever
            return self.kill()
        try:
            thread.start()
        except RuntimeError:  # Python 3.12 and later start no thread while the interpreter exits
            return self.kill()
        thread.join(limit)
        if thread.is_alive():
            failed.insert(0, f"took more than {limit:g} s, so the game was killed")
            self.kill()
            thread.join(_KILL_SECONDS)  # it may have waited for the game
        if failed:
            warnings.warn(f"quit of the {self.word} {failed[0]}", RuntimeWarning, stacklevel=4)
        self.ends_within(limit)
        return None

    def kill(self) -> None:
        """Kill all its processes at once. Any thread may call this; `close` does the rest."""
        if (process := self._run.process) is not None:
            process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._run.is_open:
            try:
                warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)
            finally:  # the warning may be raised as an error
                self.close()

    def __repr__(self) -> str:
        state = f"pid {self.pid}, ports {list(self.ports)}" if self._run.is_open else "closed"
        return f"<GameProcess {self._command[0]!r}, {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} belongs to the process that has started it: make one in each worker")


def _fill(text: str, ports: tuple[int, ...]) -> str:
    """`text` with the ports in place of {port}, {port0}, {port1} and {ports}. Other braces stay, but a word that is
    nearly one of these is refused."""
    numbers = {f"port{i}": str(port) for i, port in enumerate(ports)}
    if ports:
        numbers |= {"port": str(ports[0]), "ports": ",".join(map(str, ports))}

    def number(match: re.Match[str]) -> str:
        word = match[1]
        if word not in numbers and re.fullmatch(r"ports|port\d*", word):
            raise ConfigError(f"{text!r} needs {match[0]}, but the game has ports={len(ports)}")
        if word not in numbers and (near := difflib.get_close_matches(word.lower(), ("port", "ports"), 1, 0.7)):
            raise ConfigError(f"{text!r} has {match[0]}: did you mean {{{near[0]}}}?")
        return numbers.get(word, match[0])

    return _PLACE.sub(number, text)


def _is_text(value: object) -> bool:
    return isinstance(value, str | Path) and "\0" not in str(value)


def _path(name: str, value: object) -> str | None:
    if value is None or (_is_text(value) and str(value)):
        return None if value is None else str(value)
    raise ConfigError(f"{name} must be a path or None, got {brief(value)}")


def _variables(environ: Any) -> tuple[tuple[str, str], ...]:
    given = {} if environ is None else environ
    if not isinstance(given, Mapping) or not all(
        isinstance(name, str) and re.fullmatch(r"[^=\0]+", name) and _is_text(value) for name, value in given.items()
    ):
        raise ConfigError(f'environ must have names and texts, such as {{"DISPLAY": ":1"}}, got {brief(environ)}')
    return tuple((name, str(value)) for name, value in given.items())


def _names(inherit_env: Any) -> frozenset[str] | None:
    if inherit_env is None:
        return None
    is_list = isinstance(inherit_env, Collection) and not isinstance(inherit_env, str | bytes)
    if not is_list or not all(isinstance(name, str) and re.fullmatch(r"[^=\0]+", name) for name in inherit_env):
        raise ConfigError(f'inherit_env must be a list of names, such as ["PATH", "HOME"], got {brief(inherit_env)}')
    return frozenset(inherit_env)


def _inherited(names: frozenset[str] | None) -> dict[str, str]:
    """The variables of this process with these names, and those that mark its programs."""
    return {n: v for n, v in os.environ.items() if names is None or n in names or n.startswith(MARK_PREFIX)}


def _bytes(value: int | str) -> int:
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if found is None or found[2].upper() not in _UNITS:
            raise ConfigError(f'max_rss must be a number of bytes, or text such as "4 GB" or "512 MiB", got {value!r}')
        value = int(float(found[1]) * _UNITS[found[2].upper()])
    return integer("max_rss", value, 1)
