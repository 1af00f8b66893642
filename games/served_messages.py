"""Messages between an environment and the game that is in charge of it: as bytes, and as values of spaces."""

from __future__ import annotations

import base64
import json
import select
import socket
import struct
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from penstock.errors import ConfigError, SpaceError, brief

MAX_HELLO, MAX_MESSAGE = 4096, 64 << 20  #: bytes of the first message, and of each later one
_GOODBYE = 100  # milliseconds in which the client can close first
_ABORT = struct.pack("ii", 1, 0)  # without it, the kernel keeps the port of a closed connection for a minute


class Connection:
    """A client's socket, and what has come from it: lines of JSON, or msgpack after 4 bytes with its length."""

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        """`timeout` is in seconds: for the first message, and for sending one."""
        self._socket, self._timeout, self.until = sock, min(timeout, 1e6), time.monotonic() + timeout
        self._data, self._searched, self._limit = bytearray(), 0, MAX_HELLO
        self._msgpack: Any = None  # the module, or None for JSON
        self.has_returned = False  #: whether it may repeat its last message
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)

    def fileno(self) -> int:
        return self._socket.fileno()

    def begin(self, welcome: dict[str, Any], form: object) -> bool:
        """Send the answer to hello, after which the format is `form`. False as for `send`."""
        if form not in ("json", "msgpack"):
            raise ValueError(f'format must be "json" or "msgpack", got {brief(form)}')
        try:
            module = __import__("msgpack") if form == "msgpack" else None
        except ImportError:
            raise ValueError("msgpack is not installed here: pip install msgpack") from None
        is_sent, self._msgpack, self._limit = self.send(welcome), module, MAX_MESSAGE
        return is_sent

    def send(self, message: dict[str, Any]) -> bool:
        """False if the message could not be sent whole and in time."""
        if self._msgpack is None:
            data = json.dumps(message).encode() + b"\n"
        else:
            packed = self._msgpack.packb(message)
            data = len(packed).to_bytes(4, "big") + packed
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
        start, data = 0, self._data
        if self._msgpack is None:
            length = data.find(b"\n", self._searched) + 1 or len(data) + 1
        else:
            start, length = 4, 4 + (int.from_bytes(data[:4], "big") if len(data) >= 4 else 0)
        if length - start > self._limit:
            raise ValueError(
                f"a message of {length:,} bytes or more, the limit is {self._limit:,}: {bytes(data[:60])!r}"
            )
        if length > len(data):
            self._searched = len(data)
            return None
        frame, self._searched = bytes(data[start:length]), 0
        del data[:length]
        try:
            message = json.loads(frame.decode()) if self._msgpack is None else self._msgpack.unpackb(frame)
        except (ValueError, TypeError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ValueError(f"no {'JSON' if self._msgpack is None else 'msgpack'} object: {frame[:60]!r}")
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
    """An action as numbers in lists and dicts."""
    if isinstance(space, spaces.Dict):
        return {name: encoded(part, value[name]) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return [encoded(part, each) for part, each in zip(space.spaces, value, strict=True)]
    found = np.asarray(value, space.dtype).reshape(space.shape)
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise SpaceError(f"an action for a game must have finite numbers, which JSON can hold, got {brief(value)}")
    return found.tolist()


def decoded(space: gym.Space[Any], value: object, name: str) -> Any:
    """An observation of `space`. Raises ValueError with its `name` if it does not fit."""
    if isinstance(space, spaces.Dict):
        if not isinstance(value, dict) or value.keys() != space.spaces.keys():
            raise ValueError(f"{name} must have the entries {list(space.spaces)}, got {brief(value)}")
        return {key: decoded(part, value[key], f"{name}[{key!r}]") for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        if not isinstance(value, list) or len(value) != len(space.spaces):
            raise ValueError(f"{name} must be a list of {len(space.spaces)} values, got {brief(value)}")
        return tuple(decoded(part, value[k], f"{name}[{k}]") for k, part in enumerate(space.spaces))
    dtype = np.dtype(space.dtype)
    try:
        if isinstance(value, dict) and isinstance(value.get("b64"), str):
            value = base64.b64decode(value["b64"], validate=True)
        if isinstance(value, bytes):
            found = np.frombuffer(value, dtype.newbyteorder("<")).reshape(space.shape)
        else:
            found = np.array(value)
        with np.errstate(over="raise", invalid="raise"):
            cast = found.astype(dtype)
        fits = found.dtype.kind in "biuf" and cast.shape == space.shape
        if fits and bool((cast == found).all() if dtype.kind != "f" else not np.isnan(cast).any()):
            return cast[()]
    except (ValueError, TypeError, OverflowError, FloatingPointError):
        pass  # the reason would only repeat what follows
    raise ValueError(f"{name} must have the shape {space.shape} and fit {dtype}, got {brief(value)}")
