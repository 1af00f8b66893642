"""One wait over everything that can happen to workers: an arrival, a message, a death."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Sequence
from typing import Any, Protocol

from penstock.buffers.descriptors import InheritedFd
from penstock.buffers.trajectory_queue import ObjectPipe
from penstock.workers.gates import Gate
from penstock.workers.interrupts import interrupts

__all__ = ["DeathWatch", "Watch"]


class HasFileno(Protocol):
    """Anything that can be polled."""

    def fileno(self) -> int:
        """The descriptor to poll."""


class DeathWatch:
    """Readable when a process has ended.

    A pidfd where there is one: it reacts within a millisecond. `Process.sentinel` is a pipe whose other
    end the process's own children may hold open long after its death; it is the fallback.
    """

    def __init__(self, process: Any) -> None:
        self._pidfd: InheritedFd | None = None
        if hasattr(os, "pidfd_open"):
            try:
                self._pidfd = InheritedFd(os.pidfd_open(process.pid))
            except OSError:  # an old kernel, or the process is gone and reaped already: the sentinel tells
                self._pidfd = None
        self._sentinel = process.sentinel

    def fileno(self) -> int:
        return self._sentinel if self._pidfd is None else self._pidfd.fd

    def close(self) -> None:
        if self._pidfd is not None:
            self._pidfd.close()


class Watch:
    """Polls gates, pipes and deaths of all workers at once."""

    def __init__(self, gates: Sequence[Gate], pipes: Sequence[ObjectPipe], deaths: Sequence[DeathWatch]) -> None:
        self._gates, self._pipes = gates, pipes
        self._poll = select.poll()
        self._what: dict[int, tuple[str, int]] = {}
        watched: dict[str, Sequence[HasFileno]] = {
            "gate": gates,
            "pipe": [pipe.reader for pipe in pipes],
            "death": deaths,
        }
        for kind, things in watched.items():
            for i, thing in enumerate(things):
                self._poll.register(thing.fileno(), select.POLLIN)
                self._what[thing.fileno()] = kind, i

    def wait(self, seconds: float, *, interruptible: bool = False) -> list[int]:
        """Wait until something happens, `seconds` at most. Messages are read, wake-ups cleared; returns the
        indices of those that have died. Ctrl-C may end the waiting itself if it is `interruptible`."""
        dead = []
        with interrupts.passing() if interruptible else contextlib.nullcontext():
            ready = self._poll.poll(max(0, round(seconds * 1000)))
        for fd, _ in ready:
            kind, i = self._what[fd]
            if kind == "gate":
                self._gates[i].clear()
            elif kind == "pipe":
                self._pipes[i].drain()
            else:
                dead.append(i)
        return dead
