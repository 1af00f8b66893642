"""The messages on a wire: plain values and arrays, as one msgpack header and frames of up to 256 KiB. No pickle.
Small arrays go into the header, because every frame is encrypted on its own. Large ones have several frames: so only
one of these is encrypted at a time, and the memory for that is small.

A message consists of None, bool, int (64 bits), float, str, bytes, lists, dicts with str keys, and numpy arrays of
numbers or booleans. Tuples arrive as lists, numpy scalars as Python's. Arrays that arrive are read-only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import numpy as np

from penstock.buffers.reports import in_one_line
from penstock.errors import ClusterError

_MOST_DEPTH = 64
_MOST_FRAMES, _FRAME = 16_384, 2**18  # frames of a message, and bytes of a frame
_MOST_HEADER = 2**18  # bytes of everything except arrays. One of them may become 64 bytes of Python objects
_SMALL, _MOST_SMALL = 4096, 2**16  # bytes of an array that goes into the header, and of all of these
_KINDS = "biufc"  # of dtypes: bool, integers, floats, complex numbers
_ARRAY = 1  # the msgpack extension type
_NODES = dict, list, tuple
_LEAVES = frozenset({type(None), bool, int, float, str, bytes, np.ndarray})  # the usual types of other values
_own = threading.local()


class BadMessageError(ClusterError):
    """A message cannot cross a wire, or what came over a wire is no message."""


def sendable(text: str) -> str:
    """`text` without what UTF-8 does not have: the bytes of a file name that is not UTF-8 are escaped."""
    return text.encode(errors="backslashreplace").decode()


def describe(error: BaseException) -> str:
    """Class and message of an exception, as text that can be sent, even if its message raises."""
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:  # as `in_one_line`, which then says so
        text = in_one_line(error)
    return sendable(text)


def packer() -> Any:
    """This thread's packer of headers and small arrays. To make one takes up to 15 µs."""
    if (known := getattr(_own, "packer", None)) is None:
        known = _own.packer = msgpack.Packer()
    return known


def encode(value: object, frame: Callable[[memoryview], Any] = bytes) -> list[Any]:
    """`value` as frames: the header, then copies of the bytes of the arrays, which `frame` makes. Raises
    `BadMessageError`."""
    arrays: list[Any] = []
    n_small = 0

    def other(item: object) -> Any:
        """For a type that msgpack does not know: something that it knows."""
        if isinstance(item, np.generic):
            return item.item()
        if isinstance(item, dict):  # a subclass of dict
            return dict(item)
        if not isinstance(item, np.ndarray) or item.dtype.kind not in _KINDS or item.ndim > 32:
            what = f"a value of type {type(item).__name__}"
            if isinstance(item, np.ndarray):
                what = f"an array of {item.dtype}"
            raise BadMessageError(
                f"{what} cannot cross a wire: send numbers, str, bytes, lists, dicts with str keys, and arrays of "
                "numbers"
            )
        nonlocal n_small
        where: Any
        if item.nbytes <= _SMALL and n_small + item.nbytes <= _MOST_SMALL:
            n_small += item.nbytes
            where = item.tobytes()
        else:
            data = memoryview(np.ascontiguousarray(item).reshape(-1).view(np.uint8).data)
            first = len(arrays) + 1
            arrays.extend(frame(data[start : start + _FRAME]) for start in range(0, len(data), _FRAME))
            where = [first, len(arrays) + 1]
        return msgpack.ExtType(_ARRAY, packer().pack([where, item.dtype.str, item.shape]))

    _check_tree(value)
    try:
        header = msgpack.packb(value, default=other)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadMessageError(f"this message cannot cross a wire: {error}") from error
    if len(header) > _MOST_HEADER:
        raise BadMessageError(
            f"this message has {len(header):,} bytes beside its arrays, and at most {_MOST_HEADER:,} can cross a wire: "
            "put long data into arrays"
        )
    if len(arrays) >= _MOST_FRAMES:
        raise BadMessageError(
            f"the arrays of this message have {len(arrays) * _FRAME / 2**20:,.0f} MiB, and at most "
            f"{(_MOST_FRAMES - 1) * _FRAME / 2**20:,.0f} MiB can cross a wire at once: make it smaller, a piece of "
            "samples with a smaller batch_T or batch_B of the actors"
        )
    return [header, *arrays]


def decode(frames: Sequence[Any]) -> Any:
    """The message in `frames`, which are bytes or memoryviews of bytes. Its arrays use the memory of the frames. Raises
    `BadMessageError` for other bytes."""
    if not 0 < len(frames) <= _MOST_FRAMES or len(frames[0]) > _MOST_HEADER:
        raise BadMessageError(f"no message: {len(frames)} frames")

    used = 1

    def array(code: int, data: bytes) -> Any:
        nonlocal used
        if code != _ARRAY:
            raise BadMessageError(f"no message: extension type {code}")
        where, dtype, shape = msgpack.unpackb(data)
        if isinstance(where, list):
            first, end = where
            if first != used or not first < end <= len(frames):  # each frame once: a stranger could repeat them
                raise BadMessageError("no message: the frames of an array")
            used, where = end, frames[first] if end == first + 1 else b"".join(frames[first:end])
        return _array(where, dtype, shape)

    try:
        value = msgpack.unpackb(frames[0], ext_hook=array, strict_map_key=True)
        _check_tree(value)
    except BadMessageError:
        raise
    except Exception as error:  # msgpack and numpy may raise anything for the bytes of a stranger
        raise BadMessageError(f"no message: {type(error).__name__}: {error}"[:200]) from error
    return value


def _array(frame: object, dtype: object, shape: object) -> np.ndarray[Any, Any]:
    if (
        not isinstance(frame, bytes | memoryview)
        or not isinstance(dtype, str)
        or len(dtype) > 5
        or not isinstance(shape, list)
        or len(shape) > 32
    ):
        raise BadMessageError("no message: an array without frame, dtype or shape")
    kind = np.dtype(dtype)
    size = kind.itemsize
    for length in shape:
        if type(length) is not int or length < 0:
            raise BadMessageError("no message: the shape of an array")
        size *= length
    if kind.kind not in _KINDS or size != len(frame):
        raise BadMessageError(f"no message: an array of {dtype} {shape} in {len(frame)} bytes")
    return np.frombuffer(frame, kind).reshape(shape)


def _check_tree(value: Any, depth: int = 0) -> None:
    """Raise `BadMessageError` for too many levels, and for keys that are not str."""
    if depth > _MOST_DEPTH and isinstance(value, _NODES):
        raise BadMessageError(f"a message is nested at most {_MOST_DEPTH} levels deep")
    items = value
    if isinstance(value, dict):
        items = value.values()
        for key in value:
            if type(key) is not str and not isinstance(key, str):
                raise BadMessageError(f"the keys of a dict in a message must be str, got {key!r}")
    elif not isinstance(value, _NODES):
        return
    for item in items:
        if type(item) not in _LEAVES:
            _check_tree(item, depth + 1)
