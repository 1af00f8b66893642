"""What is told to whoever holds something for an environment, such as a game in a process of its own: that the worker
closes its environments, or that one is closed and built again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

#: While a worker closes its environments: call it with the seconds that an end may take, before it begins. Else None.
announce: Callable[[float], None] | None = None
#: Entered while one environment is closed and built again, so that what both need may stay.
while_rebuilding: list[Callable[[], AbstractContextManager[None]]] = []


def rebuilding() -> ExitStack:
    """Inside, an environment is closed, and another one takes its place."""
    stack = ExitStack()
    for enter in while_rebuilding:
        stack.enter_context(enter())
    return stack
