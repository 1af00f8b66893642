"""The mailbox: a message of any size from the main process, for all workers to read when their gates open."""

from __future__ import annotations

import os

from penstock.buffers.descriptors import anonymous_file

__all__ = ["Mailbox"]


class Mailbox:
    """Holds one message. Written while the gates are shut and read behind them, so it needs no lock."""

    def __init__(self) -> None:
        self._file = anonymous_file("penstock-mailbox")

    def post(self, message: bytes) -> None:
        """Main process: replace the message."""
        os.ftruncate(self._file.fd, 0)
        written = 0
        while written < len(message):
            written += os.pwrite(self._file.fd, message[written:], written)

    def read(self) -> bytes:
        """Worker: the message."""
        size, parts, at = os.fstat(self._file.fd).st_size, [], 0
        while at < size and (part := os.pread(self._file.fd, size - at, at)):
            parts.append(part)
            at += len(part)
        return b"".join(parts)

    def close(self) -> None:
        self._file.close()
