"""Anonymous shared memory, and named arrays laid out in it.

On Linux the memory is a memfd: a file without a name. So nothing is left behind when processes are killed, and
/dev/shm is not needed. A child gets a descriptor, never a copy.
"""

from __future__ import annotations

import errno
import math
import mmap
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import system
from penstock.buffers.descriptors import InheritedFd
from penstock.buffers.memory_limits import BATCH_REMEDY, check_memory
from penstock.buffers.named import NamedArrays
from penstock.errors import ConfigError

_ALIGNMENT = 128  # bytes. Processors load two cache lines of 64 bytes together: no two arrays share such a pair


#: What this process shares with others. Each has a method `make_private`.
shared_mappings: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of an array to allocate, and its offset in the block, which `NamedMemory` sets."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int = 0

    @classmethod
    def like(cls, example: object, *leading: int) -> ArraySpec:
        """The spec of `example`, anything array-like, with further leading dimensions."""
        example = np.asarray(example)
        return cls((*leading, *example.shape), example.dtype)

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class NamedMemory:
    """Zeroed arrays in the structure of `specs`: in shared memory, or private to this process.

    The system frees shared memory when no process has it any more: `close` closes this process's descriptor, and the
    last view of the arrays must go. `arrays` is the `NamedArrays` of numpy views. The object can be pickled only while
    a worker is started. The worker then gets the descriptor and the layout, and maps the same memory.

    Raises `ConfigError`, with the needed and the free size, if there is not enough memory.
    """

    _descriptor: InheritedFd | None = None  #: of the shared memory or the file
    _access = mmap.ACCESS_DEFAULT  #: of the mapping; another process may map it for reading only

    def __init__(self, specs: NamedArrays, *, shared: bool, purpose: str, remedy: str = BATCH_REMEDY) -> None:
        """An error says that `purpose` needs the memory, and what to do: `remedy`."""
        self._lay_out(specs)
        # np.zeros succeeds even without enough memory, and the system kills the process later.
        check_memory(self.nbytes, purpose, remedy)
        if not shared:
            self.arrays = specs.map(lambda spec: np.zeros(spec.shape, spec.dtype))
            return
        try:
            self._allocate(self._new_file())
        except OSError as error:  # the memory is used up, or RLIMIT_AS is reached
            # Descriptors are missing, or a signal handler of the user's has raised a TimeoutError.
            if error.errno in (errno.EMFILE, errno.ENFILE, None):
                raise
            raise ConfigError(
                f"{purpose} needs {self.nbytes:,} bytes of shared memory: {error.strerror}. Raise the limit "
                f"(ulimit -v), or {remedy}"
            ) from error

    def _new_file(self) -> InheritedFd:
        """An empty file for the shared memory."""
        return InheritedFd(system.anonymous_memory("penstock"))

    def _lay_out(self, specs: NamedArrays) -> None:
        self.nbytes = 0  #: the size of all arrays in bytes, with the gaps between them; _place adds them up
        self._layout = specs.map(self._place)

    def _allocate(self, descriptor: InheritedFd) -> None:
        """Give an empty file its size, and map it. This object owns the descriptor from now on."""
        self._descriptor = descriptor
        try:
            system.reserve(descriptor.fd, max(1, self.nbytes))
            self._map(descriptor.fd)
        except OSError:
            descriptor.close()
            raise

    def _place(self, spec: ArraySpec) -> ArraySpec:
        offset = -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = offset + spec.nbytes
        return ArraySpec(spec.shape, spec.dtype, offset)

    def _map(self, fd: int) -> None:
        # Before Python 3.13, the mapping keeps a duplicate of the descriptor as long as it lives.
        options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        self._buffer = mmap.mmap(fd, max(1, self.nbytes), access=self._access, **options)

        def view(spec: ArraySpec) -> npt.NDArray[Any]:
            count = math.prod(spec.shape)
            if count == 0:  # numpy.frombuffer refuses an empty view
                return np.zeros(spec.shape, spec.dtype)
            return np.frombuffer(self._buffer, spec.dtype, count, spec.offset).reshape(spec.shape)

        self.arrays = self._layout.map(view)
        shared_mappings.add(self)

    @property
    def whole(self) -> npt.NDArray[np.uint8]:
        """All bytes of the shared memory."""
        if self._descriptor is None:
            raise self._not_shared()
        return np.frombuffer(self._buffer, np.uint8, self.nbytes)

    def close(self) -> None:
        """Close the descriptor. The arrays stay valid as long as anything refers to them."""
        if self._descriptor is not None:
            shared_mappings.discard(self)
            self._descriptor.close()

    def make_private(self) -> None:
        """In a fork of a worker: what it writes from now on, no other process sees. Views stay valid."""
        assert self._descriptor is not None
        system.make_private(self._buffer, max(1, self.nbytes), self._descriptor.fd)

    def _not_shared(self) -> TypeError:
        return TypeError("these arrays are private to this process: allocate them with shared=True")

    def __getstate__(self) -> tuple[int, NamedArrays, InheritedFd]:
        if self._descriptor is None:
            raise self._not_shared()
        return self.nbytes, self._layout, self._descriptor

    def __setstate__(self, state: tuple[int, NamedArrays, InheritedFd]) -> None:
        self.nbytes, self._layout, self._descriptor = state
        self._map(self._descriptor.fd)
