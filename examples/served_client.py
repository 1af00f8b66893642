"""The client of a game with its own main loop, for protocol 2 of penstock's ServedGame. It needs only Python: copy it.

client = Client(port)                     # or Client(), if the learner has started this program
while playing:
    obs = new_episode(client.seed)
    action = client.begin(obs)
    while action is not None:             # None: the learner wants a new episode
        obs, reward, over = play(action)
        if over:
            client.end(obs, reward)
            break
        action = client.act(obs, reward)
client.bye()

An observation is a number, a list of numbers, an array (of numpy, `array.array`, or bytes), or a dict or list of these.
Arrays are sent as they are in memory. An action has numbers, lists and dicts.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from typing import Any


class Refused(RuntimeError):
    """The learner has disconnected this client, and says why. To connect again helps only if another client
    plays here that has gone: it keeps its place for `reconnect` seconds."""


class Client:
    """One game's connection to its learner.

    A lost connection is opened again, and nothing is lost or done twice. `ConnectionError` is raised if that does not
    succeed within `wait` seconds. A call waits for the learner as long as it needs.
    """

    def __init__(
        self,
        port: int | None = None,
        host: str = "127.0.0.1",
        token: str | None = None,
        spaces: dict[str, Any] | None = None,
        wait: float = 60.0,
    ) -> None:
        self.address = (host, port or int(os.environ["PENSTOCK_PORTS"].split(",")[0]))
        self.hello = {
            "hello": 2,
            "format": "raw",
            "token": token or os.environ.get("PENSTOCK_TOKEN"),
            "spaces": spaces or {},
        }
        self.wait, self.n = wait, 0
        self.socket: socket.socket | None = None
        self.seed: int = self._ask(None)["seed"]  #: of the next episode

    def begin(self, obs: Any, info: dict[str, Any] | None = None) -> Any:
        """Begin an episode. Returns the action, or None if the learner wants a new episode."""
        return self._action({"begin": obs, "info": info or {}})

    def act(self, obs: Any, reward: float, info: dict[str, Any] | None = None) -> Any:
        """What followed from the last action. Returns the next one, or None if the learner wants a new episode."""
        return self._action({"obs": obs, "reward": reward, "info": info or {}})

    def end(self, obs: Any, reward: float, how: str = "terminated", info: dict[str, Any] | None = None) -> None:
        """The episode has ended, "terminated" or "truncated"."""
        self._action({"obs": obs, "reward": reward, "end": how, "info": info or {}})

    def beat(self) -> None:
        """Say that the game needs more time for its next message."""
        self._send({"beat": True})

    def bye(self, reason: str = "") -> None:
        """Leave. Between two episodes this is no error for the learner."""
        self._send({"bye": reason})
        self.socket.close()

    def _action(self, message: dict[str, Any]) -> Any:
        self.n += 1
        reply = self._ask({"n": self.n, **message})
        self.seed = reply.get("seed", self.seed)
        return reply.get("action")

    def _ask(self, message: dict[str, Any] | None) -> dict[str, Any]:
        """Send the message, again if the connection was lost, and return the reply; of None, the answer to hello."""
        until = time.monotonic() + self.wait
        while True:
            is_connected = self.socket is not None
            try:
                welcome = {} if is_connected else self._connect()
                is_connected = True
                if message is None:
                    return welcome
                self._send(message)
                return self._reply()
            except OSError:
                if self.socket is not None:
                    self.socket.close()
                    self.socket = None
                if is_connected:  # it is lost, maybe after a long wait for the learner
                    until = time.monotonic() + self.wait
                elif time.monotonic() > until:  # the learner does not listen yet, or has gone
                    raise
                else:
                    time.sleep(0.05)

    def _connect(self) -> dict[str, Any]:
        self.socket = socket.create_connection(self.address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.file = self.socket.makefile("rb")
        self.socket.sendall(json.dumps(self.hello).encode() + b"\n")  # hello and welcome are lines of JSON
        line = self.file.readline()
        welcome = self._checked(json.loads(line) if line.endswith(b"\n") else None)
        self.hello["session"] = welcome["session"]
        return welcome

    def _send(self, message: dict[str, Any]) -> None:
        arrays: list[bytes] = []
        header = json.dumps(_plain(message, arrays)).encode()
        self.socket.sendall(b"".join([PREFIX.pack(len(header), sum(map(len, arrays)), 0), header, *arrays]))

    def _reply(self) -> dict[str, Any]:
        prefix = self.file.read(PREFIX.size)
        if len(prefix) < PREFIX.size:
            return self._checked(None)
        n_header, n_arrays, _ = PREFIX.unpack(prefix)
        header, arrays = self.file.read(n_header), self.file.read(n_arrays)
        is_whole = len(header) + len(arrays) == n_header + n_arrays
        return self._checked(_value(json.loads(header), [arrays]) if is_whole else None)

    def _checked(self, reply: Any) -> dict[str, Any]:
        if reply is None:
            raise ConnectionResetError("the learner has closed the connection")
        if "error" in reply:
            self.socket.close()
            raise Refused(reply["error"])
        return dict(reply)


PREFIX = struct.Struct("<IIB")  # bytes of the header, bytes of all arrays, 0
KINDS = {**dict.fromkeys("bhilq", "i"), **dict.fromkeys("BHILQ", "u"), **dict.fromkeys("efd", "f"), "?": "b"}
FORMATS = {"b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q"}
FORMATS.update({"f2": "e", "f4": "f", "f8": "d"})


def _plain(value: Any, arrays: list[bytes]) -> Any:
    """`value` as it stands in the header. The bytes of its arrays are appended to `arrays`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {"d": {name: _plain(part, arrays) for name, part in value.items()}}
    if isinstance(value, (list, tuple)):
        return [_plain(part, arrays) for part in value]
    view = memoryview(value)  # of an array
    if not view.shape:
        return view.tolist()  # a number of numpy
    arrays.append(view.tobytes())
    order = ">" if view.format.startswith(">") else "<" if view.itemsize > 1 else "|"
    return {"a": [f"{order}{KINDS[view.format[-1]]}{view.itemsize}", list(view.shape)]}


def _value(plain: Any, rest: list[bytes]) -> Any:
    """What `plain` of a header stands for. It takes its arrays from the beginning of `rest[0]`."""
    if isinstance(plain, list):
        return [_value(part, rest) for part in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, found),) = plain.items()
    if kind == "d":
        return {name: _value(part, rest) for name, part in found.items()}
    dtype, shape = found  # an array
    n = int(dtype[2:])
    for size in shape:
        n *= size
    data, rest[0] = rest[0][:n], rest[0][n:]
    numbers = [number for (number,) in struct.iter_unpack(dtype[0].replace("|", "=") + FORMATS[dtype[1:]], data)]
    return _nested(numbers, shape)


def _nested(numbers: list[Any], shape: list[int]) -> list[Any]:
    if len(shape) < 2:
        return numbers
    n = len(numbers) // (shape[0] or 1)
    return [_nested(numbers[i * n : (i + 1) * n], shape[1:]) for i in range(shape[0])]
