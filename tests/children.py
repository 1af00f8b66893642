"""Child processes: one that runs a few lines of code with objects that are sent to it, and forks of this process. And
what a process has: its descendants and its open descriptors."""

from __future__ import annotations

import os
import stat
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import psutil

SECONDS = 60


def exit_code_of(start_method: str, code: str, **objects: Any) -> int | None:
    """Run `code` in a child process, with `objects` as its variables. Returns the exit code, None if it did not end."""
    from penstock.workers.supervisor import SupervisedProcess, Supervisor  # conftest.py imports this file

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


def descendants() -> set[int]:
    """All processes below this one, zombies excluded."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
    return found


def descriptors() -> dict[int, str]:
    """The open descriptors of this process, each with its kind and a number: "p" is a pipe, "s" a socket, "?" what has
    no place in the file system, and "0" a file without a name, as all shared memory is."""
    found = {}
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # the descriptor of this listing
            status = os.fstat(int(name))
            is_nameless = stat.S_ISREG(status.st_mode) and not status.st_nlink
            found[int(name)] = f"{'0' if is_nameless else stat.filemode(status.st_mode)[0]} {status.st_ino}"
    return found
