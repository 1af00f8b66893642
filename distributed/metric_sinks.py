"""Where the figures of a run go: a file of JSON lines, or a place of your own."""

from __future__ import annotations

import errno
import json
import os
import stat
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.distributed.closing import Closing
from penstock.errors import ConfigError


@dataclass(frozen=True)
class RunState:
    """A run at one moment: the trainer's version, seconds since the start, and the figures of each worker."""

    version: int
    seconds: float
    workers: Mapping[str, Mapping[str, Any]] = field(repr=False)

    @property
    def trainer(self) -> Mapping[str, Any]:
        """The trainer's figures: what its last `step` has returned, and `version`, `stale`, `largest_staleness`."""
        return self.workers.get("trainer/0", {})


class MetricsSink(Closing):
    """Takes the figures of a run. Use it in a `with` statement, and give it to `run.wait`. Subclass it for another
    place: docs/recipes/machines.md has one for TensorBoard, and one for Prometheus."""

    @abstractmethod
    def write(self, state: RunState) -> None:
        """Take the figures of one moment."""

    def close(self) -> None:
        """Nothing more will be written. Calling it again does nothing."""


class JsonLines(MetricsSink):
    """Appends one line of JSON each time: `{"version": 3, "seconds": 1.5, "workers": {"trainer/0": {...}, ...}}`.

    `write` raises `ConfigError` if the path is a link, or a file of another user, who could have planted it there.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path

    def write(self, state: RunState) -> None:
        figures = {"version": state.version, "seconds": state.seconds, "workers": state.workers}
        with open(self._path, "a", encoding="utf-8", opener=_open_own) as file:
            file.write(json.dumps(figures, default=str) + "\n")


def _open_own(path: str, flags: int) -> int:
    """As `os.open`, but only what is this user's own file: somebody else may have planted a link in this folder."""
    try:
        opened = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link; a pipe
            raise
    else:
        facts = os.fstat(opened)
        if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid() and facts.st_nlink == 1:
            return opened
        os.close(opened)
    raise ConfigError(f"{path} is a link, no file, or not your own: give the path of a file of yours for the figures")
