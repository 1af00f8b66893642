"""The other side of an `EnvProcess`: the process that has the environment. And the messages of both sides.

It runs as a script, with Python 3.7 or later and numpy, and needs nothing of penstock.

A message is a prefix, a header in JSON, and the bytes of all its arrays: after the header, or, if they are many, in a
memory that both sides map. To read a message never runs code of the other side.
"""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import json
import mmap
import os
import pickle
import random
import re
import signal
import socket
import struct
import sys
import traceback
from typing import Any

import numpy as np

PREFIX = struct.Struct("<IIB")  # bytes of the header, bytes of the arrays, whether these are in the shared memory
INLINE = 1 << 16  # bytes of arrays that follow the header even if there is a shared memory
MAX_HEADER, MAX_BODY = 64 << 20, 1 << 30  # bytes
_DTYPE = re.compile(r"[<>|][biufcSU][1-9]\d{0,8}")


class NotSent:
    """Stands for an object that an `EnvProcess` does not send: only numbers, texts, bytes, arrays of these, None, and
    lists, tuples and dicts of all these arrive. `kind` is the name of its class."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"<NotSent: {self.kind}>"


# ---- messages ------------------------------------------------------------------------------------------


def encoded(value: Any, memory: Any = None, *, strict: bool = False) -> bytes:
    """`value` as a message. Its arrays go into `memory`, an array of bytes, if they are many and fit.

    Raises `ValueError` if it is too large, and with `strict` `TypeError` for an object that cannot be sent.
    """
    parts: list[Any] = []
    header = json.dumps(_plain(value, parts, strict)).encode()
    size = sum([each.nbytes for each in parts])
    _check_sizes(len(header), size)
    if memory is None or not INLINE < size <= len(memory):
        return b"".join([PREFIX.pack(len(header), size, 0), header, *[each.tobytes() for each in parts]])
    at = 0
    for each in parts:
        memory[at : at + each.nbytes] = each.reshape(-1).view(np.uint8)
        at += each.nbytes
    return PREFIX.pack(len(header), size, 1) + header


def length(prefix: Any) -> int:
    """How many bytes the message has that begins with these. Raises `ValueError` if it is too large."""
    header, size, is_in_memory = PREFIX.unpack_from(prefix)
    _check_sizes(header, size)
    n: int = PREFIX.size + header + (0 if is_in_memory else size)
    return n


def decoded(data: Any, memory: Any = None) -> Any:
    """The value of the message `data`. Its arrays are copies. Raises `ValueError` if `data` is no message."""
    try:
        header, size, is_in_memory = PREFIX.unpack_from(data)
        start, end = PREFIX.size + header, length(data)
        if len(data) < end or (is_in_memory and (memory is None or size > len(memory))):
            raise ValueError("it is cut")
        body = memory[:size] if is_in_memory else memoryview(data)[start:end]
        return _Body(body).value(json.loads(bytes(data[PREFIX.size : start]).decode()))
    except Exception as error:  # of many classes, such as RecursionError
        raise ValueError(f"no message: {type(error).__name__}: {str(error)[:200]}") from None


def _check_sizes(header: int, size: int) -> None:
    if header > MAX_HEADER or size > MAX_BODY:
        raise ValueError(f"a message of {header:,} bytes and {size:,} bytes of arrays is too large")


def _plain(value: Any, parts: list[Any], strict: bool) -> Any:  # noqa: C901, PLR0911
    """`value` for JSON. Its arrays and bytes are appended to `parts`."""
    kind = type(value)
    if kind is float or kind is int or kind is str or kind is bool or value is None:
        return value
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufcSU":
        array = np.ascontiguousarray(value)
        parts.append(array)
        return {"a": [array.dtype.str, value.shape]} if isinstance(value, np.ndarray) else {"g": array.dtype.str}
    if isinstance(value, dict):
        if all(type(key) is str for key in value):
            return {"d": {key: _plain(each, parts, strict) for key, each in value.items()}}
        return {"p": [[_plain(key, parts, strict), _plain(each, parts, strict)] for key, each in value.items()]}
    if isinstance(value, (list, tuple)):
        each = [_plain(each, parts, strict) for each in value]
        return each if isinstance(value, list) else {"t": each}
    if isinstance(value, (bytes, bytearray)):
        parts.append(np.frombuffer(bytes(value), np.uint8))
        return {"b": len(value)}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    for base in (int, float, str):
        if isinstance(value, base):
            return base(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if strict:
        raise TypeError(f"{value!r}, a {name}, cannot be sent: use numbers, texts, arrays, lists, tuples and dicts")
    return {"x": name}


class _Body:
    """Takes arrays from the bytes of a message, one after the other."""

    def __init__(self, data: Any) -> None:
        self._data, self._at = data, 0

    def value(self, text: Any) -> Any:  # noqa: C901, PLR0911
        if type(text) is list:
            return [self.value(each) for each in text]
        if type(text) is not dict:
            return text
        ((kind, text),) = text.items()
        if kind == "a":
            return self._array(*text)
        if kind == "d":
            return {key: self.value(each) for key, each in text.items()}
        if kind == "t":
            return tuple([self.value(each) for each in text])
        if kind == "g":
            return self._array(text, ())[()]
        if kind == "p":
            return {self.value(key): self.value(each) for key, each in text}
        if kind == "b":
            return self._array("|u1", [text]).tobytes()
        if kind == "c":
            return complex(*text)
        if kind == "x":
            return NotSent(str(text)[:200])
        raise ValueError(f"unknown kind {kind[:20]!r}")

    def _array(self, dtype: Any, shape: Any) -> Any:
        if not _DTYPE.fullmatch(dtype):
            raise ValueError(f"no dtype: {dtype[:20]!r}")
        kind, n = np.dtype(dtype), 1
        for each in shape:
            n *= each if type(each) is int and 0 <= each <= MAX_BODY else MAX_BODY
        if len(shape) > 64 or n * kind.itemsize > len(self._data) - self._at:
            raise ValueError(f"an array of {min(n, MAX_BODY)} {kind} does not fit its message")
        if not n:
            return np.zeros(shape, kind)
        found = np.frombuffer(self._data, kind, n, self._at).reshape(shape).copy()
        self._at += found.nbytes
        return found


# ---- the environment -----------------------------------------------------------------------------------


def _described(space: Any) -> list[Any]:  # noqa: PLR0911
    """A space of Gymnasium or gym as plain data; see `space_of` in env_process.py."""
    kinds = [each.__name__ for each in type(space).__mro__]
    if "Box" in kinds:
        return ["Box", np.asarray(space.low), np.asarray(space.high), np.dtype(space.dtype).str]
    if "Discrete" in kinds:
        return ["Discrete", int(space.n), int(getattr(space, "start", 0)), np.dtype(space.dtype or int).str]
    if "MultiDiscrete" in kinds:
        return ["MultiDiscrete", np.asarray(space.nvec), getattr(space, "start", None), np.dtype(space.dtype).str]
    if "MultiBinary" in kinds:
        return ["MultiBinary", [int(n) for n in space.n] if np.ndim(space.n) else int(space.n)]
    if "Text" in kinds:
        return ["Text", int(space.min_length), int(space.max_length), "".join(space.character_list)]
    if "Dict" in kinds:
        return ["Dict", [(name, _described(each)) for name, each in space.spaces.items()]]
    if "Tuple" in kinds:
        return ["Tuple", [_described(each) for each in space.spaces]]
    return ["", str(space)]


class _Host:
    """The environment, with the interface of Gymnasium, whatever its own is."""

    env: Any = None
    memory: Any = None

    def make(self, target: Any, kwargs: dict[str, Any], path: list[str]) -> Any:
        """Make the environment. Returns what the learner must know of it."""
        sys.path[:0] = path
        if isinstance(target, bytes):  # from the learner, in whose Python this runs
            function = pickle.loads(target)
        else:
            module, _, name = target.partition(":")
            function = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
        self.env = env = function(**kwargs)
        libraries = _libraries(getattr(env, "unwrapped", env))
        self.is_gymnasium = "gymnasium" in libraries
        version = re.match(r"0\.(\d+)", getattr(sys.modules.get("gym"), "__version__", ""))
        self.is_old_gym = "gym" in libraries and version is not None and int(version[1]) < 26  # reset returns no info
        layers = [env]  # of wrappers, any of which may not pass it on
        while _is_wrapper(layers[-1]) and len(layers) < 99:
            layers.append(layers[-1].env)
        names = [_parameters(each.reset) for each in layers]
        takes_seed = "seed" in names[-1] or ("**" in names[-1] and not hasattr(env, "seed"))
        self.takes_seed = takes_seed and all("seed" in each or "**" in each for each in names)
        takes_info = "return_info" in names[-1]  # gym 0.22 to 0.25
        self.needs_info = takes_info and all("return_info" in each or "**" in each for each in names)
        spaces = _described(env.observation_space), _described(env.action_space)
        return (os.getpid(), *spaces, getattr(env, "render_mode", None), getattr(env, "metadata", None) or {})

    def map(self, path: str, size: int, first: bytes) -> bool:
        """Map the memory of the learner, which begins with these bytes. False: in a container, this cannot be."""
        try:
            with open(path, "r+b") as file:
                if file.read(len(first)) != first:  # in another container it is another file
                    return False
                self.memory = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
        except (OSError, ValueError):
            return False
        return True

    def reset(self, seed: int | None, options: Any) -> Any:
        """Reset the environment, and the global generators with it."""
        arguments: dict[str, Any] = {} if options is None else {"options": options}
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            if self.takes_seed or self.is_gymnasium:
                arguments["seed"] = seed
            elif hasattr(self.env, "seed"):
                self.env.seed(seed)
        if self.needs_info:
            arguments["return_info"] = True
        result = self.env.reset(**arguments)
        is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
        has_info = is_pair and (self.takes_seed or self.needs_info or not self.is_old_gym)
        return result if self.is_gymnasium or has_info else (result, {})

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        if self.is_gymnasium or not isinstance(result, tuple) or len(result) != 4:
            return result  # otherwise it is an old gym's
        observation, reward, done, info = result
        truncated = bool(done) and bool(info.get("TimeLimit.truncated", False))
        return observation, reward, bool(done) and not truncated, truncated, info

    def render(self) -> Any:
        return self.env.render() if hasattr(self.env, "render_mode") else self.env.render(mode="rgb_array")

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = self.env
        for part in name.split("."):
            found = getattr(found, part)
        return found(*args, **kwargs) if callable(found) else found


def _libraries(env: Any) -> list[str]:
    return [each.__module__.split(".")[0] for each in type(env).__mro__]


def _is_wrapper(env: Any) -> bool:
    kinds = type(env).__mro__
    is_one = any(each.__name__ == "Wrapper" and each.__module__.split(".")[0] in ("gym", "gymnasium") for each in kinds)
    return is_one and hasattr(getattr(env, "env", None), "reset")


def _parameters(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return ["**" if each.kind == each.VAR_KEYWORD else each.name for each in parameters]


def _received(connection: socket.socket, buffer: bytearray) -> memoryview:
    """The next message, in `buffer`, which grows. Raises `EOFError` if the learner has gone."""
    n, end = 0, PREFIX.size
    while n < end:
        if end > len(buffer):
            buffer.extend(bytes(end - len(buffer)))
        added = connection.recv_into(memoryview(buffer)[n:])
        if not added:
            raise EOFError
        n += added
        if n >= PREFIX.size:
            end = length(buffer)
    return memoryview(buffer)[:end]


def _raised(error: BaseException) -> tuple[str, str, str]:
    headline = traceback.format_exception_only(type(error), error)[-1].strip()
    return "raised", headline[:1000], traceback.format_exc()[-8000:]


def main(port: str) -> None:
    """Make the environment that stdin describes, then connect to the learner and answer its questions."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # prints the stacks of all threads, for the error about a hang
    data = sys.stdin.buffer.read()
    if not data:
        sys.exit("stdin was empty: the command must pass it on, as `conda run --no-capture-output` does")
    token, *make = decoded(data)
    own, host, connection, buffer = os.getpid(), _Host(), None, bytearray(INLINE)
    request = "make", make  # at once, so that several environments are made side by side
    while True:
        try:
            reply: Any = ("ok", getattr(host, request[0])(*request[1]))
        except Exception as error:
            reply = _raised(error)
        if os.getpid() != own:  # a fork of the environment has come back
            os._exit(1)
        try:
            if connection is None:
                connection = socket.create_connection(("127.0.0.1", int(port)))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(token.encode())
            try:
                message = encoded(reply, host.memory)
            except Exception as error:  # it is too large, or an object cannot say what it is
                message = encoded(_raised(error))
            connection.sendall(message)
            request = decoded(_received(connection, buffer), host.memory)
        except (EOFError, ConnectionError):  # the learner has gone, or wants this to end
            break
    if host.env is not None:
        host.env.close()


if __name__ == "__main__":
    sys.path[0] = ""  # not the folder of this file, whose modules could take the place of others
    main(sys.argv.pop())
