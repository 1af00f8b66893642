"""How many descriptors and processes the system still allows, checked before workers start."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from penstock.buffers.memory_limits import left_in_cgroups
from penstock.errors import ConfigError

# Per worker in the main process: two wake-ups, both ends of its pipe, its stack file, its control socket, its pidfd.
_DESCRIPTORS_PER_WORKER = 7
_DESCRIPTORS_BESIDE = 32  # the shared blocks, the supervisor, and what one start takes
_PROCESSES_BESIDE = 3  # the supervisor, the resource tracker, the shell of marking.py


def check_limits(n_workers: int) -> None:
    """Raise `ConfigError` naming what is needed and what is left if `n_workers` more cannot be started."""
    descriptors = n_workers * _DESCRIPTORS_PER_WORKER + _DESCRIPTORS_BESIDE
    left: int | None = None
    if (limit := _descriptor_limit()) is not None:
        with contextlib.suppress(OSError):  # the system does not say
            left = limit - len(os.listdir("/proc/self/fd"))  # fewer than 0, if the limit was lowered later
    if left is not None and descriptors > left:
        raise ConfigError(
            f"{n_workers} workers need about {descriptors} file descriptors and this process may open only "
            f"{max(left, 0)} more: lower n_workers, or raise the limit (ulimit -n)"
        )
    processes = n_workers + _PROCESSES_BESIDE
    left = min(_processes_left(), default=None)
    if left is not None and processes > left:
        raise ConfigError(
            f"{n_workers} workers need {processes} processes and only {left} more are allowed here: lower n_workers, "
            "or raise the limit (ulimit -u, the container's pids limit)"
        )


@contextlib.contextmanager
def naming_descriptor_limit() -> Iterator[None]:
    """Turn the system's "too many open files" into a `ConfigError` that names the limit and says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise ConfigError(
                f"this process has no file descriptor left: its limit is {_descriptor_limit()}. Close files, or raise "
                f"the limit (ulimit -n): penstock needs {_DESCRIPTORS_BESIDE}, and {_DESCRIPTORS_PER_WORKER} for each "
                "worker"
            ) from error
        if error.errno == errno.ENFILE:
            raise ConfigError(
                "this machine has no file descriptor left: close files, or raise its limit (sysctl fs.file-max)"
            ) from error
        raise


def _descriptor_limit() -> int | None:
    try:
        import resource
    except ImportError:
        return None  # the system has none
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit


def _processes_left(*where: Path) -> list[int]:
    """How many processes each enclosing cgroup still allows. The user's own limit (ulimit -u) counts the threads of all
    sessions, which only the system can do; a start that reaches it says so."""
    names = ("pids.max", "pids.current")
    return [left for _, left in left_in_cgroups("pids", names, names, *where)]
