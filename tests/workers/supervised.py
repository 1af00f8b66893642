"""What the workers of test_supervisor.py do, and a script that starts them. It needs no pytest."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import cloudpickle

from penstock.buffers.descriptors import InheritedFd
from penstock.workers.supervisor import SupervisedProcess, Supervisor

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # where the workers cannot import it


class ByValue:
    """Pickled as the object that it holds, with its class or its code."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (cloudpickle.dumps(self._value),)

    def __call__(self, *arguments: Any) -> Any:
        raise NotImplementedError


def start(
    supervisor: Supervisor,
    function: Callable[..., Any],
    *arguments: Any,
    spawns: bool = False,
    check: Callable[[float], None] = lambda _: None,
) -> SupervisedProcess:
    process = SupervisedProcess("a worker", ByValue(function), *arguments, spawns=spawns)
    process.start(supervisor, check)
    return process


def say(pipe: InheritedFd, *words: object) -> None:
    os.write(pipe.fd, (" ".join(map(str, words)) + "\n").encode())


# ---- what workers do -----------------------------------------------------------------------------


def sleep() -> None:
    time.sleep(600)


def sleep_with_child(pipe: InheritedFd) -> None:
    say(pipe, os.getpid(), subprocess.Popen(["sleep", "600"]).pid)
    sleep()


def sleep_with_children(pipe: InheritedFd) -> None:
    """One child is in a session of its own."""
    children = [subprocess.Popen(["sleep", "600"], start_new_session=apart).pid for apart in (False, True)]
    say(pipe, os.getpid(), *children)
    sleep()


def hold_interpreter_lock(pipe: InheritedFd) -> None:
    say(pipe, os.getpid(), subprocess.Popen(["sleep", "600"]).pid)
    ctypes.PyDLL(None).sleep(600)


# ---- in a script ---------------------------------------------------------------------------------


def supervisor_of(how: str, *preload: str) -> Supervisor:
    return Supervisor(preload, is_fork=how == "fork")


def start_three(
    supervisor: Supervisor, function: Callable[..., Any], *, spawns: bool = False
) -> list[SupervisedProcess]:
    """Print the ids of the supervisor, and of everything that the workers are and have started."""
    reader, writer = map(InheritedFd, os.pipe())
    found = [start(supervisor, function, writer, spawns=spawns) for _ in range(3)]
    text = b""
    while text.count(b"\n") < len(found):
        text += os.read(reader.fd, 4096)
    print(supervisor.pid, *map(int, text.split()), flush=True)
    return found


if __name__ == "__main__":
    exec(os.environ.pop("BEFORE", ""))
    how, function, code = sys.argv[1:]
    supervisor = supervisor_of(how)
    workers = start_three(supervisor, globals()[function], spawns=how == "spawn")
    exec(code)
    signal.pause()
