"""Parts of observations and actions that have no fixed shape: texts, sequences, graphs, elements of custom spaces.

The shared memory has a placeholder for each such part. The objects themselves are pickled into slots of a file in
memory, one list of objects for each environment.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import cloudpickle
import gymnasium as gym
from gymnasium import spaces
from gymnasium.vector.utils import create_empty_array

from penstock.buffers.descriptors import anonymous_file

_SLOT_BITS = 30  # a slot has room for 1 GiB; what is not written takes no memory
_SIZE = struct.Struct("=q")
_SLOTS_PER_ENV = 4  # 0 and 1: observations; 2: actions; 3: unused


def has_fixed_shape(space: gym.Space[Any]) -> bool:
    """Whether `space` is a basic space whose elements have a fixed shape. False for Dict and Tuple: ask their parts."""
    return isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)


def shared_part(space: gym.Space[Any]) -> gym.Space[Any]:
    """`space` with a placeholder instead of each part without a fixed shape: its elements fit into shared memory."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict(OrderedDict((key, shared_part(sub)) for key, sub in space.items()))
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([shared_part(sub) for sub in space])
    return space if has_fixed_shape(space) else spaces.Discrete(1)


class ObjectParts:
    """The parts of a space that have no fixed shape, in the order of the space."""

    def __init__(self, space: gym.Space[Any]) -> None:
        self._space = space
        self._subspaces = list(_object_spaces(space))

    def __bool__(self) -> bool:
        return bool(self._subspaces)

    def take_out(self, value: Any, placeholder: Any = 0) -> tuple[Any, list[Any]]:
        """Returns `value` with a placeholder instead of each object, and the list of objects.

        `value` is an element or a batch. A value with the wrong structure comes back unchanged: the code that writes it
        into the shared memory raises the error.
        """
        objects: list[Any] = []
        if not self._subspaces:
            return value, objects
        try:
            return _take_out(self._space, value, placeholder, objects), objects
        except (TypeError, ValueError, KeyError, IndexError):
            return value, []

    def put_in(self, value: Any, objects: Iterable[Any]) -> Any:
        """The opposite of `take_out`."""
        return _put_in(self._space, value, iter(objects))

    def defaults(self) -> list[Any]:
        """Objects for an environment that has not been reset yet."""
        batches: list[Any] = [create_empty_array(space, 1) for space in self._subspaces]
        return [None if batch is None else batch[0] for batch in batches]


def _object_spaces(space: gym.Space[Any]) -> Iterator[gym.Space[Any]]:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for sub in space.values() if isinstance(space, spaces.Dict) else space:
            yield from _object_spaces(sub)
    elif not has_fixed_shape(space):
        yield space


def _take_out(space: gym.Space[Any], value: Any, placeholder: Any, objects: list[Any]) -> Any:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        is_dict = isinstance(space, spaces.Dict)
        parts: Any = dict(value) if is_dict else list(value)
        subspaces: Any = space.spaces
        for key in subspaces if is_dict else range(len(subspaces)):
            parts[key] = _take_out(subspaces[key], parts[key], placeholder, objects)
        return parts if is_dict else tuple(parts)
    if has_fixed_shape(space):
        return value
    objects.append(value)
    return placeholder


def _put_in(space: gym.Space[Any], value: Any, objects: Iterator[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _put_in(sub, value[key], objects) for key, sub in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_put_in(sub, part, objects) for sub, part in zip(space, value, strict=True))
    return value if has_fixed_shape(space) else next(objects)


class ObjectSlots:
    """The slots of all environments. Each has one writer, which writes before it publishes a request or a reply.

    Observations of two requests in a row go to different slots. If a worker is killed while it writes one, the other is
    complete.
    """

    def __init__(self) -> None:
        self._file = anonymous_file("penstock-objects")

    def write_observation(self, i: int, request: int, objects: list[Any]) -> None:
        """Worker: the objects of environment i's observation for `request`. Raises any exception of pickling."""
        self._write(_SLOTS_PER_ENV * i + request % 2, objects)

    def read_observation(self, i: int, request: int) -> list[Any] | None:
        """The same objects; None if nothing was written. Raises any exception of unpickling."""
        return self._read(_SLOTS_PER_ENV * i + request % 2)

    def write_action(self, i: int, objects: list[Any]) -> None:
        """Main process: the objects of environment i's action. Raises any exception of pickling."""
        self._write(_SLOTS_PER_ENV * i + 2, objects)

    def read_action(self, i: int) -> list[Any]:
        """Worker: the same objects."""
        return self._read(_SLOTS_PER_ENV * i + 2) or []

    def _write(self, slot: int, objects: list[Any]) -> None:
        try:
            body = pickle.dumps(objects, pickle.HIGHEST_PROTOCOL)
        except Exception:  # an object of a class of the user's script, which goes by value
            body = cloudpickle.dumps(objects)
        if _SIZE.size + len(body) > 1 << _SLOT_BITS:
            raise ValueError(f"it has {len(body):,} bytes, more than 1 GiB")
        view, at = memoryview(_SIZE.pack(len(body)) + body), slot << _SLOT_BITS
        while view:
            n_written = os.pwrite(self._file.fd, view, at)
            view, at = view[n_written:], at + n_written

    def _read(self, slot: int) -> list[Any] | None:
        at = slot << _SLOT_BITS
        head = os.pread(self._file.fd, _SIZE.size, at)
        if not any(head):  # a hole reads as zeros, and beyond the end there is nothing
            return None
        at, end = at + _SIZE.size, at + _SIZE.size + _SIZE.unpack(head)[0]
        chunks = []
        while at < end and (chunk := os.pread(self._file.fd, end - at, at)):
            chunks.append(chunk)
            at += len(chunk)
        objects: list[Any] = pickle.loads(b"".join(chunks))
        return objects

    def close(self) -> None:
        """Close the descriptor in this process."""
        self._file.close()
