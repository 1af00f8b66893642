"""Runs scripts in forks of one process that has imported torch and penstock.

A script that collects one batch with a `ParallelSampler` takes 7.6 s of CPU time in a new interpreter: its supervisor
imports torch too. In such a fork, it takes 1.4 s from start to end (median of 8, alternately, two busy CPUs). On these
CPUs, 64 tests of `tests/process` and `tests/examples` took 4 minutes with forks, and more than 15 without.

A script runs as the main module, at the top level. A `Program` is a child of the process that makes the forks, which
says how it has ended. By default, it ends as a Python program does, and its supervisor is a new interpreter.
`skips_teardown` and `forks_supervisor` change that, and `run` uses both. A test that is about imports, options of the
interpreter or the start of a supervisor needs a new interpreter: it uses `subprocess.Popen`.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import fcntl
import gc
import importlib
import multiprocessing.process
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

#: torch imports the second when a program makes its first optimizer, which takes more than a second of CPU time.
MODULES = (
    "torch",
    "torch._dynamo",
    "gymnasium.envs.classic_control",
    "penstock.testing",
    "penstock.samplers.sampler_program",
)
SECONDS = 60


@dataclass
class Request:
    """What to run. `strict`: warnings are errors. `light`: its supervisor does not import torch for the workers.
    `forks_supervisor`: its supervisor is a fork, and need not import torch. `skips_teardown`: it exits without taking
    its modules apart. `kept`: the numbers of descriptors that it has beside the standard ones."""

    argv: list[str]
    strict: bool
    light: bool
    forks_supervisor: bool = False
    skips_teardown: bool = False
    kept: tuple[int, ...] = ()
    folder: str = field(default_factory=os.getcwd)
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))


# ---- in the tests ------------------------------------------------------------------------------


class Starter:
    """The process that makes the forks, as the tests see it, at the other end of `end`."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._connection = end, Connection(os.dup(end.fileno()))
        self._statuses: dict[int, int] = {}  # by process id, of those that have ended

    def start(self, request: Request, descriptors: list[int]) -> int:
        """Returns the process id."""
        socket.send_fds(self._socket, [b"!"], descriptors)
        self._connection.send(vars(request))
        while True:
            pid, status = self._connection.recv()
            if status is None:
                self._statuses.pop(pid, None)  # of an earlier process
                return int(pid)
            self._statuses[pid] = status

    def wait(self, pid: int, *, block: bool) -> int | None:
        """What `os.wait` says of this process, or None if it has not ended."""
        while pid not in self._statuses and (block or self._connection.poll()):
            ended, status = self._connection.recv()
            assert status is not None
            self._statuses[ended] = status
        return self._statuses.get(pid)

    def close(self) -> None:
        self._connection.close()


_starters: list[Starter] = []


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """`Program` works within it."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        with contextlib.closing(Starter(ours)) as own:
            _starters.append(own)
            yield
            _starters.pop()
    process.wait(SECONDS)


class Program(subprocess.Popen):  # type: ignore[type-arg]
    """`Popen([sys.executable, *argv], text=True, start_new_session=True)` with pipes, but started by the `starter`."""

    def __init__(
        self,
        argv: Sequence[object],
        *,
        cwd: Path | None = None,
        environ: dict[str, str] | None = None,
        strict: bool = False,
        light: bool = False,
        forks_supervisor: bool = False,
        skips_teardown: bool = False,
        **options: Any,
    ) -> None:
        words = [str(word) for word in argv]
        self._request = Request(words, strict, light, forks_supervisor, skips_teardown)
        if cwd is not None:
            self._request.folder = str(cwd)
        if environ is not None:
            self._request.environ = environ
        self._starter = _starters[-1]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        super().__init__(words, **(options or pipes))

    # What Popen itself leaves to the system that it runs on.

    def _execute_child(self, *arguments: Any) -> None:
        kept = self._request.kept = tuple(sorted(arguments[4]))
        pipes = arguments[10:16]  # the two ends of stdin, of stdout and of stderr, or -1
        ends = [own if own != -1 else standard for standard, own in enumerate((pipes[0], pipes[3], pipes[5]))]
        self.pid = self._starter.start(self._request, [*ends, *kept])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        status = self._starter.wait(self.pid, block=wait_flags != os.WNOHANG)
        return (0, 0) if status is None else (self.pid, status)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and (ended := self._try_wait(os.WNOHANG))[0]:
            self._handle_exitstatus(ended[1])  # type: ignore[attr-defined]
        return self.returncode


def fork(
    command: Sequence[object], *, env: dict[str, str] | None = None, start_new_session: bool = True, **pipes: Any
) -> Program:
    """Takes the place of `subprocess.Popen`: runs the script `command[1]` in a fork, always in a session of its own."""
    return Program(command[1:], environ=env, forks_supervisor=True, skips_teardown=True, **{"stdout": None, **pipes})


#: Takes the place of `subprocess` in a module that starts scripts.
FORKING_SUBPROCESS = types.SimpleNamespace(**vars(subprocess) | {"Popen": fork})


def run(*argv: object, cwd: Path, seconds: float = 110, **how: bool) -> subprocess.CompletedProcess[str]:
    """`subprocess.run([sys.executable, *argv], capture_output=True, text=True)`. `how` is for `Program`: if it does not
    say otherwise, the supervisor is a fork, and the script skips its teardown."""
    with Program(argv, cwd=cwd, **{"forks_supervisor": True, "skips_teardown": True, **how}) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


# ---- in the process that forks -----------------------------------------------------------------


def serve(end: socket.socket) -> Request | None:
    """Fork for each request. Returns the request in a fork, None when the tests have ended."""
    connection, (reader, writer) = Connection(os.dup(end.fileno())), os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([end, reader], [], [])
        if reader in ready:
            os.read(reader, 4096)
            with contextlib.suppress(ChildProcessError):  # none is left
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    connection.send(ended)
        if end in ready:
            message, descriptors, _, _ = socket.recv_fds(end, 1, 8)
            if not message:
                return None
            request = Request(**connection.recv())
            if (pid := os.fork()) == 0:
                os.setsid()
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, before)
                connection.close()
                end.detach()
                take(descriptors, [0, 1, 2, *request.kept])
                return request
            connection.send((pid, None))
            for descriptor in descriptors:
                os.close(descriptor)


def take(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give the descriptors these numbers, in rising order, and close all others."""
    high = numbers[-1] + 1
    for descriptor, number in zip(
        [fcntl.fcntl(each, fcntl.F_DUPFD, high) for each in descriptors], numbers, strict=True
    ):
        os.dup2(descriptor, number)
    for before, number in zip(numbers, [*numbers[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(before + 1, number)


def become(request: Request) -> types.ModuleType:
    """Set what is another in each program. Returns its main module."""
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environ)
    script = request.argv[0]
    sys.argv[:] = request.argv
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    multiprocessing.process.ORIGINAL_DIR = request.folder  # type: ignore[attr-defined]
    tempfile.tempdir = None  # it depends on the environment
    if request.strict:
        sys.warnoptions.append("error")
        warnings.simplefilter("error")
    if request.light or request.forks_supervisor:
        set_supervisors(light=request.light, are_forks=request.forks_supervisor)
    sys.modules["torch"].set_num_threads(1)  # several tests share the CPUs
    main = types.ModuleType("__main__")
    main.__file__, main.__builtins__ = script, builtins  # type: ignore[attr-defined]
    sys.modules["starter"], sys.modules["__main__"] = sys.modules["__main__"], main
    return main


def set_supervisors(*, light: bool = False, are_forks: bool = False) -> None:
    """From now on, the supervisors that this process starts do not import torch, or are forks."""
    launcher = importlib.import_module("penstock.workers.launcher")
    plain = launcher.Supervisor

    def supervisor(preload: Sequence[str] = (), *, is_fork: bool = False) -> Any:
        imported = [name for name in preload if not (light and name.partition(".")[0] == "torch")]
        made = plain(imported, is_fork=is_fork or are_forks)
        made.preload = frozenset(preload)
        return made

    launcher.Supervisor = supervisor


def run_launched_worker(*arguments: Any, **how: Any) -> int:
    """Takes the place of the function of distributed/launched.py that a process calls. Its supervisors are forks."""
    set_supervisors(are_forks=True)
    sys.modules["torch"].set_num_threads(1)  # several tests share the CPUs
    launched = importlib.import_module("penstock.distributed.launched")
    return int(launched.run_worker(*arguments, **how))


def end_without_teardown() -> NoReturn:
    """Do what the interpreter does at its end, but leave the modules whole: with torch, that saves 0.3 s of CPU."""
    threading._shutdown()  # type: ignore[attr-defined]  # wait for the threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


if __name__ == "__main__":
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection would write to the memory that forks share
    with socket.socket(fileno=int(sys.argv[1])) as end:
        request = serve(end)
    if request is not None:
        # Here and not in a function: an exception leaves the script as it leaves any program.
        main = become(request)
        try:
            exec(compile(Path(main.__file__).read_bytes(), main.__file__, "exec", dont_inherit=True), main.__dict__)
        except SystemExit as end:
            if end.code or not request.skips_teardown:
                raise
        if request.skips_teardown:
            end_without_teardown()
