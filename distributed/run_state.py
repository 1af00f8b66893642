"""The state of a run at one moment, and the file of JSON lines that its figures may go to."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

_log = logging.getLogger("penstock")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


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


def to_file(path: str | Path) -> Callable[[RunState], None]:
    """Returns a function that appends one line of JSON to the file at each call:
    `{"version": 3, "seconds": 1.5, "workers": {"trainer/0": {...}, ...}}`. A figure that is not finite is null. While
    the disk is full, lines are missing, and one warning says so; the next line that fits may come after a part of one.

    The function raises `ConfigError` if the path is a link, or a file of another user, who could have planted it there.
    """
    has_warned = False

    def write(state: RunState) -> None:
        nonlocal has_warned
        figures = {"version": state.version, "seconds": state.seconds, "workers": state.workers}
        line = json.dumps(_finite(figures), default=str, allow_nan=False) + "\n"
        try:
            with open(path, "ab+", opener=_open_own) as file:
                if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                    file.write(b"\n")  # the end of a part of a line
                file.write(line.encode())
        except OSError as error:
            if error.errno not in _FULL:
                raise
            if not has_warned:  # training is worth more than its figures
                _log.warning("figures cannot be written to %s, so lines are missing: %s", path, error.strerror)
            has_warned = True

    return write


def _finite(value: Any) -> Any:
    """The value, with None for each number in it that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
