"""Child processes: one that runs a few lines of code with objects that are sent to it, and forks of this process."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
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


def exit_code_of_fork(body: Callable[[], object]) -> int:
    """Run `body` in a fork of this process. Returns 0 if it has returned, and 1 if it has raised."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def waiting_fork() -> Iterator[None]:
    """A fork of this process, which does nothing. It exits at the end of the context."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    try:
        yield
    finally:
        os.close(write)
        os.waitpid(child, 0)
