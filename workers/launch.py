"""Starting worker processes: the start method, the fork server, and what the children must not see."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, reduction, resource_tracker
from typing import Any, Literal, NamedTuple, get_args

import cloudpickle

from penstock.buffers import descriptors
from penstock.buffers.descriptors import InheritedFd
from penstock.buffers.mailbox import Mailbox
from penstock.buffers.reports import in_one_line
from penstock.errors import ConfigError, WorkerDiedError, WorkerTimeoutError
from penstock.workers import lookout, sigint
from penstock.workers.affinity import blas_limited
from penstock.workers.handle import status_of
from penstock.workers.limits import check_limits
from penstock.workers.marking import worker_variables
from penstock.workers.plan import PoolOptions
from penstock.workers.process import worker_main
from penstock.workers.program import WorkerProcessArgs, WorkerProgram
from penstock.workers.supervisor import SupervisedProcess, Supervisor
from penstock.workers.uninterrupted import uninterrupted

StartMethod = Literal["fork", "forkserver", "spawn"]
START_METHODS: tuple[str, ...] = get_args(StartMethod)

# Environment variables with these prefixes would make libraries believe that a worker is an MPI process.
_MPI_PREFIXES = ("OMPI_", "PMI_")

_SAFE_PATH = "PYTHONSAFEPATH"

_PRELOAD_SECONDS = 120.0  # what a fork server may take to import its modules, even if start_timeout is shorter
_KILL_SECONDS = 0.5

_start_lock = threading.Lock()

#: Private: for start_method="forkserver", a supervisor takes the place of the fork server and the guardian.
SUPERVISED = os.environ.get("_PENSTOCK_SUPERVISOR") == "1"
_supervisors: list[Supervisor] = []  # one at most


def post_programs(
    programs: Sequence[WorkerProgram], shares: Sequence[Any]
) -> tuple[Mailbox, list[tuple[slice, slice, slice]]]:
    """Pickle what each worker needs into a new mailbox. A program that several workers run is pickled once.

    Returns the mailbox, and for each worker where its environment variables, program and share lie in it. Raises
    `ConfigError` naming the argument that cannot be pickled.
    """
    # The current variables: the fork server has the older ones, from when it was started.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_MPI_PREFIXES)}
    environ |= worker_variables()
    distinct = {id(program): program for program in programs}
    if "__mp_main__" in sys.modules:  # this process belongs to a pool; workers cannot import its main module
        cloudpickle.register_pickle_by_value(sys.modules["__mp_main__"])
    try:
        parts = [bytes(cloudpickle.dumps(part)) for part in (*distinct.values(), *shares)]
    except Exception as error:  # pickling runs the user's code, which may raise anything
        raise _unpicklable(tuple(distinct.values()), shares, error) from error
    mailbox = Mailbox()
    environ_place, *places = mailbox.post_parts([pickle.dumps(environ), *parts])
    place_of = dict(zip(distinct, places, strict=False))  # the shares follow
    own_places = zip(programs, places[len(distinct) :], strict=True)
    return mailbox, [(environ_place, place_of[id(program)], own) for program, own in own_places]


def _unpicklable(programs: Sequence[WorkerProgram], shares: Sequence[Any], error: Exception) -> ConfigError:
    """The error that names the argument which cannot be pickled."""
    named = {name: part for program in programs for name, part in program.pickled_parts().items()}
    for name, part in {**named, programs[0].share_name: shares}.items():
        try:
            cloudpickle.dumps(part)
        except Exception as cause:
            return ConfigError(
                f"{name} cannot be pickled for the workers: {in_one_line(cause)}. Create such objects inside the "
                "function. A SerialSampler needs no pickling"
            )
    return ConfigError(f"the workers' program cannot be pickled: {in_one_line(error)}")


class Parcel:
    """An object on its way to a child that `multiprocessing` starts: pickled as the object itself.

    Its descriptors follow through a socket. A process can be started with at most about 250 descriptors.
    """

    def __init__(self, value: Any) -> None:
        self._value = value
        self._in_transit: InheritedFd | None = None  # stays open until the child has its duplicate

    def __reduce__(self) -> tuple[Any, ...]:
        data, fds = descriptors.dumps(self._value)
        receiver, sender = socket.socketpair()
        self._in_transit = InheritedFd(receiver.detach())
        with sender:
            descriptors.send(sender, fds)
        return _unpack, (data, len(fds), reduction.DupFd(self._in_transit.fd))


def _unpack(data: bytes, n_fds: int, duplicate: Any) -> Any:
    with socket.socket(fileno=duplicate.detach()) as receiver:
        return descriptors.loads(data, descriptors.receive(receiver, n_fds))


class ForkServer(NamedTuple):
    """The process that forks the workers."""

    pid: int
    alive_fd: int  #: a pipe: the fork server exits when all copies of this end are closed
    address: str  #: the path of its socket; empty if it has none


class Launcher:
    """Starts the workers of one pool, and later their replacements.

    Raises `ConfigError` if the start method or this machine's limits do not allow this.
    """

    def __init__(self, options: PoolOptions, n_workers: int, *, may_be_supervised: bool = True) -> None:
        start_method = options.start_method
        self._start_method = start_method
        self.is_supervised = SUPERVISED and may_be_supervised and start_method == "forkserver"
        self._preload = ["penstock.workers.fork_server", *options.preload, "penstock.workers.process"]
        self._start_timeout = options.start_timeout
        check_limits(n_workers, start_method)
        _refuse_unsafe_fork(start_method)

    def prepare(self) -> ForkServer | None:
        """Start the fork server if it does not run. Returns None if this process starts the workers itself."""
        if self.is_supervised:
            with _start_lock, _no_current_folder():
                resource_tracker.ensure_running()
                self._ensure_supervisor()
        if self._start_method != "forkserver" or self.is_supervised:
            return None
        with _start_lock, _no_main_module(), explaining("the fork server"), _no_current_folder():
            uninterrupted(self._ensure_fork_server)
        server: Any = forkserver._forkserver
        address = server._forkserver_address
        return ForkServer(server._forkserver_pid, server._forkserver_alive_fd, "" if address[0] == "\0" else address)

    def _ensure_supervisor(self) -> Supervisor:
        if not _supervisors or _supervisors[0].has_ended() or not _supervisors[0].is_own:
            _close_supervisors()  # one that has ended is still a zombie, or belongs to the parent of this fork
            _supervisors[:] = [Supervisor(self._preload)]
        return _supervisors[0]

    def _ensure_fork_server(self) -> None:
        _forget_unreachable_server()
        if forkserver._forkserver._forkserver_pid is None:  # type: ignore[attr-defined]
            multiprocessing.set_forkserver_preload(self._preload)
        resource_tracker.ensure_running()  # it unblocks SIGINT
        # Ctrl-C must not interrupt an import in the fork server: all its workers would have half a module.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    @property
    def dies_with_parent(self) -> bool:
        """Whether the kernel must kill a worker when its parent exits.

        With forkserver the parent exits after the main process and the guardian, so the worker's watchdog has time to
        kill the whole process group. With fork and spawn the kernel would come first, and processes that the
        environments have started would survive. There the guardian kills workers that are stuck in C code.
        """
        return self._start_method == "forkserver" and not self.is_supervised

    def make(self, args: WorkerProcessArgs) -> Any:
        """Make the `multiprocessing.Process`; `start` starts it."""
        name = args.plan.name.removeprefix("the ").replace(" ", "-")
        if self.is_supervised:
            return SupervisedProcess(f"penstock-{name}", worker_main, args)
        context = multiprocessing.get_context(self._start_method)
        sent = args if self._start_method == "fork" else Parcel(args)
        return context.Process(  # type: ignore[attr-defined]
            target=worker_main, args=(sent,), name=f"penstock-{name}"
        )

    def start(self, process: Any, name: str, check: Callable[[], None] = lambda: None) -> None:
        """Start the process; errors call it `name`. `check` is called while the fork server does not answer, and may
        raise."""
        if self.is_supervised:
            with explaining(name):
                self._start_by_supervisor(process, name, check)
            return
        _refuse_unsafe_fork(self._start_method)
        main_module = contextlib.nullcontext() if self._start_method == "fork" else _no_main_module()
        known = _known_start_method(self._start_method)
        with _start_lock, main_module, known, _not_daemonic(), explaining(name):
            try:
                if self._start_method == "forkserver":
                    with _no_current_folder():
                        self._start_by_server(process, name, check)
                elif self._start_method == "fork":
                    with lookout.all_stopped(), blas_limited():
                        process.start()
                else:
                    process.start()
            except BrokenPipeError as error:  # the child has died before the fork server could send its process id
                raise WorkerDiedError(f"{name} died before it received its program (start-up)") from error

    def _start_by_supervisor(self, process: SupervisedProcess, name: str, check: Callable[[], None]) -> None:
        def refuse_to_wait(seconds: float) -> None:
            check()
            with sigint.allowed():
                pass  # Ctrl-C may end a wait for a supervisor that does not answer
            is_stopped = status_of(supervisor.pid) == "stopped"
            if seconds > (self._start_timeout if is_stopped else max(self._start_timeout, _PRELOAD_SECONDS)):
                why = "is stopped by a signal: continue it with kill -CONT" if is_stopped else "does not answer"
                raise WorkerTimeoutError(
                    f"{name} could not be started within {seconds:.0f} s: the supervisor (pid {supervisor.pid}) {why} "
                    "(start-up)"
                )

        while True:
            with _start_lock:
                supervisor = self._ensure_supervisor()
            try:
                process.start(supervisor, refuse_to_wait)
            except EOFError as error:
                if supervisor.has_started and supervisor.has_ended(within=_KILL_SECONDS):
                    continue  # it was killed: another one can do it
                raise ConfigError(
                    f"{name} could not be started: {error}, or may open no more descriptors (ulimit -n). See its error "
                    "output"
                ) from error
            supervisor.has_started = True
            return

    def _start_by_server(self, process: Any, name: str, check: Callable[[], None]) -> None:
        def start() -> None:
            self._ensure_fork_server()  # again: the fork server may have ended, or its socket was removed
            try:
                process.start()
            except ConnectionRefusedError:  # the fork server is ending
                _await_end_of_server()
                self._ensure_fork_server()
                process.start()

        def undo(_: None) -> None:
            process.kill()
            process.join(_KILL_SECONDS)

        def refuse_to_wait(seconds: float) -> None:
            check()
            with sigint.allowed():
                pass  # Ctrl-C may end a wait for a fork server that does not answer
            stopped = _stopped_server()
            if seconds > (self._start_timeout if stopped else max(self._start_timeout, _PRELOAD_SECONDS)):
                why = "is stopped by a signal: continue it with kill -CONT" if stopped else "does not answer"
                pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
                raise WorkerTimeoutError(
                    f"{name} could not be started within {seconds:.0f} s: the fork server (pid {pid}) {why} (start-up)"
                )

        uninterrupted(start, undo, refuse_to_wait)


@atexit.register
def _close_supervisors() -> None:
    for supervisor in _supervisors:
        supervisor.close()


@contextlib.contextmanager
def explaining(what: str) -> Iterator[None]:
    """Say what could not be started, and what may help."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise ConfigError(
            f"{what} could not be started: the fork server has exited ({error}). The next start makes a new one: try "
            "again. If it fails again, see the error output of the fork server. It also exits where this machine "
            "allows no more processes (ulimit -u, the container's pids limit)"
        ) from error
    except (BlockingIOError, MemoryError) as error:
        raise ConfigError(
            f"{what} could not be started: {error}. If this machine allows no more processes, lower n_workers or raise "
            "the limit (ulimit -u, the container's pids limit)"
        ) from error
    except FileNotFoundError as error:
        try:
            os.getcwd()
        except OSError:
            remedy = "The current folder was deleted: change to another folder"
        else:
            remedy = "The folder for temporary files may be missing: set TMPDIR to a folder that can be written"
        raise ConfigError(f"{what} could not be started: {error}. {remedy}") from error
    except OSError as error:
        if "path too long" not in str(error):  # of the socket that multiprocessing makes
            raise
        import tempfile

        raise ConfigError(
            f"{what} could not be started: {error}. The path of a socket may have some 100 characters, and the folder "
            f"for temporary files is {tempfile.gettempdir()}: set TMPDIR to a folder with a shorter path"
        ) from error


def _stopped_server() -> bool:
    """Whether a signal (SIGSTOP) has stopped the fork server."""
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid is not None and status_of(pid) == "stopped"


def _forget_unreachable_server() -> None:
    """If the socket of the fork server was removed (by a program that cleans /tmp), let multiprocessing start another
    fork server.

    The old one must live on, because its workers end with it. So its pipe stays open.
    """
    server: Any = forkserver._forkserver
    address = server._forkserver_address
    if server._forkserver_pid is not None and address and address[0] != "\0" and not os.path.exists(address):
        server._forkserver_pid = server._forkserver_alive_fd = server._forkserver_address = None
    folder = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    if folder is not None and not os.path.isdir(folder):
        os.mkdir(folder, 0o700)  # multiprocessing puts the next socket there, and removes the folder at exit


def _await_end_of_server() -> None:
    """The fork server listens no more: wait until it has ended, and let multiprocessing start another."""
    server: Any = forkserver._forkserver
    with server._lock:
        if server._forkserver_pid is not None:  # an abandoned start may have been here first
            with contextlib.suppress(ChildProcessError):  # something else in this process has waited for it
                os.waitpid(server._forkserver_pid, 0)
            os.close(server._forkserver_alive_fd)
            server._forkserver_pid = server._forkserver_alive_fd = server._forkserver_address = None


def _refuse_unsafe_fork(start_method: str) -> None:
    """Raise `ConfigError` if a fork is not safe: the child would have one thread, and locks that other threads hold for
    ever."""
    if start_method != "fork":
        return
    threads = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    others = [thread.name for thread in threads if thread.name != lookout.THREAD_NAME]  # `start` stops these
    if others or threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            f'start_method="fork" is not safe while this process has other threads ({", ".join(others)}): '
            'use start_method="forkserver"'
        )
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise ConfigError(
            'start_method="fork" is not possible once CUDA is initialized in this process: '
            'use start_method="forkserver", or initialize the sampler before the first use of the GPU'
        )


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """Keep children from importing the user's script.

    They do not need it: classes and functions of `__main__` are pickled by value. A script without an
    `if __name__ == "__main__"` guard would start samplers in every worker.
    """
    real = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = real


@contextlib.contextmanager
def _no_current_folder() -> Iterator[None]:
    """Keep the fork server from importing modules of the current folder, where others may have put a `gymnasium.py`.

    It is started as `python -c`, whose import path begins with the current folder. Workers get the import path of this
    process.
    """
    folder = os.getcwd() if sys.version_info < (3, 11) else None  # Python 3.10 does not know the variable
    given = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        if folder is not None:
            os.chdir("/")
        yield
    finally:
        if folder is not None:
            os.chdir(folder)
        if given is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = given


@contextlib.contextmanager
def _known_start_method(method: str) -> Iterator[None]:
    """Give children a start method that they know. Other libraries set start methods that only they know, such as
    joblib's "loky". A child that gets one of these fails."""
    contexts: Any = multiprocessing.context._default_context
    real = contexts._actual_context
    if real is not None and real.get_start_method() not in START_METHODS:
        contexts._actual_context = multiprocessing.get_context(method)
    try:
        yield
    finally:
        contexts._actual_context = real


@contextlib.contextmanager
def _not_daemonic() -> Iterator[None]:
    """Let a daemonic process have workers, for example a worker of a data loader.

    `multiprocessing` forbids this: it kills daemonic processes at exit, and their children would survive. Workers here
    always exit with their main process.
    """
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    daemonic = config.pop("daemon", None)
    try:
        yield
    finally:
        if daemonic is not None:
            config["daemon"] = daemonic
