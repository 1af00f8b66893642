"""What workers send to the main process: finished trajectories, results of calls, infos. The mailbox is the other
direction: a message of the main process to the workers.

A worker publishes how many results it has sent before it arrives at barrier_out, and the main process then takes that
many. There are two ways to send:

- Records of `TrajInfo` itself go into one array per worker in shared memory. It has one place for each environment
  step between two gates. A step ends at most one trajectory, so the array cannot overflow.
- Other objects go through one pipe per worker, as `ObjectMessage`s. The main process reads the pipes while it waits,
  so a worker never blocks on a full pipe for long.

There is no lock. Each array and each pipe has one writer, so a dead worker blocks no other process.
"""

from __future__ import annotations

import enum
import io
import os
import pickle
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.buffers import pickling
from penstock.buffers.descriptors import InheritedFd, anonymous_file
from penstock.buffers.named import NamedArrays
from penstock.buffers.shared import ArraySpec, NamedMemory
from penstock.errors import TrajectoryCountError

#: One finished trajectory of `TrajInfo` itself: where it ended, and its four figures.
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

#: The names of the four figures.
FIGURES = ("Length", "Return", "NonzeroRewards", "DiscountedReturn")


class MessageKind(enum.IntEnum):
    """What an `ObjectMessage` carries."""

    TRAJ_INFO = 0
    CALL_RESULT = 1
    INFO = 2


@dataclass(frozen=True)
class Unreadable:
    """The payload of a message that arrived but could not be unpickled."""

    attribute: str  #: the entry that could not be unpickled
    error: Exception


class ObjectMessage(NamedTuple):
    """An object that a worker sends: the attributes of a trajectory info, the result of a call, or an info."""

    kind: MessageKind
    id: int  #: the time step of a trajectory info, the request number of an info, 0 for the result of a call
    env_rank: int
    payload: dict[Any, Any] | Unreadable


_HEAD = struct.Struct("=qqqq")  # kind, id, env_rank, bytes of the payload


class TrajectoryRecords:
    """One array of records per worker, with one place for each step that it can make between two gates.

    Where several batches are open at once, each has a part of the array.
    """

    def __init__(self, capacities: Sequence[int], *, shared: bool) -> None:
        specs = NamedArrays({f"worker_{i}": ArraySpec((n,), RECORD) for i, n in enumerate(capacities)})
        self.memory = NamedMemory(specs, shared=shared, purpose="the memory for trajectory records")
        self._bind()

    def begin(self, start: int = 0) -> None:
        """Worker: a command begins; `put` writes from record `start` on."""
        self._n_put = start

    def _bind(self) -> None:
        self._n_put = 0
        self._records = self.memory.arrays.values()

    def __getstate__(self) -> NamedMemory:
        return self.memory

    def __setstate__(self, memory: NamedMemory) -> None:
        self.memory = memory
        self._bind()

    def put(self, worker_rank: int, records: npt.NDArray[Any]) -> None:
        """Worker: append `records` to the records of this command."""
        start, self._n_put = self._n_put, self._n_put + len(records)
        self._records[worker_rank][start : self._n_put] = records

    def take(self, expected: Sequence[int], starts: Sequence[int]) -> list[tuple[Any, ...]]:
        """Main process: `expected[i]` records of each worker i from record `starts[i]` on, as tuples of the fields of
        `RECORD`, ordered by t, then env_rank."""
        records: list[tuple[Any, ...]] = []
        for own, start, n in zip(self._records, starts, expected, strict=True):
            records += own[start : start + n].tolist()
        records.sort(key=itemgetter(0, 1))  # games that ended before anybody was asked stay in their order
        return records


class ObjectPipe:
    """A pipe from one worker to the main process for objects of any class."""

    def __init__(self) -> None:
        read, write = os.pipe()
        os.set_blocking(read, False)
        self.reader, self.writer = InheritedFd(read), InheritedFd(write)
        self._received = bytearray()

    def put(self, messages: Sequence[ObjectMessage]) -> None:
        """Worker: send every message; waits while the pipe is full, until the main process reads it."""
        for kind, number, env_rank, payload in messages:
            assert isinstance(payload, dict)
            body = dumped(payload)
            view = memoryview(_HEAD.pack(kind, number, env_rank, len(body)) + body)
            while view:
                view = view[os.write(self.writer.fd, view) :]

    def drain(self) -> None:
        """Main process: read all bytes that have arrived, without waiting."""
        while True:
            try:
                chunk = os.read(self.reader.fd, 1 << 16)
            except BlockingIOError:
                return
            if not chunk:
                return
            self._received += chunk

    def take(self, expected: int, *, may_leave: bool = False) -> list[ObjectMessage]:
        """Main process: the `expected` messages of a command, sent before the worker arrived at barrier_out.

        A message that cannot be unpickled is taken too, with an `Unreadable` payload. Raises `TrajectoryCountError` if
        there are fewer. It also does so if there are more, unless `may_leave`: then they belong to later commands.
        """
        messages = self.take_complete(expected if may_leave else None)
        if len(messages) != expected or (self._received and not may_leave):
            left, self._received = len(self._received), bytearray()
            raise TrajectoryCountError(
                f"{len(messages)} results arrived, {expected} were expected, and {left} bytes are left over: this is a "
                "defect of penstock, please report it"
            )
        return messages

    def take_complete(self, most: int | None = None) -> list[ObjectMessage]:
        """Main process: the messages that have arrived completely, at most `most` of them. The rest stays."""
        self.drain()
        messages = []
        end = 0
        for kind, number, env_rank, body in islice(self._bodies(), most):
            messages.append(ObjectMessage(MessageKind(kind), number, env_rank, loaded(body)))
            end += _HEAD.size + len(body)
        del self._received[:end]
        return messages

    def _bodies(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Kind, id, env_rank and pickled payload of the messages that have arrived completely."""
        received, at = bytes(self._received), 0
        while len(received) - at >= _HEAD.size:
            kind, number, env_rank, size = _HEAD.unpack_from(received, at)
            at += _HEAD.size + size
            if at > len(received):
                break
            yield kind, number, env_rank, received[at - size : at]

    def replacement(self, *, keep: int | None) -> ObjectPipe:
        """Main process: a new pipe for the worker that replaces a dead one.

        It starts with the first `keep` complete messages of the dead worker (None: with all). A new pipe is needed
        because the old one may hold a part of a message, and a child of the dead worker may still write to it.
        """
        pipe = ObjectPipe()
        if keep is None or keep > 0:
            self.drain()
            end = sum(_HEAD.size + len(body) for *_, body in islice(self._bodies(), keep))
            pipe._received = self._received[:end]
        return pipe

    def close(self) -> None:
        """Close both ends in this process."""
        self.reader.close()
        self.writer.close()

    def __getstate__(self) -> InheritedFd:
        return self.writer  # only the writing end is sent to the worker

    def __setstate__(self, writer: InheritedFd) -> None:
        self.reader, self.writer = InheritedFd(-1), writer
        self._received = bytearray()


def dumped(payload: dict[str, Any]) -> bytes:
    """`payload`, pickled. Raises what pickling raises."""
    try:
        return _dumps(payload, pickle.Pickler)
    except Exception:  # a class or function of the user's script: cloudpickle sends its definition
        return _dumps(payload, pickling.Pickler)


def _dumps(payload: dict[str, Any], pickler_cls: type[pickle.Pickler]) -> bytes:
    """Pickle the names, then each value on its own, so that an error of unpickling can name the value.

    One pickler keeps objects shared that several values refer to.
    """
    stream = io.BytesIO()
    pickler = pickler_cls(stream, pickle.HIGHEST_PROTOCOL)
    pickler.dump(list(payload))
    for value in payload.values():
        pickler.dump(value)
    return stream.getvalue()


def loaded(body: bytes) -> dict[str, Any] | Unreadable:
    """The payload of `dumped`, or the first value that cannot be unpickled."""
    unpickler = pickle.Unpickler(io.BytesIO(body))
    payload: dict[str, Any] = {}
    for name in unpickler.load():
        try:
            payload[name] = unpickler.load()
        except Exception as error:  # unpickling runs the user's code, which may raise anything
            return Unreadable(name, error)
    return payload


class Mailbox:
    """Holds one message, which the main process replaces.

    The main process writes it before a gate opens or a worker starts. Workers read it afterwards. So it needs no lock.
    A pipe would block on a large message until the worker reads it. A mailbox never blocks.
    """

    def __init__(self) -> None:
        self.file = anonymous_file("penstock-mailbox")  #: close it to close the mailbox

    def post(self, message: bytes) -> None:
        """Main process: replace the message."""
        os.ftruncate(self.file.fd, 0)
        written = 0
        while written < len(message):
            written += os.pwrite(self.file.fd, message[written:], written)

    def post_parts(self, parts: Sequence[bytes]) -> list[slice]:
        """Main process: replace the message by `parts`, one behind the other. Returns the slice of each."""
        self.post(b"".join(parts))
        ends = list(accumulate(map(len, parts)))
        return [slice(end - len(part), end) for end, part in zip(ends, parts, strict=True)]

    def read(self, part: slice | None = None) -> bytes:
        """Worker: the message, or one part of it."""
        at, end = (0, os.fstat(self.file.fd).st_size) if part is None else (part.start, part.stop)
        chunks = []
        while at < end and (chunk := os.pread(self.file.fd, end - at, at)):
            chunks.append(chunk)
            at += len(chunk)
        return b"".join(chunks)
