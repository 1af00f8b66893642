"""A connection to a game, with a deadline on every reply."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.errors import GameError
from penstock.workers.forks import leave_in_forks

if TYPE_CHECKING:
    from penstock.games.game_process import GameProcess

_Socket = socket.socket  # `GameSocket.socket` has its name
_AT_ONCE = 1 << 16
_END_SECONDS = 1.0  # the connection of a game that ends closes before its exit code is there
_WATCH_SECONDS = 5.0
_LOOK_SECONDS = 0.1  # of waiting, after which it looks whether the game has ended: a fork may hold its connection
_LONGEST_LINE = 64 << 20  # bytes


class GameSocket:
    """A TCP connection to a game. Each wait for the game lasts at most `reply_timeout` seconds. Then the call raises
    `GameError`. Every later call raises the same error, since a late reply would be taken for the next one.

    `GameProcess.connect` makes it. It belongs to this process: in a fork, it is closed, and each call raises
    `GameError`.
    """

    def __init__(self, connection: _Socket, game: GameProcess, reply_timeout: float, max_rss: int = 0) -> None:
        self._socket, self._game, self._timeout, self._max_rss = connection, game, reply_timeout, max_rss
        connection.setblocking(True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel measures the first wait, so that a quick reply in one piece costs no further system call.
        self._first_wait, self._how = min(reply_timeout, _LOOK_SECONDS), 0
        self._set_limit(self._first_wait)
        self._send, self._receive = connection.send, connection.recv
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        self._poll, self._error = poll.poll, ""
        self._watch_at = time.monotonic() + _WATCH_SECONDS
        leave_in_forks(self)

    def _set_limit(self, limit: float) -> None:
        """Its `recv` and `send` raise `BlockingIOError` after so many seconds. 0 would be no limit."""
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            packed = struct.pack("ll", *divmod(max(1, int(limit * 1e6)), 10**6))
            self._socket.setsockopt(socket.SOL_SOCKET, option, packed)

    @property
    def is_open(self) -> bool:
        """Whether it was not closed, neither here nor by the game's end."""
        return self._socket.fileno() >= 0

    @property
    def socket(self) -> _Socket:
        """The socket itself, which has the same limit: its `recv` and `send` raise `BlockingIOError` after
        `reply_timeout` seconds."""
        if self._error:
            raise GameError(self._error)
        if self.is_open and not self._how:
            self._set_limit(self._timeout)
            self._first_wait, self._how = 0.0, socket.MSG_DONTWAIT
        return self._socket

    def request(self, line: bytes) -> bytes:
        """Send one line, which must end with a newline, and return the line of the reply without its newline.

        Raises `GameError` if the game ends, is silent, closes the connection, sends more than one line, or has sent
        something without being asked.
        """
        if self._poll(0):
            self._refuse(self._more(_AT_ONCE, time.monotonic() + self._timeout))
        self.send(line)
        return self.receive_line()

    def receive_line(self) -> bytes:
        """The next line, without its newline. There may be no more than one."""
        until = 0.0
        try:
            data = self._receive(_AT_ONCE, self._how) or self._fail(ConnectionResetError())
        except BlockingIOError:
            data, until = b"", time.monotonic() + self._timeout - self._first_wait
        except OSError as error:
            self._fail(error)
        if data.find(b"\n") == len(data) - 1 and data:
            return data[:-1]
        until, parts = until or time.monotonic() + self._timeout, bytearray(data)
        while (end := parts.find(b"\n", max(0, len(parts) - _AT_ONCE))) < 0:  # the rest was searched before
            if len(parts) > _LONGEST_LINE:
                self._raise(f"sent a line of more than {_LONGEST_LINE >> 20} MiB: {bytes(parts[:60])!r}")
            parts += self._more(_AT_ONCE, until)
        if end + 1 < len(parts):
            self._refuse(bytes(parts[end + 1 :]))
        return bytes(parts[:-1])

    def send(self, data: bytes) -> None:
        """Send `data`. It does not wait for a reply. Raises `GameError` too if the game uses far too much memory."""
        if self._max_rss and time.monotonic() > self._watch_at:
            self._watch_memory()
        try:
            sent = self._send(data, self._how)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._fail(error)
        if sent != len(data):
            self._send_rest(memoryview(data).cast("B")[sent:])

    def _send_rest(self, data: memoryview) -> None:
        """Send what the game had not read after the first wait."""
        poll, until = select.poll(), time.monotonic() + self._timeout - self._first_wait
        poll.register(self._socket, select.POLLOUT)
        try:
            while data:
                self._wait(poll.poll, until)
                data = data[self._send(data, socket.MSG_DONTWAIT) :]
        except OSError as error:
            self._fail(error, "did not read the request")

    def receive(self, n: int) -> bytes:
        """Exactly `n` bytes."""
        parts, until = bytearray(), time.monotonic() + self._timeout
        while len(parts) < n:
            parts += self._more(n - len(parts), until)
        return bytes(parts)

    def close(self) -> None:
        """Close the connection. It may be called twice."""
        self._socket.close()

    def leave_to_parent(self, pid: int) -> None:
        """This process is a fork of process `pid`, to which the connection belongs."""
        self._error = f"this connection to a game belongs to process {pid}, of which this process is a fork: make a "
        self._error += "new GameProcess here, and connect to it"
        self.close()

    def _more(self, n: int, until: float) -> bytes:
        """The next bytes, at most `n`. All parts of a reply have one deadline together."""
        try:
            self._wait(self._poll, until)
            if data := self._receive(min(n, _AT_ONCE), socket.MSG_DONTWAIT):
                return data
            raise ConnectionResetError
        except OSError as error:
            self._fail(error)

    def _wait(self, poll: Callable[[float], list[Any]], until: float) -> None:
        """Wait until the socket is ready. Raises `BlockingIOError` if it is not in time, or the game has ended."""
        while (left := until - time.monotonic()) > 0:  # also if there is always more to read
            if poll(min(left, _LOOK_SECONDS) * 1000):
                return
            if self._game.exit_text() and not poll(0):  # it may have replied at its end
                break
        raise BlockingIOError

    def _watch_memory(self) -> None:
        self._watch_at = time.monotonic() + _WATCH_SECONDS
        if (rss := self._game.rss()) > 2 * self._max_rss:
            limit = f"max_rss={self._max_rss / 1e9:.2g} GB"
            self._raise(f"uses {rss / 1e9:.2g} GB, more than twice {limit}, in an episode")

    def _refuse(self, data: bytes) -> NoReturn:
        self._raise(f"sent {len(data)} bytes without being asked: {data[:60]!r}")

    def _fail(self, error: OSError, late: str = "sent no reply") -> NoReturn:
        if not self._error and not self.is_open:
            raise GameError("the connection to the game was closed by close() or renew(): call connect() again")
        is_late = isinstance(error, BlockingIOError)
        if not is_late:
            self._game.ends_within(_END_SECONDS)
        if ended := self._game.exit_text():  # if it is late, another process of the game holds the connection
            self._raise(f"ended with {ended}")
        if is_late:
            self._raise(f"{late} within reply_timeout={self._timeout:g} s; it runs ({self._game.rss() / 1e9:.2g} GB)")
        self._raise("closed the connection, but still runs")

    def _raise(self, what: str) -> NoReturn:
        """No later reply may be taken for that of a later request."""
        self._error = self._error or str(self._game.error(what))
        self.close()
        raise GameError(self._error)
