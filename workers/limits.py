"""How many descriptors and processes the system still allows, checked before workers start."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.buffers.memory_limits import left_in_cgroups
from penstock.errors import ConfigError

# Per worker in the main process: two wake-ups, both ends of its pipe, its stack file, its pidfd, its sentinel, and
# what the start method adds.
_DESCRIPTORS_PER_WORKER = {"fork": 8, "forkserver": 8, "spawn": 9}
_DESCRIPTORS_BESIDE = 32  # the shared blocks, the guardian, the fork server, and what one start takes
_PROCESSES_BESIDE = 3  # fork server, resource tracker, guardian


def check_limits(n_workers: int, start_method: str) -> None:
    """Raise `ConfigError` naming what is needed and what is left if `n_workers` more cannot be started."""
    descriptors = n_workers * _DESCRIPTORS_PER_WORKER[start_method] + _DESCRIPTORS_BESIDE
    left = _descriptors_left()
    if left is not None and descriptors > left:
        raise ConfigError(
            f"{n_workers} workers need about {descriptors} file descriptors and this process may open only {left} "
            "more: lower n_workers, or raise the limit (ulimit -n)"
        )
    processes = n_workers + _PROCESSES_BESIDE
    left = min(_processes_left(), default=None)
    if left is not None and processes > left:
        raise ConfigError(
            f"{n_workers} workers need {processes} processes and only {left} more are allowed here: lower n_workers, "
            "or raise the limit (ulimit -u, the container's pids limit)"
        )


def _descriptors_left() -> int | None:
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return None if limit == resource.RLIM_INFINITY else limit - len(os.listdir("/proc/self/fd"))
    except (ImportError, OSError):
        return None  # the system does not say


def _processes_left(*where: Path) -> list[int]:
    """How many processes each enclosing cgroup still allows. The user's own limit (ulimit -u) counts the threads of all
    sessions, which only the system can do; a start that reaches it says so."""
    names = ("pids.max", "pids.current")
    return [left for _, left in left_in_cgroups("pids", names, names, *where)]
