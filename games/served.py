"""An environment whose game is in charge: the game connects, sends observations and asks for actions."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import math
import re
import secrets
import select
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym

from penstock.arguments import integer, seconds
from penstock.errors import ConfigError, GameError, SamplerStateError, brief
from penstock.games import PortLease, lease_port
from penstock.games.game_process import GameProcess
from penstock.games.served_messages import Connection, decoded, described, encoded

PROTOCOL = 1
_MOST_STRANGERS = 8
_TOKEN = re.compile(r"[!#-&(-\[\]-~]{1,512}")  # what every client can put in a line of 1,024 bytes


class ServedGame(gym.Env[Any, Any]):
    """A `gymnasium.Env` for a game that is in charge. It listens at a port. A client in the game connects, sends each
    observation, and gets the action. docs/served_games.md has the protocol, and names clients in several languages.

    Args:
        observation_space, action_space: of Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple.
        port: where to listen. With None, a free port is leased.
        host: the address to listen at. An address that other machines can reach needs a `token`.
        token: a text that the client must send in its first message.
        wait: seconds for which `reset` waits for a client.
        reply_timeout: seconds that the client may be silent while the environment waits for it.
        reconnect: seconds in which a client that has lost its connection must come back.
        command: starts the game in the constructor, and again for the next `reset` after its client has gone. `{port}`
            is replaced, and the game has the variables PENSTOCK_PORTS and PENSTOCK_TOKEN. It ends with the environment.

    Without a command it opens nothing before the first `reset`, or before `port` is read. So the example
    environment of a sampler does not listen.

    `reset` and `step` raise `GameError` if the client does not come, is silent, has gone, or sends something wrong.
    Then it is disconnected, and the next `reset` waits for another. The learner may be slow: only the client's time
    is limited.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        port: int | None = None,
        host: str = "127.0.0.1",
        token: str | None = None,
        wait: float = 60.0,
        reply_timeout: float = 10.0,
        reconnect: float = 10.0,
        command: Sequence[str | Path] | None = None,
    ) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self._spaces = {"observation": described(observation_space), "action": described(action_space)}
        self._fixed = None if port is None else integer("port", port, 1, 65_535)
        if token is not None and not (isinstance(token, str) and _TOKEN.fullmatch(token)):
            raise ConfigError(
                "token must be a text of 1 to 512 letters, digits and signs of ASCII, without spaces, quotes and "
                "backslashes, such as secrets.token_hex(16)"
            )
        if token is None and not _is_loopback(host):
            raise ConfigError(f"other machines can connect to host {host!r}: give token= a secret text")
        self._host, self._token, self._wait = host, token, seconds("wait", wait)
        self._reply_timeout, self._reconnect = seconds("reply_timeout", reply_timeout), seconds("reconnect", reconnect)
        self._command = command
        self._game: GameProcess | None = None
        self._lease: PortLease | None = None
        self._listener: socket.socket | None = None
        self._poll, self._strangers = select.poll(), dict[int, Connection]()  # by descriptor: no hello yet
        self._forget()
        if command is not None:
            self._listen()

    def _forget(self) -> None:
        """The state without a client."""
        self._client: Connection | None = None
        self._session: str | None = None
        self._n = 0  # the number of the client's last message
        self._answer: dict[str, Any] = {}  # to this message; empty if it has none yet
        self._is_playing = False
        self._refusal = ""  # of the last stranger that was refused

    @property
    def port(self) -> int:
        """Where it listens. This begins now at the latest."""
        if self._listener is None:
            self._listen()
        assert self._listener is not None
        return int(self._listener.getsockname()[1])

    def _listen(self) -> None:
        start, stop = (None, None) if self._fixed is None else (self._fixed, self._fixed + 1)
        if self._command is not None:
            environ = {} if self._token is None else {"PENSTOCK_TOKEN": self._token}
            where: Any = {"host": self._host, "start": start, "stop": stop}
            self._game = GameProcess(self._command, ready="connects", environ=environ, **where)
            self._listener = self._game.listeners[0]
        else:  # the last owner of a fixed port may be about to end, so wait
            timeout = self._wait if start else 2.0
            self._lease = self._lease or lease_port(start, stop, self._host, timeout=timeout)
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            self._listener = socket.create_server((self._host, self._lease.port), family=family)
        self._listener.setblocking(False)
        self._poll.register(self._listener, select.POLLIN)

    def _stop_listening(self) -> None:
        for stranger in list(self._strangers.values()):
            self._refuse(stranger, "the environment is closed")
        if self._listener is not None:
            self._poll.unregister(self._listener)
            self._listener.close()
        if self._game is not None:
            self._game.close()
        if self._lease is not None:
            self._lease.release()
        self._listener = self._game = self._lease = None

    # ---- the environment -----------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """End the client's episode if it has not ended, and wait for the first observation of the next one."""
        super().reset(seed=seed)
        self._seed, self._is_playing, port = int(self.np_random.integers(2**31)), False, self.port
        with self._disconnecting():
            if self._session is None:
                self._set_deadline(f"no client came to port {port} within wait={self._wait:g} s", self._wait)
            else:
                self._reply(seed=self._seed)
            message = self._receive("begin")
            result = decoded(self.observation_space, message["begin"], "begin"), _info(message)
        self._is_playing = True
        return result

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Send the action, and wait for what follows from it."""
        if not self._is_playing:
            raise SamplerStateError("step was called before reset, or after the end of an episode: call reset")
        answer = encoded(self.action_space, action)
        with self._disconnecting():
            self._reply(action=answer)
            message = self._receive("obs")
            observation = decoded(self.observation_space, message["obs"], "obs")
            reward, end = message.get("reward"), message.get("end")
            if not isinstance(reward, int | float) or isinstance(reward, bool) or not math.isfinite(reward):
                raise ValueError(f"reward must be a finite number, got {brief(reward)}")
            if end not in (None, "terminated", "truncated"):
                raise ValueError(f'end must be "terminated" or "truncated", got {brief(end)}')
            self._is_playing = end is None
            return observation, float(reward), end == "terminated", end == "truncated", _info(message)

    def close(self) -> None:
        """Disconnect the client and free the port. A second call does nothing."""
        self._disconnect("the environment is closed")
        self._stop_listening()

    @contextlib.contextmanager
    def _disconnecting(self) -> Iterator[None]:
        """Disconnect the client after an exception. If the client is to blame, raise a `GameError`."""
        try:
            yield
        except (ValueError, OverflowError, TimeoutError) as error:
            text = str(error)
            if not isinstance(error, TimeoutError):
                text = f"the client at port {self.port} sent something wrong after message {self._n}: {text}"
            failure = GameError(text)
            if self._game is not None:
                ended = self._game.exit_text()
                failure = self._game.error(
                    f"ended with {ended}{self._refusal}" if ended else f"was disconnected: {text}"
                )
            self._disconnect(text)
            raise failure from None
        except BaseException:
            self._disconnect("the environment was interrupted")
            raise

    # ---- messages ------------------------------------------------------------------------------

    def _set_deadline(self, otherwise: str, within: float) -> None:
        """The client must send its next message within so many seconds. Otherwise this is the text of the error."""
        self._otherwise, self._until = otherwise, time.monotonic() + within

    def _set_reply_deadline(self) -> None:
        text = f"the client at port {self.port} sent nothing for reply_timeout={self._reply_timeout:g} s"
        self._set_deadline(f"{text} after message {self._n}", self._reply_timeout)

    def _reply(self, **answer: Any) -> None:
        """Answer the client's last message."""
        while self._client is not None and (early := self._client.message()) is not None:
            if early.get("beat") is not True:
                raise ValueError(f"it did not wait for the answer, but sent {brief(early)}")
        self._answer = {"n": self._n, **answer}
        self._send(self._answer)

    def _send(self, message: dict[str, Any]) -> None:
        self._set_reply_deadline()
        if self._client is not None and not self._client.send(message):
            self._lose_client()

    def _receive(self, kind: str) -> dict[str, Any]:
        """The client's next message, which must have the entry `kind`."""
        while True:
            while self._client is not None and (message := self._client.message()) is not None:
                if self._handle(message, kind):
                    return message
            left, client = self._until - time.monotonic(), self._client
            ready = [descriptor for descriptor, _ in self._poll.poll(max(0.0, min(left, 0.1)) * 1000)]
            if client is None and not ready and self._game is not None and self._game.exit_text():
                raise TimeoutError("the game has ended")
            if left <= 0 and (client is None or client.fileno() not in ready):  # its message may wait to be read
                raise TimeoutError(f"{self._otherwise}{client.part() if client else ''}{self._refusal}")
            for descriptor in ready:
                self._read(descriptor)
            for stranger in [each for each in self._strangers.values() if each.until < time.monotonic()]:
                self._refuse(stranger, "it did not say hello in time")

    def _handle(self, message: dict[str, Any], kind: str) -> bool:
        """Handle a message. Returns whether it is the numbered message that was waited for."""
        assert self._client is not None
        if message.get("beat") is True:
            self._until = time.monotonic() + self._reply_timeout
            return False
        if "bye" in message and kind == "begin":
            self._disconnect("bye")
            self._set_deadline(
                f"the client said bye, and no other came to port {self.port} in {self._wait:g} s", self._wait
            )
            return False
        n, has_returned, self._client.has_returned = message.get("n"), self._client.has_returned, False
        if has_returned and n == self._n and self._answer:
            self._send(self._answer)  # the first one was lost
            return False
        if type(n) is not int or n != self._n + 1 or kind not in message:
            raise ValueError(f"a message with n={self._n + 1} and {kind!r} must follow, got {brief(message)}")
        self._n, self._answer = n, {}
        return True

    # ---- connections ---------------------------------------------------------------------------

    def _read(self, descriptor: int) -> None:
        """Take what has come from a client, or to the listener."""
        if self._listener is not None and descriptor == self._listener.fileno():
            with contextlib.suppress(OSError):  # it has gone already
                new = Connection(self._listener.accept()[0], self._reply_timeout)
                self._strangers[new.fileno()] = new
                self._poll.register(new, select.POLLIN)
            if len(self._strangers) > _MOST_STRANGERS:
                self._refuse(next(iter(self._strangers.values())), "too many others came before it said hello")
        elif self._client is not None and descriptor == self._client.fileno():
            if not self._client.read():
                self._lose_client()
        elif stranger := self._strangers.get(descriptor):
            try:
                has_gone = not stranger.read()
                if (hello := stranger.message()) is not None:
                    self._welcome(stranger, hello)
                elif has_gone:
                    raise ValueError("it has gone before it said hello")
            except ValueError as error:
                self._refuse(stranger, str(error))

    def _welcome(self, stranger: Connection, hello: dict[str, Any]) -> None:
        """Make the stranger the client. Raises ValueError with what is wrong with its hello."""
        if self._token is not None and not hmac.compare_digest(
            *(repr(each).encode() for each in (hello.get("token"), self._token))
        ):
            raise ValueError("its token is wrong")
        if hello.get("hello") != PROTOCOL or hello["hello"] is True:
            raise ValueError(f"it must say hello with protocol {PROTOCOL}, got {brief(hello)}")
        theirs = hello.get("spaces") or {}
        for name, space in self._spaces.items():
            if (its := theirs.get(name, space) if isinstance(theirs, dict) else theirs) != space:
                raise ValueError(f"the space of {name} is {brief(space)} here, and {brief(its)} in its hello")
        if (session := hello.get("session")) != self._session:
            raise ValueError("another client plays here" if self._session else "this session has ended")
        session = session or secrets.token_hex(8)
        is_sent = stranger.begin(
            {"welcome": PROTOCOL, "session": session, "seed": self._seed}, hello.get("format", "json")
        )
        if self._client is not None:  # the client knows already that this connection is lost
            self._close(self._client)
        self._client = self._strangers.pop(stranger.fileno())
        self._client.has_returned, self._session = self._session is not None, session
        self._set_reply_deadline()
        if not is_sent:
            self._lose_client()

    def _lose_client(self) -> None:
        assert self._client is not None
        self._close(self._client)
        self._client = None
        text = f"the client at port {self.port} was lost after message {self._n}, and did not come back"
        self._set_deadline(f"{text} within reconnect={self._reconnect:g} s", self._reconnect)

    def _refuse(self, stranger: Connection, why: str) -> None:
        del self._strangers[stranger.fileno()]
        self._refusal = f" (the last connection was refused: {why})"
        stranger.send({"error": why})
        self._close(stranger)

    def _disconnect(self, why: str) -> None:
        if self._client is not None:
            self._close(self._client, why)
        self._forget()
        if self._game is not None:
            self._stop_listening()

    def _close(self, connection: Connection, why: str | None = None) -> None:
        self._poll.unregister(connection)
        connection.close(why)


def _info(message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(info := message.get("info", {}), dict):
        raise ValueError(f"info must have names and values, got {brief(info)}")
    return info


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
