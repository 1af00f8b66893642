"""What processes hold that outlives them unless it is given back, such as lock files. Whoever has such things registers
how; workers do not end by exit handlers."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["register", "remove_stale", "run_at_exit"]

_releases: list[Callable[[], None]] = []
_sweeps: list[Callable[[], None]] = []


def register(*, release: Callable[[], None], sweep: Callable[[], None]) -> None:
    """`release` gives back what this process holds, at its end. `sweep` removes what processes have left that were
    killed. Neither may raise or wait for long."""
    _releases.append(release)
    _sweeps.append(sweep)


def run_at_exit() -> None:
    """In a process that is about to end: give back what it holds."""
    for release in _releases:
        release()


def remove_stale() -> None:
    """In the main process: remove what workers have left that were killed."""
    for sweep in _sweeps:
        sweep()
