"""The trajectory queue: finished trajectory infos on their way from the workers to the main process.

Exact by construction: a worker counts what it hands over and publishes the count before it answers
the gate, and the main process then takes that many. Two carriers, one queue:

- records of the stock `TrajInfo` go through a ring per worker in shared memory, as long as there are
  environment steps between two gates; at most one trajectory ends per step, so it cannot overflow;
- a subclass's own objects go through a pipe per worker, as frames of pickled attributes. The main
  process drains the pipes while it waits, so that a worker never blocks on a full one for long.

There is no lock: each ring and each pipe has one writer, and a worker that dies takes nothing along.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from penstock.buffers.descriptors import InheritedFd
from penstock.buffers.named import NamedArrays
from penstock.buffers.shared import ArraySpec, NamedMemory
from penstock.errors import TrajectoryCountError

__all__ = ["FIGURES", "RECORD", "ObjectMessage", "ObjectPipe", "RecordRings", "Unreadable"]

#: One finished trajectory of the stock TrajInfo: where it ended, and its four figures.
RECORD = np.dtype(
    [
        ("t", np.int64),
        ("env_rank", np.int64),
        ("Length", np.int64),
        ("Return", np.float64),
        ("NonzeroRewards", np.int64),
        ("DiscountedReturn", np.float64),
    ]
)

# The same as plain bytes, which numpy copies as one piece.
_AS_BYTES = np.dtype((np.void, RECORD.itemsize))

#: The names of the four figures.
FIGURES = ("Length", "Return", "NonzeroRewards", "DiscountedReturn")


@dataclass(frozen=True)
class Unreadable:
    """Stands for the attributes of an object that arrived and could not be unpickled."""

    attribute: str  #: which of them it was
    error: Exception


#: A subclass's object on its way: t, env_rank, the instance's attributes.
ObjectMessage = tuple[int, int, dict[str, Any] | Unreadable]

_HEAD = struct.Struct("=qqq")  # t, env_rank, bytes of the attributes


class RecordRings:
    """One record array per worker, as long as the most steps it makes between two gates."""

    def __init__(self, capacities: Sequence[int], *, shared: bool) -> None:
        specs = NamedArrays({f"worker_{i}": ArraySpec((n,), RECORD) for i, n in enumerate(capacities)})
        self.memory = NamedMemory(specs, shared=shared, purpose="the trajectory queue")

    def put(self, worker_rank: int, start: int, records: npt.NDArray[Any]) -> None:
        """Worker: write `records` behind the `start` that were put in this batch before."""
        self.memory.arrays[f"worker_{worker_rank}"][start : start + len(records)] = records

    def take(self, promised: Sequence[int]) -> npt.NDArray[Any]:
        """Main process: a copy of what the workers promised, ordered by t, then env_rank."""
        rings = self.memory.arrays.values()
        parts = [ring[:n].view(_AS_BYTES) for ring, n in zip(rings, promised, strict=True)]
        records = np.concatenate(parts).view(RECORD)
        return records[np.lexsort((records["env_rank"], records["t"]))]


class ObjectPipe:
    """A pipe from one worker to the main process for trajectory infos with attributes of their own."""

    def __init__(self) -> None:
        read, write = os.pipe()
        os.set_blocking(read, False)
        self.reader, self.writer = InheritedFd(read), InheritedFd(write)
        self._received = bytearray()

    def put(self, frames: Sequence[ObjectMessage]) -> None:
        """Worker: write every frame; blocks while the pipe is full and the main process drains it."""
        for t, env_rank, attributes in frames:
            assert isinstance(attributes, dict)
            try:
                body = _dumps(attributes, pickle.Pickler)
            except Exception:  # a class or function defined in the user's script: goes by value
                body = _dumps(attributes, cloudpickle.Pickler)
            view = memoryview(_HEAD.pack(t, env_rank, len(body)) + body)
            while view:
                view = view[os.write(self.writer.fd, view) :]

    def drain(self) -> None:
        """Main process: read what has arrived, without waiting."""
        while True:
            try:
                chunk = os.read(self.reader.fd, 1 << 16)
            except BlockingIOError:
                return
            if not chunk:
                return
            self._received += chunk

    def take(self, promised: int) -> list[ObjectMessage]:
        """Main process: the frames of this batch; all of them were written before the gate.

        They are taken whether they can be unpickled or not: what is `Unreadable` now will always be.
        Raises `TrajectoryCountError` if there are not as many as were promised.
        """
        frames = self.take_complete()
        if len(frames) != promised or self._received:
            left, self._received = len(self._received), bytearray()
            raise TrajectoryCountError(
                f"{len(frames)} trajectories arrived of {promised} promised, with {left} bytes left over"
            )
        return frames

    def take_complete(self) -> list[ObjectMessage]:
        """Main process: the frames that have arrived whole; the beginning of another is left where it is."""
        self.drain()
        frames: list[ObjectMessage] = []
        at = 0
        received = bytes(self._received)
        while len(received) - at >= _HEAD.size:
            t, env_rank, size = _HEAD.unpack_from(received, at)
            if len(received) - at - _HEAD.size < size:
                break
            at += _HEAD.size
            frames.append((t, env_rank, _loads(received[at : at + size])))
            at += size
        del self._received[:at]
        return frames

    def successor(self, *, keep: bool) -> ObjectPipe:
        """Main process: a new pipe in the place of a dead worker's, so that nothing half written, and
        nothing that some child of the worker may yet write, gets among the frames of its replacement.
        `keep`: the worker had answered its gate, so what it wrote is complete and still to be taken."""
        heir = ObjectPipe()
        if keep:
            self.drain()
            heir._received = self._received
        return heir

    def close(self) -> None:
        """Close both ends in this process."""
        self.reader.close()
        self.writer.close()

    def __getstate__(self) -> InheritedFd:
        return self.writer  # only the writing end crosses to the worker

    def __setstate__(self, writer: InheritedFd) -> None:
        self.reader, self.writer = InheritedFd(-1), writer
        self._received = bytearray()


def _dumps(attributes: dict[str, Any], pickler_cls: Any) -> bytes:
    """The names, then value after value, with one memo: so that the one that cannot be unpickled can be named."""
    stream = io.BytesIO()
    pickler = pickler_cls(stream, pickle.HIGHEST_PROTOCOL)
    pickler.dump(list(attributes))
    for value in attributes.values():
        pickler.dump(value)
    return stream.getvalue()


def _loads(body: bytes) -> dict[str, Any] | Unreadable:
    unpickler = pickle.Unpickler(io.BytesIO(body))
    attributes: dict[str, Any] = {}
    for name in unpickler.load():
        try:
            attributes[name] = unpickler.load()
        except Exception as error:  # it runs the user's code: anything may come
            return Unreadable(name, error)
    return attributes
