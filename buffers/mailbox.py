"""The mailbox: a message of any size from the main process to the workers, read when they are ready for it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate

from penstock.buffers.descriptors import anonymous_file

__all__ = ["Mailbox"]


class Mailbox:
    """Holds one message. Written before a gate opens or a worker starts, and read afterwards: it needs no lock.

    Unlike a pipe it takes any size at once, whether or not the reader still lives.
    """

    def __init__(self) -> None:
        self._file = anonymous_file("penstock-mailbox")

    def post(self, message: bytes) -> None:
        """Main process: replace the message."""
        os.ftruncate(self._file.fd, 0)
        written = 0
        while written < len(message):
            written += os.pwrite(self._file.fd, message[written:], written)

    def post_parts(self, parts: Sequence[bytes]) -> list[slice]:
        """Main process: a message of several parts; returns where each is to be read."""
        self.post(b"".join(parts))
        ends = list(accumulate(map(len, parts)))
        return [slice(end - len(part), end) for end, part in zip(ends, parts, strict=True)]

    def read(self, part: slice | None = None) -> bytes:
        """Worker: the message, or one part of it."""
        at, end = (0, os.fstat(self._file.fd).st_size) if part is None else (part.start, part.stop)
        chunks = []
        while at < end and (chunk := os.pread(self._file.fd, end - at, at)):
            chunks.append(chunk)
            at += len(chunk)
        return b"".join(chunks)

    def close(self) -> None:
        self._file.close()
