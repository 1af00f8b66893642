"""One started game: its ports, its processes, its output, and its end; and when it is ready."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import psutil

from penstock.errors import ConfigError, GameError
from penstock.ports import PortLeases, leases
from penstock.ports.search import PortProtocol
from penstock.workers.marking import marked

_log = logging.getLogger("penstock")

_KEPT_LOG = 1 << 20  # bytes of a log without a name
_MOST_QUOTED = 12_000  # bytes of output in an error: a worker's error is sent with at most 16 kB
_LONGEST_LINE = 400
_KILL_SECONDS = 1.0  # until a killed process is gone
_UNKNOWN = "an unknown exit code"
_PLACE = re.compile(r"\{(ports|port\d*)\}")


@dataclass(frozen=True)
class GameOptions:
    """The arguments of `GameProcess`, checked. Two games with equal ones can take each other's place."""

    command: tuple[str, ...]
    ports: int
    protocol: PortProtocol
    consecutive: bool
    start: int | None
    stop: int | None
    host: str
    ready: Ready
    start_timeout: float
    start_tries: int
    stop_timeout: float
    log_lines: int
    log_file: str | None
    environ: tuple[tuple[str, str], ...]
    cwd: str | None

    def fill(self, ports: tuple[int, ...], text: str) -> str:
        """`text` with the ports in place of {port}, {port0}, {port1} and {ports}. Other braces stay."""
        numbers = {f"port{i}": str(port) for i, port in enumerate(ports)} | {"ports": ",".join(map(str, ports))}
        numbers["port"] = numbers.get("port0", "")

        def number(match: re.Match[str]) -> str:
            if not numbers.get(match[1]):
                raise ConfigError(f"{text!r} needs {{{match[1]}}}, but the game has ports={self.ports}")
            return numbers[match[1]]

        return _PLACE.sub(number, text)


class RunningGame:
    """A game from its start to its end. The constructor leases the ports and starts it; `end` ends it for certain.

    All processes of the game have a mark in their environment variables, whatever session they are in.
    """

    pid = 0
    is_ready = was_killed = False  #: killed by a deadline
    _output = -1
    _leases: PortLeases | None = None
    _process: subprocess.Popen[bytes] | None = None

    def __init__(self, options: GameOptions, renewal: int = 0) -> None:
        self.options, self.renewal, self._owner = options, renewal, os.getpid()
        self._mark = f"PENSTOCK_GAME_{os.getpid()}_{os.urandom(8).hex()}"
        self.listeners: list[socket.socket] = []
        try:
            self._start()
        except BaseException:  # an interrupt too, at any moment
            self.end()
            raise

    def _start(self) -> None:
        options = self.options
        if options.ports:
            port_range = options.start, options.stop, options.host
            self._leases = leases(
                options.ports, *port_range, protocol=options.protocol, consecutive=options.consecutive
            )
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        for port in self.ports if options.ready.binds_ports else ():
            self.listeners.append(socket.create_server((options.host, port), family=family))
        self.command = [options.fill(self.ports, part) for part in options.command]
        environ = {**os.environ, **{name: options.fill(self.ports, value) for name, value in options.environ}}
        environ |= {"PENSTOCK_PORTS": ",".join(map(str, self.ports)), self._mark: "1"}
        self._require_program(environ.get("PATH"))
        self._open_log()
        self.began = time.monotonic()
        with marked:  # it ends with this process, however this process ends
            environ |= {name: os.environ[name] for name in os.environ if name.startswith("PENSTOCK_PROCESS_")}
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=environ,
                cwd=options.cwd,
                start_new_session=True,  # Ctrl-C must not reach it
            )
        self.pid = self._process.pid

    def _require_program(self, path: str | None) -> None:
        program, folder = self.command[0], self.options.cwd or os.getcwd()
        file = Path(folder, program) if os.sep in program else Path(shutil.which(program, path=path) or "")
        if not os.path.isdir(folder):
            raise GameError(f"cwd={folder!r} is no folder: give one that exists")
        if not file.is_file():
            raise GameError(f"command not found: {program!r} (cwd {folder!r}). Give its full path")
        if not os.access(file, os.X_OK):
            raise GameError(f"{str(file)!r} is not executable: run chmod +x on it")

    def _open_log(self) -> None:
        if self.options.log_file is None:
            with tempfile.TemporaryFile() as file:  # it has no name, so nothing stays
                self._output = os.dup(file.fileno())
        else:
            name, flags = self.options.fill(self.ports, self.options.log_file), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC
            try:
                self._output = os.open(name, flags, 0o644)
            except OSError as error:
                advice = "Create its folder, or give another path"
                raise GameError(f"log_file={name!r} cannot be written: {error.strerror}. {advice}") from None
        # It appends, so that it goes on at the new end if the file is cut.
        fcntl.fcntl(self._output, fcntl.F_SETFL, fcntl.fcntl(self._output, fcntl.F_GETFL) | os.O_APPEND)
        self._output_start = os.fstat(self._output).st_size

    @property
    def ports(self) -> tuple[int, ...]:
        """The leased ports."""
        return () if self._leases is None else self._leases.ports

    @property
    def protocol(self) -> PortProtocol:
        """Of the ports."""
        return self.options.protocol

    # ---- start -----------------------------------------------------------------------------

    def wait_ready(self) -> None:
        """Wait until the game is ready. Raises `GameError`, or `PortTaken` if another program has a port."""
        pause = 0.002
        while not self.is_ready:
            ended = self.exit_text()
            if ended:
                refuse_taken_ports(self)
                raise self.error(f"ended with {ended} before it was ready")
            if self.options.ready.is_met(self):
                self.is_ready = True
            elif time.monotonic() > self.began + self.options.start_timeout:
                why = f"it runs, but is not ready (ready={self.options.ready})"
                raise self.error(f"was not ready in start_timeout={self.options.start_timeout:g} s: {why}")
            else:
                time.sleep(pause)
                pause = min(pause * 1.5, 0.1)

    # ---- its processes ---------------------------------------------------------------------

    def exit_text(self) -> str:
        """How the game's first process has ended; empty while it runs. Its id stays reserved until `end`."""
        if self._process is None or self._process.returncode is not None or os.getpid() != self._owner:
            return _UNKNOWN
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # SIGCHLD is ignored, or something else has waited for it
            return _UNKNOWN
        if found is None:
            return ""
        if found.si_code == os.CLD_EXITED:
            return f"exit code {found.si_status}"
        with suppress(ValueError):
            return signal.Signals(found.si_status).name
        return f"signal {found.si_status}"

    def _members(self) -> Iterator[int]:
        mark = b"\0" + self._mark.encode() + b"="
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:  # a zombie has none
                    if mark in b"\0" + file.read():
                        yield int(entry)

    def socket_inodes(self) -> set[str]:
        """The inodes of all open sockets of the game."""
        found = set()
        for pid in self._members():
            with suppress(OSError):
                for fd in os.listdir(f"/proc/{pid}/fd"):
                    with suppress(OSError):
                        found.add(os.readlink(f"/proc/{pid}/fd/{fd}").removeprefix("socket:[")[:-1])
        return found

    def rss(self) -> int:
        """Bytes of memory of all its processes."""
        pages = 0
        for pid in self._members():
            with suppress(OSError, IndexError), open(f"/proc/{pid}/statm") as file:
                pages += int(file.read().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    # ---- its output ------------------------------------------------------------------------

    def output(self, n_bytes: int) -> str:
        """The last `n_bytes` of its output."""
        if self._output < 0:
            return ""
        size = os.fstat(self._output).st_size
        first = max(min(self._output_start, size), size - n_bytes)
        return os.pread(self._output, size - first, first).decode(errors="replace")

    def tail(self, n: int) -> list[str]:
        """The last `n` lines of its output; fewer if they are long."""
        lines, left = list[str](), _MOST_QUOTED
        for line in reversed(self.output(1 << 16).splitlines()[-n:] if n else []):
            text = line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ..."
            left -= len(text.encode()) + 5
            if left < 0:
                break
            lines.append(text)
        return lines[::-1]

    def trim_log(self) -> None:
        """Keep the end of a log without a name, if it is large."""
        if self.options.log_file is None and os.fstat(self._output).st_size > _KEPT_LOG:
            kept = self.output(1 << 16).encode()
            os.ftruncate(self._output, 0)
            os.write(self._output, kept)

    def error(self, what: str) -> GameError:
        """The error that says `what` the game has done, with its command and the end of its output."""
        lines = self.tail(self.options.log_lines)
        where = ", ".join([f"pid {self.pid}", *([f"port {', '.join(map(str, self.ports))}"] if self.ports else [])])
        renewal = f" (renewal {self.renewal})" if self.renewal else ""
        heading = f"the last {len(lines)} lines of its output:" if lines else "it has printed nothing"
        text = [f"the game ({where}){renewal} {what}", f"  command: {' '.join(self.command)}", f"  {heading}"]
        return GameError("\n".join([*text, *(f"  | {line}" for line in lines)]))

    # ---- end -------------------------------------------------------------------------------

    def kill(self) -> None:
        """Kill all its processes at once. Safe from any thread; `end` does the rest."""
        if os.getpid() == self._owner:
            self._signal_group(signal.SIGKILL)
            for pid in self._members():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def _signal_group(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None and self.exit_text() != _UNKNOWN:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def end(self) -> None:
        """End it politely, then for certain, and release its ports last. It may be called twice."""
        for listener in self.listeners:
            listener.close()
        if os.getpid() == self._owner:
            if self._process is not None and not self.exit_text():
                self._signal_group(signal.SIGTERM)
                self.ends_within(self.options.stop_timeout)
            # By their mark, since a start that was interrupted has left no process id.
            deadline = time.monotonic() + _KILL_SECONDS
            self.kill()
            while (left := list(self._members())) and time.monotonic() < deadline:
                self.kill()
                time.sleep(0.002)
            if left:
                _log.warning("%s", self.error(f"is still there {_KILL_SECONDS:g} s after SIGKILL: pids {left}"))
            if self._process is not None:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_KILL_SECONDS)
                self._process.returncode = self._process.returncode or 0  # no warning that it still runs
            if self._leases is not None:
                self._leases.release()
        if self._output >= 0:
            os.close(self._output)
            self._output = -1

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end; returns whether it has ended."""
        until, pause = time.monotonic() + seconds, 0.001
        while not self.exit_text():
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
        return True


# ---- when it is ready ------------------------------------------------------------------------------

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
