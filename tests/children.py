"""A child process that runs a few lines of code, with objects that are sent to it when it is started."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from penstock.workers.supervisor import SupervisedProcess, Supervisor

SECONDS = 60


def exit_code_of(start_method: str, code: str, **objects: Any) -> int | None:
    """Run `code` in a child process, with `objects` as its variables. Returns the exit code, None if it did not end."""
    child = SupervisedProcess("penstock-child", exec, code, objects, spawns=start_method == "spawn")
    with closing(Supervisor(is_fork=start_method == "fork")) as supervisor, closing(child):
        child.start(supervisor)
        child.join(SECONDS)
        return child.exitcode
