"""Runs scripts in forks of one process that has imported torch and penstock: for these imports a new interpreter takes
two seconds of CPU time.

A script runs as the main module, at the top level, and its process ends as that of a Python program does. The fork
server of a `Program` is a new interpreter, that of `run` is a fork of the script. A test that is about imports, options
of the interpreter or the start of a fork server needs a new interpreter: it uses `subprocess.Popen`.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib
import multiprocessing.process
import multiprocessing.util
import os
import pickle
import select
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODULES = ("torch", "gymnasium.envs.classic_control", "penstock.testing", "penstock.samplers.program")
MESSAGE_BYTES = 100_000
spawn_interpreter = multiprocessing.util.spawnv_passfds
SECONDS = 60


@dataclass(frozen=True)
class Request:
    """What to run. `strict`: warnings are errors. `light`: its fork server does not import torch for the workers.
    `forks_server`: its fork server is a fork, and need not import torch."""

    argv: list[str]
    strict: bool
    light: bool
    forks_server: bool = False
    folder: str = field(default_factory=os.getcwd)
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))


# ---- in the tests ------------------------------------------------------------------------------


class Starter:
    """The process that makes the forks, as the tests see it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        self._statuses: dict[int, int] = {}  # by process id, of those that have ended

    def start(self, request: Request, descriptors: list[int]) -> int:
        """Returns the process id."""
        socket.send_fds(self._socket, [pickle.dumps(vars(request))], descriptors)
        while True:
            pid, status = self._receive()
            if status is None:
                self._statuses.pop(pid, None)  # of an earlier process
                return pid
            self._statuses[pid] = status

    def wait(self, pid: int, *, block: bool) -> int | None:
        """What `os.wait` says of this process, or None if it has not ended."""
        while pid not in self._statuses and (block or select.select([self._socket], [], [], 0)[0]):
            ended, status = self._receive()
            assert status is not None
            self._statuses[ended] = status
        return self._statuses.get(pid)

    def _receive(self) -> tuple[int, int | None]:
        message = self._socket.recv(MESSAGE_BYTES)
        assert message, "the process that starts scripts has ended"
        pid, status = pickle.loads(message)
        return pid, status

    def close(self) -> None:
        self._socket.close()
        self._process.wait(SECONDS)


_starters: list[Starter] = []


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """`Program` works within it."""
    _starters.append(Starter())
    try:
        yield
    finally:
        _starters.pop().close()


class Program(subprocess.Popen):  # type: ignore[type-arg]
    """`Popen([sys.executable, *argv], text=True, start_new_session=True)` with pipes, but started by the `starter`."""

    def __init__(
        self,
        argv: Sequence[object],
        *,
        cwd: Path | None = None,
        strict: bool = False,
        light: bool = False,
        forks_server: bool = False,
    ) -> None:
        where = {} if cwd is None else {"folder": str(cwd)}
        self._request = Request([str(word) for word in argv], strict, light, forks_server, **where)
        self._starter = _starters[-1]
        super().__init__(self._request.argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    # What Popen itself leaves to the system that it runs on.

    def _execute_child(self, *arguments: Any) -> None:
        pipes = arguments[10:16]  # the two ends of stdin, of stdout and of stderr, or -1
        ends = [own if own != -1 else standard for standard, own in enumerate((pipes[0], pipes[3], pipes[5]))]
        self.pid = self._starter.start(self._request, ends)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        status = self._starter.wait(self.pid, block=wait_flags != os.WNOHANG)
        return (0, 0) if status is None else (self.pid, status)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and (ended := self._try_wait(os.WNOHANG))[0]:
            self._handle_exitstatus(ended[1])  # type: ignore[attr-defined]
        return self.returncode


def run(*argv: object, cwd: Path, seconds: float = 110, forks_server: bool = True) -> subprocess.CompletedProcess[str]:
    """`subprocess.run([sys.executable, *argv], capture_output=True, text=True)`."""
    with Program(argv, cwd=cwd, forks_server=forks_server) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


# ---- in the process that forks -----------------------------------------------------------------


def serve(connection: socket.socket) -> Request | None:
    """Fork for each request. Returns the request in a fork, None when the tests have ended."""
    running: dict[int, int] = {}  # process ids by pidfd
    while True:
        ready, _, _ = select.select([connection, *running], [], [])
        for pidfd in running.keys() & ready:
            pid = running.pop(pidfd)
            connection.send(pickle.dumps((pid, os.waitpid(pid, 0)[1])))
            os.close(pidfd)
        if connection in ready:
            message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
            if not message:
                return None
            if (pid := os.fork()) == 0:
                os.setsid()
                for standard, descriptor in enumerate(descriptors):
                    os.dup2(descriptor, standard)
                os.closerange(3, os.sysconf("SC_OPEN_MAX"))
                connection.detach()
                return Request(**pickle.loads(message))
            running[os.pidfd_open(pid)] = pid
            connection.send(pickle.dumps((pid, None)))
            for descriptor in descriptors:
                os.close(descriptor)


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
    if request.light:
        preload = multiprocessing.set_forkserver_preload
        multiprocessing.set_forkserver_preload = lambda names: preload([name for name in names if name != "torch"])
    if request.forks_server:
        multiprocessing.util.spawnv_passfds = fork_the_fork_server
    if request.light or request.forks_server:
        launch = importlib.import_module("penstock.workers.launch")
        plain, names = launch.Supervisor, ("torch",) if request.light else ()
        launch.Supervisor = lambda preload: plain(
            [name for name in preload if name not in names], is_fork=request.forks_server
        )
    main = types.ModuleType("__main__")
    main.__file__, main.__builtins__ = script, builtins  # type: ignore[attr-defined]
    sys.modules["starter"], sys.modules["__main__"] = sys.modules["__main__"], main
    return main


def fork_the_fork_server(path: Any, args: Sequence[Any], descriptors: Sequence[int]) -> int:
    """In place of `multiprocessing.util.spawnv_passfds`. Other processes are new interpreters."""
    code = args[-1]
    if "multiprocessing.forkserver" not in code:
        return spawn_interpreter(path, args, descriptors)
    if (pid := os.fork()) != 0:
        return pid
    try:
        first = 3
        for last in (*sorted(descriptors), os.sysconf("SC_OPEN_MAX")):
            os.closerange(first, last)
            first = last + 1
        # What the script has registered is its own.
        atexit._clear()
        multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(code, {})
    except SystemExit:
        pass
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        atexit._run_exitfuncs()
        os._exit(0)


if __name__ == "__main__":
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection would write to the memory that forks share
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        request = serve(connection)
    if request is not None:
        # Here and not in a function: an exception leaves the script as it leaves any program.
        main = become(request)
        exec(compile(Path(main.__file__).read_bytes(), main.__file__, "exec", dont_inherit=True), main.__dict__)
