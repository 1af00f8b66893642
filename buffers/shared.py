"""Anonymous shared memory, and named arrays laid out in it.

The memory is a memfd. It has no name, so nothing is left behind however the processes end. It needs no /dev/shm, and
it is sent to a child as a descriptor, never by value.
"""

from __future__ import annotations

import math
import mmap
import multiprocessing
import os
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.buffers.descriptors import InheritedFd
from penstock.buffers.memory_limits import check_memory
from penstock.buffers.named import NamedArrays, map_leaves
from penstock.errors import ConfigError

_ALIGNMENT = 128  # two cache lines, which are fetched together: neighbours never share a pair


class SharedBlock:
    """`nbytes` of zeroed memory that this process shares with the workers that it starts.

    Raises `ConfigError` naming the needed and the free size when there is not enough.
    """

    def __init__(self, nbytes: int, purpose: str = "a shared block") -> None:
        self.nbytes = max(1, nbytes)
        check_memory(self.nbytes, purpose)
        self._descriptor: InheritedFd | None = None
        if hasattr(os, "memfd_create"):
            self._descriptor = InheritedFd(_allocate_memfd(self.nbytes, purpose))
            try:
                self._buffer: Any = _map(self._descriptor.fd, self.nbytes)
            except OSError as error:  # RLIMIT_AS, say
                self._descriptor.close()
                raise ConfigError(
                    f"{purpose} needs {self.nbytes:,} bytes, which this process may not map: {error.strerror}. Lower "
                    "batch_T or batch_B, or raise the limit (ulimit -v)"
                ) from error
        else:  # not Linux: the standard library's own anonymous arena
            self._buffer = multiprocessing.get_context("spawn").RawArray("b", self.nbytes)

    def array(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A numpy view of the block. The memory lives until the last view of it is gone."""
        count = math.prod(shape)
        if count == 0:  # numpy has no empty view of a buffer
            return np.zeros(shape, dtype)
        return np.frombuffer(self._buffer, np.dtype(dtype), count, offset).reshape(shape)

    def close(self) -> None:
        """Close the descriptor: no further child can get the block; views stay valid."""
        if self._descriptor is not None:
            self._descriptor.close()

    def __getstate__(self) -> tuple[int, Any]:
        return self.nbytes, self._buffer if self._descriptor is None else self._descriptor

    def __setstate__(self, state: tuple[int, Any]) -> None:
        self.nbytes, handle = state
        self._descriptor = handle if isinstance(handle, InheritedFd) else None
        self._buffer = handle if self._descriptor is None else _map(self._descriptor.fd, self.nbytes)


def _map(fd: int, nbytes: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, nbytes, trackfd=False)
    return mmap.mmap(fd, nbytes)  # keeps a duplicate of the descriptor as long as the mapping lives


def _allocate_memfd(nbytes: int, purpose: str) -> int:
    fd = os.memfd_create("penstock", os.MFD_CLOEXEC)
    try:
        # Allocate the pages now. ftruncate alone succeeds beyond the limit, and the first write is then a SIGBUS.
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"{purpose} needs {nbytes:,} bytes of shared memory: {error.strerror}") from error
    return fd


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of an array to allocate, and its offset in the block once it has one."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int = 0

    @classmethod
    def like(cls, example: Any, *leading: int) -> ArraySpec:
        """The spec of `example`, anything array-like, with further leading dimensions."""
        example = np.asarray(example)
        return cls((*leading, *example.shape), example.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class NamedMemory:
    """Zeroed arrays in the structure of `specs`: in one shared block, or private to this process.

    `arrays` is the `NamedArrays` of numpy views. While a worker is being started the object can be pickled to it: the
    descriptor and the layout are sent, never the contents.
    """

    def __init__(self, specs: NamedArrays, *, shared: bool, purpose: str) -> None:
        self._end = 0
        self._layout = specs.map(self._place)
        self._block = SharedBlock(self._end, purpose) if shared else None
        if self._block is None:
            check_memory(self._end, purpose)  # numpy would reserve it, and the system would kill this process later
            self.arrays = specs.map(lambda spec: np.zeros(spec.shape, spec.dtype))
        else:
            self.arrays = self._views(self._block)

    @property
    def nbytes(self) -> int:
        """Bytes laid out, alignment included."""
        return self._end

    @property
    def whole(self) -> npt.NDArray[np.uint8]:
        """The whole shared block as bytes."""
        if self._block is None:
            raise TypeError("these arrays are private to this process: allocate them with shared=True")
        return self._block.array(0, (self._end,), np.uint8)

    def close(self) -> None:
        """Close the descriptor; the arrays stay valid as long as anything refers to them."""
        if self._block is not None:
            self._block.close()

    def _place(self, spec: ArraySpec) -> ArraySpec:
        offset = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        self._end = offset + spec.nbytes
        return ArraySpec(spec.shape, spec.dtype, offset)

    def _views(self, block: SharedBlock) -> NamedArrays:
        views = map_leaves(lambda spec: block.array(spec.offset, spec.shape, spec.dtype), self._layout)
        assert isinstance(views, NamedArrays)
        return views

    def __getstate__(self) -> tuple[int, NamedArrays, SharedBlock]:
        if self._block is None:
            raise TypeError("these arrays are private to this process: allocate them with shared=True")
        return self._end, self._layout, self._block

    def __setstate__(self, state: tuple[int, NamedArrays, SharedBlock]) -> None:
        self._end, self._layout, block = state
        self._block = block
        self.arrays = self._views(block)
        block.close()  # mapped: the child needs the descriptor no more
