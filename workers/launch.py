"""Starting worker processes: the start method, what is preloaded, and what the children must not see."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import Any

import cloudpickle

from penstock.buffers.mailbox import Mailbox
from penstock.errors import ConfigError, WorkerDiedError
from penstock.workers.limits import check_limits
from penstock.workers.process import worker_main
from penstock.workers.program import WorkerProcessArgs, WorkerProgram

START_METHODS = ("fork", "forkserver", "spawn")

# They would make libraries believe that a worker is an MPI process.
_MPI_PREFIXES = ("OMPI_", "PMI_")

_start_lock = threading.Lock()


def post_programs(
    programs: Sequence[WorkerProgram], shares: Sequence[Any]
) -> tuple[Mailbox, list[tuple[slice, slice, slice]]]:
    """Pickle what each worker needs into a new mailbox; a program of several workers is pickled once.

    Returns the mailbox, and for each worker where its environment variables, program and share lie in it. Raises
    `ConfigError` naming the argument that cannot be pickled.
    """
    # The variables of today; the fork server has older ones.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_MPI_PREFIXES)}
    distinct = list({id(program): program for program in programs}.values())
    indices = [[id(one) for one in distinct].index(id(program)) for program in programs]
    try:
        parts = [bytes(cloudpickle.dumps(part)) for part in (*distinct, *shares)]
    except Exception as error:  # pickling runs the user's code, which may raise anything
        raise _unpicklable(distinct, shares, error) from error
    mailbox = Mailbox()
    where, *places = mailbox.post_parts([pickle.dumps(environ), *parts])
    n = len(distinct)
    return mailbox, [(where, places[index], places[n + rank]) for rank, index in enumerate(indices)]


def _unpicklable(programs: Sequence[WorkerProgram], shares: Sequence[Any], error: Exception) -> ConfigError:
    named = {name: part for program in programs for name, part in program.pickled_parts().items()}
    for name, part in {**named, programs[0].share_name: shares}.items():
        try:
            cloudpickle.dumps(part)
        except Exception as cause:
            return ConfigError(
                f"{name} cannot be pickled for the workers: {cause}. Build such objects inside the function instead of "
                "closing over them; SerialSampler pickles nothing"
            )
    return ConfigError(f"the workers' program cannot be pickled: {error}")


@dataclass(frozen=True)
class Starter:
    """The fork server."""

    pid: int
    alive_fd: int  #: a pipe; the fork server exits when every copy of this end is closed


class Launcher:
    """Starts the workers of one pool, and later their replacements.

    Raises `ConfigError` where the start method or this machine's limits do not allow them.
    """

    def __init__(self, start_method: str, n_workers: int, preload: Sequence[str]) -> None:
        """`preload`: modules that workers import, for the fork server to import once. The first pool of this process
        decides what it imports."""
        self._start_method, self._preload = start_method, [*preload, "penstock.workers.process"]
        check_limits(n_workers, start_method)
        _refuse_unsafe_fork(start_method)

    def prepare(self) -> Starter | None:
        """Start the fork server unless it runs; None if this process starts the workers itself."""
        if self._start_method != "forkserver":
            return None
        with _start_lock, _no_main_module():
            if forkserver._forkserver._forkserver_pid is None:  # type: ignore[attr-defined]
                multiprocessing.set_forkserver_preload(self._preload)
            with _explaining("the fork server"):
                forkserver.ensure_running()
        server: Any = forkserver._forkserver
        return Starter(server._forkserver_pid, server._forkserver_alive_fd)

    @property
    def dies_with_starter(self) -> bool:
        """Whether a worker should also ask the kernel to kill it when its starter exits.

        The fork server exits after the main process and its guardian. That leaves time for the worker's watchdog to
        release what the worker holds and to kill its whole group. With fork and spawn the kernel would be faster than
        the watchdog, and what the environments have started would survive; there the guardian kills workers whose
        interpreter is stuck in C.
        """
        return self._start_method == "forkserver"

    def make(self, args: WorkerProcessArgs) -> Any:
        """The `multiprocessing.Process`, not started."""
        context = multiprocessing.get_context(self._start_method)
        name = args.plan.name.removeprefix("the ").replace(" ", "-")
        return context.Process(  # type: ignore[attr-defined]
            target=worker_main, args=(args,), name=f"penstock-{name}"
        )

    def start(self, process: Any, name: str) -> None:
        """Start the process; errors call it `name`."""
        _refuse_unsafe_fork(self._start_method)
        main_module = contextlib.nullcontext() if self._start_method == "fork" else _no_main_module()
        with _start_lock, main_module, _not_daemonic():
            try:
                with _explaining(name):
                    process.start()
            except BrokenPipeError as error:  # the fork server's child is gone, and its process id with it
                raise WorkerDiedError(f"{name} died before it received its program (start-up)") from error
            except (EOFError, ConnectionError) as error:
                raise ConfigError(
                    f"{name} could not be started: the fork server has exited ({error}). "
                    "If this machine allows no more processes, lower n_workers or raise the limit (ulimit -u)"
                ) from error


@contextlib.contextmanager
def _explaining(what: str) -> Iterator[None]:
    """Say what could not be started, and what may help."""
    try:
        yield
    except (BlockingIOError, MemoryError) as error:
        raise ConfigError(
            f"{what} could not be started: {error}. This machine allows no more processes: lower n_workers, or "
            "raise the limit (ulimit -u, the container's pids limit)"
        ) from error


def _refuse_unsafe_fork(start_method: str) -> None:
    """A fork copies one thread, and the locks that other threads held: the child may wait for ever."""
    if start_method != "fork":
        return
    others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
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
def _not_daemonic() -> Iterator[None]:
    """Let a daemonic process (a data loader's, a pool's) have workers too.

    `multiprocessing` forbids it, since it kills daemonic processes and their children would survive. Workers here
    always exit with their main process.
    """
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    daemonic = config.pop("daemon", None)
    try:
        yield
    finally:
        if daemonic is not None:
            config["daemon"] = daemonic
