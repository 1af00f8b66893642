"""Failure reports: a worker writes its exception into shared memory, and the main process reads it."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass

import numpy as np

from penstock.buffers import pickling
from penstock.buffers.named import NamedArrays
from penstock.buffers.shared import ArraySpec, NamedMemory

_TEXT_BYTES = 40 * 1024
_EXCEPTION_BYTES = 16 * 1024
_HEADLINE_BYTES = 1024


class RemoteTraceback(Exception):
    """The traceback of a worker's exception, as text: the cause of what the main process raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class Report:
    """A worker's traceback, and the exception itself if it can be pickled."""

    headline: str  #: type, the message's first line, and the notes
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
    """A fixed-size area per worker: its exception, cut if it is too long."""

    def __init__(self, n_workers: int, *, shared: bool) -> None:
        n_bytes = _HEADLINE_BYTES + _TEXT_BYTES + _EXCEPTION_BYTES
        specs = NamedArrays(
            sizes=ArraySpec((n_workers, 3), np.dtype(np.int64)),  # of the headline, the text and the exception
            areas=ArraySpec((n_workers, n_bytes), np.dtype(np.uint8)),
        )
        self.memory = NamedMemory(specs, shared=shared, purpose="the workers' failure reports")

    def clear(self, worker_rank: int) -> None:
        """Main process: forget the report of a worker that is being replaced."""
        self.memory.arrays.sizes[worker_rank] = 0

    def write(self, worker_rank: int, error: BaseException) -> None:
        """Worker: report `error`."""
        arrays, parts = self.memory.arrays, dump_exception(error)
        report = np.frombuffer(b"".join(parts), np.uint8)
        arrays.areas[worker_rank, : len(report)] = report
        arrays.sizes[worker_rank] = tuple(map(len, parts))  # last: the main process reads the rest if this is not zero

    def read(self, worker_rank: int) -> Report | None:
        """Main process: the report of a dead worker, or None."""
        n_headline, n_text, n_pickled = self.memory.arrays.sizes[worker_rank].tolist()
        if not n_headline:
            return None
        report, end = self.memory.arrays.areas[worker_rank].tobytes(), n_headline + n_text
        return load_exception(report[:n_headline], report[n_headline:end], report[end : end + n_pickled])


def load_exception(headline: bytes, text: bytes, pickled: bytes) -> Report:
    """Main process: the report from the parts that `dump_exception` returned."""
    try:
        exception = pickle.loads(pickled)
    except Exception:  # nothing was pickled, or only the worker can build the class; the text remains
        exception = None
    is_one = isinstance(exception, BaseException)
    return Report(headline.decode(errors="replace"), text.decode(errors="replace"), exception if is_one else None)


# The functions below call methods of the exception. These may raise anything, SystemExit and KeyboardInterrupt too.


def dump_exception(error: BaseException) -> tuple[bytes, bytes, bytes]:
    """Worker: headline, traceback, and the exception itself if it can be pickled and rebuilt; each cut to size."""
    headline = with_notes(error).encode(errors="replace")[:_HEADLINE_BYTES]
    text = format_exception(error).encode(errors="replace")
    if len(text) > _TEXT_BYTES:  # the innermost frames and the message are at the end
        text = b"[...]\n" + text[6 - _TEXT_BYTES :]
    return headline, text, _pickle(error)


def dump_exception_by_value(error: BaseException) -> tuple[bytes, bytes, bytes]:
    """As `dump_exception`, also if the class of the exception is one of the user's script."""
    headline, text, pickled = dump_exception(error)
    if not pickled:
        try:
            pickled = pickling.dumps(error)
        except Exception:  # many exceptions cannot be pickled; the text describes them
            pickled = b""
    return headline, text, pickled


def in_one_line(error: BaseException) -> str:
    """The exception's class and the first line of its message, even if its message raises."""
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.").removeprefix("__main__.")
    try:
        lines = str(error).strip().splitlines()
    except BaseException as second:
        return f"{kind}: (its message could not be formatted: {type(second).__name__})"
    return f"{kind}: {lines[0]}{' ...' if len(lines) > 1 else ''}" if lines else kind


def with_notes(error: BaseException) -> str:
    """As `in_one_line`, with what was noted on the exception (`add_note`)."""
    text, notes = in_one_line(error), vars(error).get("__notes__")
    firsts = [note.splitlines()[0] for note in notes if isinstance(note, str) and note] if type(notes) is list else []
    return f"{text}{':' if firsts and ': ' not in text else ''}{''.join(f' ({first})' for first in firsts)}"


def format_exception(error: BaseException) -> str:
    """The traceback as text, even if the message raises."""
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
    except BaseException:  # many exceptions cannot be pickled or rebuilt; the text describes them
        pass
    return b""
