"""What a worker says about its own failure: written into shared memory, read when it is dead."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass

import numpy as np

from penstock.buffers.named import NamedArrays
from penstock.buffers.shared import ArraySpec, NamedMemory

__all__ = ["RemoteTraceback", "Report", "ReportBoard", "in_one_line", "read_account", "write_account"]

_TEXT_BYTES = 40 * 1024
_EXCEPTION_BYTES = 16 * 1024
_HEADLINE_BYTES = 1024
_STALE_BYTES = 256


class RemoteTraceback(Exception):
    """The traceback of an exception in a worker, as text: the cause of what the main process raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class Report:
    """One worker's account: its traceback, and the exception itself if it could be pickled."""

    headline: str  #: type, and the message's first line
    text: str
    exception: BaseException | None

    def as_cause(self) -> BaseException:
        """The exception with the remote traceback as its own cause, or the traceback alone."""
        remote = RemoteTraceback(self.text)
        if self.exception is None:
            return remote
        self.exception.__cause__ = remote
        return self.exception


class ReportBoard:
    """A fixed-size area per worker: an exception of any size, kind or malice fits or is cut."""

    def __init__(self, n_workers: int, *, shared: bool) -> None:
        byte = np.dtype(np.uint8)
        specs = NamedArrays(
            sizes=ArraySpec((n_workers, 3), np.dtype(np.int64)),
            headline=ArraySpec((n_workers, _HEADLINE_BYTES), byte),
            text=ArraySpec((n_workers, _TEXT_BYTES), byte),
            exception=ArraySpec((n_workers, _EXCEPTION_BYTES), byte),
            stale=ArraySpec((n_workers, _STALE_BYTES), byte),
        )
        self.memory = NamedMemory(specs, shared=shared, purpose="the workers' failure reports")

    def clear(self, worker_rank: int) -> None:
        """Main process: forget the account of a worker that is being replaced."""
        self.memory.arrays.sizes[worker_rank] = 0

    def announce_stale(self, worker_rank: int, name: str) -> None:
        """Worker: after a kill, the main process is to call the function `name`; see `penstock.workers.cleanup`."""
        names = "\n".join([*self.stale(worker_rank), name]).encode()[:_STALE_BYTES]
        self.memory.arrays.stale[worker_rank, : len(names)] = np.frombuffer(names, np.uint8)

    def stale(self, worker_rank: int) -> list[str]:
        """The names that this worker, or one that it replaced, has announced."""
        text: bytes = self.memory.arrays.stale[worker_rank].tobytes()
        return text.rstrip(b"\0").decode().splitlines()

    def write(self, worker_rank: int, error: BaseException) -> None:
        """Worker: leave an account of `error`."""
        areas = self.memory.arrays
        headline, text, pickled = account = write_account(error)
        for area, part in ((areas.headline, headline), (areas.text, text), (areas.exception, pickled)):
            area[worker_rank, : len(part)] = np.frombuffer(part, np.uint8)
        areas.sizes[worker_rank] = tuple(map(len, account))  # last: says that the rest is complete

    def read(self, worker_rank: int) -> Report | None:
        """Main process: the account of a worker that is dead, if it left one."""
        areas = self.memory.arrays
        n_headline, n_text, n_pickled = areas.sizes[worker_rank].tolist()
        if not n_headline:
            return None
        return read_account(
            areas.headline[worker_rank, :n_headline].tobytes(),
            areas.text[worker_rank, :n_text].tobytes(),
            areas.exception[worker_rank, :n_pickled].tobytes(),
        )


def read_account(headline: bytes, text: bytes, pickled: bytes) -> Report:
    """Main process: the report that `write_account` gave the parts of."""
    exception = None
    if pickled:
        try:
            exception = pickle.loads(pickled)
        except Exception:  # a class that only the worker can build: the text has it all the same
            exception = None
    is_one = isinstance(exception, BaseException)
    return Report(headline.decode(errors="replace"), text.decode(errors="replace"), exception if is_one else None)


# What follows runs the exception's own methods, which may raise anything: SystemExit, KeyboardInterrupt.


def write_account(error: BaseException) -> tuple[bytes, bytes, bytes]:
    """Worker: headline, traceback and, if it can be pickled and rebuilt, the exception itself, each cut to size."""
    headline = in_one_line(error).encode(errors="replace")[:_HEADLINE_BYTES]
    text = _format(error).encode(errors="replace")
    if len(text) > _TEXT_BYTES:  # the innermost frames and the message stand at the end
        text = b"[...]\n" + text[6 - _TEXT_BYTES :]
    return headline, text, _pickle(error)


def in_one_line(error: BaseException) -> str:
    """The exception's class and the first line of its message, whatever its message does."""
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.").removeprefix("__main__.")
    try:
        lines = str(error).strip().splitlines()
    except BaseException as second:
        return f"{kind}: (its message could not be formatted: {type(second).__name__})"
    return f"{kind}: {lines[0]}{' ...' if len(lines) > 1 else ''}" if lines else kind


def _format(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except BaseException as second:  # an exception whose own __str__ or __repr__ raises
        frames = "".join(traceback.format_tb(error.__traceback__))
        return f"{frames}{type(error).__qualname__}: (its message could not be formatted: {type(second).__name__})"


def _pickle(error: BaseException) -> bytes:
    try:
        pickled = pickle.dumps(error)
        if len(pickled) <= _EXCEPTION_BYTES and type(pickle.loads(pickled)) is type(error):
            return pickled
    except BaseException:  # many exceptions cannot be pickled or rebuilt; the text stands for them
        pass
    return b""
