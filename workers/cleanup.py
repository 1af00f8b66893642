"""Cleanup of things that outlive a process unless it releases them, such as lock files.

A room that makes such things registers once per process, before it makes the first. Workers end without exit
handlers, so a worker's last act is `run_at_exit`. If the worker is killed instead, the main process removes the rest:
the worker has announced which functions to call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from importlib import import_module

_exit_hooks: dict[str, Callable[[], None]] = {}
_listener: Callable[[str], None] | None = None


def register(release: Callable[[], None], *, remove_stale: str) -> None:
    """`release` releases what this process holds. `remove_stale`, as "package.module:function", names the function that
    removes what killed processes have left. Neither may raise or wait for long."""
    _exit_hooks[remove_stale] = release
    if _listener is not None:
        _listener(remove_stale)


def announce_to(listener: Callable[[str], None]) -> None:
    """Worker: call `listener` with the name of every `remove_stale` function that is registered from now on."""
    global _listener  # noqa: PLW0603 - a property of the process
    _listener = listener
    _exit_hooks.clear()  # a fork inherits hooks for things that it does not hold


def run_at_exit() -> None:
    """In a process that is about to end: release what it holds."""
    for release in list(_exit_hooks.values()):
        release()


def remove_stale(names: Iterable[str]) -> None:
    """Main process: remove what killed workers have left. `names` are the functions that they have announced."""
    for name in names:
        module, _, function = name.partition(":")
        with contextlib.suppress(ImportError):  # the worker had it from a place that the main process does not know
            getattr(import_module(module), function)()
