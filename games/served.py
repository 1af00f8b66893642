"""An environment whose game has its own main loop: the game connects, sends observations and asks for actions."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import math
import re
import secrets
import select
import socket
import struct
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from penstock.arguments import integer, seconds
from penstock.errors import ConfigError, GameError, SamplerStateError, SpaceError, brief
from penstock.games import PortLease, host, lease_port
from penstock.games.game_process import GameProcess
from penstock.workers.forks import leave_in_forks

MAX_HELLO, MAX_MESSAGE = 4096, 64 << 20  #: bytes of the first message, and of each later one
_GOODBYE = 100  # milliseconds in which the client can close first
_ABORT = struct.pack("ii", 1, 0)  # without it, the kernel keeps the port of a closed connection for a minute


class GameClient:
    """A client's socket, and what has come from it: lines of JSON, or raw messages as in `host.encoded`."""

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        """`timeout` is in seconds: for the first message, and for sending one."""
        self._socket, self._timeout, self.until = sock, min(timeout, 1e6), time.monotonic() + timeout
        self._data, self._searched, self._limit = bytearray(), 0, MAX_HELLO
        self._is_raw = False  # or JSON
        self.has_returned = False  #: whether it may repeat its last message
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)

    def fileno(self) -> int:
        return self._socket.fileno()

    def begin(self, welcome: dict[str, Any], form: object) -> bool:
        """Send the answer to hello, after which the format is `form`. False as for `send`."""
        if form not in ("json", "raw"):
            raise ValueError(f'format must be "json" or "raw", got {brief(form)}')
        is_sent, self._is_raw, self._limit = self.send(welcome), form == "raw", MAX_MESSAGE
        return is_sent

    def send(self, message: dict[str, Any]) -> bool:
        """False if the message could not be sent whole and in time."""
        if self._is_raw:
            data = host.encoded(message, strict=True)
        else:
            data = json.dumps(message, default=np.ndarray.tolist).encode() + b"\n"
        try:
            if (sent := self._socket.send(data)) < len(data):
                self._socket.settimeout(self._timeout)
                self._socket.sendall(data[sent:])
                self._socket.setblocking(False)
        except OSError:
            return False
        return True

    def read(self) -> bool:
        """Take what has come. False if the client has gone."""
        try:
            data = self._socket.recv(min(max(1, self._limit - len(self._data)), 1 << 16))
        except OSError as error:
            return isinstance(error, BlockingIOError)
        self._data += data
        return data != b""

    def message(self) -> dict[str, Any] | None:
        """The next message, if all of it has come. Raises ValueError, with its first bytes, if it is not valid."""
        data = self._data
        if not self._is_raw:
            length = data.find(b"\n", self._searched) + 1 or len(data) + 1
        else:
            length = host.length(data) if len(data) >= host.PREFIX.size else host.PREFIX.size
        if length > self._limit:
            raise ValueError(
                f"a message of {length:,} bytes or more, the limit is {self._limit:,}: {bytes(data[:60])!r}"
            )
        if length > len(data):
            self._searched = len(data)
            return None
        with memoryview(data) as view:
            frame, self._searched = bytes(view[:length]), 0
        del data[:length]
        try:
            message = host.decoded(frame) if self._is_raw else json.loads(frame.decode())
        except (ValueError, TypeError, RecursionError, OverflowError):
            message = None
        if not isinstance(message, dict):
            raise ValueError(f"no {'raw' if self._is_raw else 'JSON'} object: {frame[:60]!r}")
        return message

    def part(self) -> str:
        """What has come of the next message, for an error."""
        return f"; {len(self._data):,} bytes of a message came: {bytes(self._data[:60])!r}" if self._data else ""

    def close(self, why: str | None = None) -> None:
        """Send `why` as an error, if the client is still there."""
        if why is not None and self.send({"error": why}):
            closing = select.poll()
            closing.register(self._socket, select.POLLIN)
            closing.poll(_GOODBYE)
        self._socket.close()


def described(space: gym.Space[Any]) -> Any:
    """What a client may know of the space. Raises `ConfigError` for a space whose values cannot be sent."""
    if isinstance(space, spaces.Dict):
        return {name: described(part) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return [described(part) for part in space.spaces]
    if isinstance(space, spaces.Discrete):
        return {"n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return {"shape": list(space.shape), "dtype": str(space.dtype)}
    usable = "Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple"
    raise ConfigError(f"a ServedGame cannot send values of {brief(space)}: use {usable}")


def encoded(space: gym.Space[Any], value: Any) -> Any:
    """An action as numbers and arrays in lists and dicts."""
    if isinstance(space, spaces.Dict):
        return {name: encoded(part, value[name]) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return [encoded(part, each) for part, each in zip(space.spaces, value, strict=True)]
    found = np.asarray(value, space.dtype).reshape(space.shape)
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise SpaceError(f"an action for a game must have finite numbers, which JSON can hold, got {brief(value)}")
    return found if found.ndim else found.item()


def decoded(space: gym.Space[Any], value: object, name: str) -> Any:
    """An observation of `space`. Raises ValueError with its `name` if it does not fit."""
    if isinstance(space, spaces.Dict):
        if not isinstance(value, dict) or value.keys() != space.spaces.keys():
            raise ValueError(f"{name} must have the entries {list(space.spaces)}, got {brief(value)}")
        return {key: decoded(part, value[key], f"{name}[{key!r}]") for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        if not isinstance(value, list | tuple) or len(value) != len(space.spaces):
            raise ValueError(f"{name} must be a list of {len(space.spaces)} values, got {brief(value)}")
        return tuple(decoded(part, value[k], f"{name}[{k}]") for k, part in enumerate(space.spaces))
    dtype = np.dtype(space.dtype)
    try:
        found = np.asarray(value)
        if found.dtype.kind not in "biuf" or found.shape != space.shape:  # before any memory is taken for it
            raise ValueError
        with np.errstate(over="raise", invalid="raise"):
            cast = found.astype(dtype, copy=False)
        if not np.isnan(cast).any() if dtype.kind == "f" else cast is found or (cast == found).all():
            return cast[()]
    except (ValueError, TypeError, OverflowError, FloatingPointError):
        pass  # the reason would only repeat what follows
    raise ValueError(f"{name} must have the shape {space.shape} and fit {dtype}, got {brief(value)}")


PROTOCOL = 2
_MOST_STRANGERS = 8
_TOKEN = re.compile(r"[!#-&(-\[\]-~]{1,512}")  # what every client can put in a line of 1,024 bytes


class ServedGame(gym.Env[Any, Any]):
    """A `gymnasium.Env` for a game with its own main loop. It listens at a port. A client in the game connects, sends
    each observation, and gets the action. docs/served_games.md has the protocol, and clients in several languages.

    Args:
        observation_space, action_space: of Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple.
        port: where to listen. With None, a free port is leased.
        host: the address to listen at. An address that other machines can reach needs a `token`.
        token: a text that the client must send in its first message. By default, a game that `command` starts gets a
            random one. Without a command nobody needs one: then every user of this machine can be the client.
        wait: seconds for which `reset` waits for a client.
        reply_timeout: seconds that the client may be silent while the environment waits for it.
        reconnect: seconds in which a client that has lost its connection must come back.
        command: starts the game in the constructor, and again for the next `reset` after its client has gone. `{port}`
            is replaced, and the game has the variables PENSTOCK_PORTS and PENSTOCK_TOKEN. It ends with the environment.
        inherit_env: which environment variables the game of `command` gets from this process; see `GameProcess`.

    Without a command it opens nothing before the first `reset`, or before `port` is read. So the example
    environment of a sampler does not listen. In a fork of the process in which it is open, it cannot be used.

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
        inherit_env: Collection[str] | None = None,
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
        if token is None and command is not None:  # otherwise another user of this machine could come first
            token = secrets.token_hex(16)
        self._host, self._token, self._wait = host, token, seconds("wait", wait)
        self._reply_timeout, self._reconnect = seconds("reply_timeout", reply_timeout), seconds("reconnect", reconnect)
        self._command, self._inherit_env = command, inherit_env
        self._game: GameProcess | None = None
        self._lease: PortLease | None = None
        self._listener: socket.socket | None = None
        self._poll, self._strangers = select.poll(), dict[int, GameClient]()  # by descriptor: no hello yet
        self._left = ""  # in a fork of the process that it belongs to: why it cannot be used
        self._forget()
        leave_in_forks(self)
        if command is not None:
            self._listen()

    def _forget(self) -> None:
        """The state without a client."""
        self._client: GameClient | None = None
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

    def leave_to_parent(self, pid: int) -> None:
        """This process is a fork of process `pid`: if the game is open, it belongs to that. The client hears nothing of
        this."""
        for each in [*self._strangers.values(), *([self._client] if self._client else ())]:
            each.close()
        if self._listener is not None:
            self._left = f"this ServedGame belongs to process {pid}, of which this process is a fork: make one here"
            self._listener.close()
        self._strangers.clear()
        self._forget()
        self._poll, self._listener, self._game, self._lease = select.poll(), None, None, None

    def _require_own(self) -> None:
        if self._left:
            raise GameError(self._left)

    def _listen(self) -> None:
        self._require_own()
        start, stop = (None, None) if self._fixed is None else (self._fixed, self._fixed + 1)
        if self._command is not None:
            environ = {"PENSTOCK_TOKEN": str(self._token)}
            where: Any = {"host": self._host, "start": start, "stop": stop, "inherit_env": self._inherit_env}
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
            self._require_own()
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
                new = GameClient(self._listener.accept()[0], self._reply_timeout)
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

    def _welcome(self, stranger: GameClient, hello: dict[str, Any]) -> None:
        """Make the stranger the client. Raises ValueError with what is wrong with its hello."""
        if self._token is not None and not hmac.compare_digest(
            *(repr(each).encode() for each in (hello.get("token"), self._token))
        ):
            where = "" if self._command is None else ": it must be the text in the variable PENSTOCK_TOKEN"
            raise ValueError(f"its token is wrong{where}")
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

    def _refuse(self, stranger: GameClient, why: str) -> None:
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

    def _close(self, connection: GameClient, why: str | None = None) -> None:
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
