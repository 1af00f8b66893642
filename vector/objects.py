"""Parts of observations and actions that have no fixed shape: texts, sequences, graphs, elements of custom spaces.

The shared memory has a placeholder for each such part. The objects themselves are pickled into slots of a file in
memory, one list of objects for each environment.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Iterable
from typing import Any

import gymnasium as gym
from gymnasium import spaces
from gymnasium.vector.utils import create_empty_array

from penstock.buffers import pickling
from penstock.buffers.descriptors import anonymous_file
from penstock.buffers.tree import map_tree, tree_leaves
from penstock.errors import SpaceError

_SLOT_BITS = 30  # a slot has room for 1 GiB; what is not written takes no memory
_SIZE = struct.Struct("=q")
_SLOTS_PER_ENV = 4  # 0 and 1: observations; 2: actions; 3: unused


def has_fixed_shape(space: gym.Space[Any]) -> bool:
    """Whether `space` is a basic space whose elements have a fixed shape. False for Dict and Tuple: ask their parts."""
    return isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)


def shared_part(space: gym.Space[Any]) -> Any:
    """`space` as a tree, with a placeholder instead of each part without a fixed shape: its elements fit into shared
    memory."""
    return map_tree(lambda part: part if has_fixed_shape(part) else spaces.Discrete(1), space)


class ObjectParts:
    """The parts of a space that have no fixed shape, in the order of the space."""

    def __init__(self, space: gym.Space[Any]) -> None:
        self._space = space
        self._subspaces = [part for _, part in tree_leaves(space) if not has_fixed_shape(part)]

    def __bool__(self) -> bool:
        return bool(self._subspaces)

    def take_out(self, value: object, placeholder: object = 0) -> tuple[Any, list[Any]]:
        """Returns `value` with a placeholder instead of each object, and the list of objects.

        `value` is an element or a batch. A value with the wrong structure comes back unchanged: the code that writes it
        into the shared memory raises the error.
        """
        objects: list[Any] = []

        def rest(space: gym.Space[Any], part: object) -> Any:
            if has_fixed_shape(space):
                return part
            objects.append(part)
            return placeholder

        try:
            return map_tree(rest, self._space, value) if self else value, objects
        except SpaceError:
            return value, []

    def put_in(self, value: object, objects: Iterable[Any]) -> Any:
        """The opposite of `take_out`."""
        following = iter(objects)
        return map_tree(lambda space, part: part if has_fixed_shape(space) else next(following), self._space, value)

    def defaults(self) -> list[Any]:
        """Objects for an environment that has not been reset yet."""
        batches: list[Any] = [create_empty_array(space, 1) for space in self._subspaces]
        return [None if batch is None else batch[0] for batch in batches]


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
            body = pickling.dumps(objects)
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
