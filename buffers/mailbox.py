"""The mailbox: a message of any size from the main process to the workers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate

from penstock.buffers.descriptors import anonymous_file


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
