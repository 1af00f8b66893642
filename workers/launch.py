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
from gymnasium.vector.utils import clear_mpi_env_vars

from penstock.buffers.mailbox import Mailbox
from penstock.errors import ConfigError, WorkerDiedError
from penstock.workers.limits import check_limits
from penstock.workers.plan import WorkerPlan
from penstock.workers.process import WorkerSetup, WorkOrder, worker_main
from penstock.workers.work import Job

__all__ = ["START_METHODS", "Launcher", "PickledJob", "Starter"]

START_METHODS = ("fork", "forkserver", "spawn")

#: Imported once by the fork server, so that workers start in milliseconds, not seconds. What else it imports is as the
#: first in this process who has workers asks for it.
_PRELOAD = ("penstock.workers.process", "gymnasium", "gymnasium.envs.classic_control")

_start_lock = threading.Lock()


class PickledJob:
    """A job on its way to the workers: what all share is pickled once, the rest for each worker.

    It lies in a file that the workers read. `multiprocessing` would send it through a pipe, and wait for
    ever if a worker died before it had read its part.

    Raises `ConfigError` naming the argument that cannot be pickled.
    """

    def __init__(self, job: Job, plans: Sequence[WorkerPlan]) -> None:
        with clear_mpi_env_vars():
            # Today's variables, not those of the day the fork server began, and without those that would
            # make libraries think that the workers are MPI ranks.
            environ = pickle.dumps(dict(os.environ))
        parts = [environ, *_pickled(job, plans)]
        self.mailbox = Mailbox()
        self.environ, self.common, *self.shares = self.mailbox.post_parts(parts)

    def order_for(self, plan: WorkerPlan) -> WorkOrder:
        """What one worker is to read."""
        return WorkOrder(self.mailbox, self.environ, self.common, self.shares[plan.worker_rank])

    def close(self) -> None:
        self.mailbox.close()


def _pickled(job: Job, plans: Sequence[WorkerPlan]) -> list[bytes]:
    try:
        return [bytes(cloudpickle.dumps(part)) for part in (job.common(), *map(job.share_of, plans))]
    except Exception as error:  # pickling runs the user's code: anything may come
        for name, value in job.arguments().items():
            try:
                cloudpickle.dumps(value)
            except Exception as cause:
                raise ConfigError(
                    f"{name} cannot be pickled for the workers: {cause}. Build such "
                    "objects inside the function instead of closing over them; SerialSampler pickles nothing"
                ) from cause
        raise ConfigError(f"the workers' job cannot be pickled: {error}") from error


@dataclass(frozen=True)
class Starter:
    """The fork server."""

    pid: int
    alive_fd: int  #: a pipe; the fork server ends when every copy of this end of it is closed


class Launcher:
    """Starts the workers of one sampler, and later their replacements.

    Raises `ConfigError` where the start method or this machine's limits do not allow them.
    """

    def __init__(self, start_method: str, n_workers: int, preload: Sequence[str]) -> None:
        """`preload`: modules that the job's workers import, beside those that all do."""
        self._start_method, self._preload = start_method, [*preload, *_PRELOAD]
        check_limits(n_workers, start_method)
        _refuse_unsafe_fork(start_method)

    def prepare(self) -> Starter | None:
        """Start what starts the workers, if it has not been; None if that is this process."""
        if self._start_method != "forkserver":
            return None
        with _start_lock, _no_main_module():
            if _forkserver_is_idle():
                multiprocessing.set_forkserver_preload(self._preload)
            with _explaining("the fork server"):
                forkserver.ensure_running()
        server: Any = forkserver._forkserver
        return Starter(server._forkserver_pid, server._forkserver_alive_fd)

    @property
    def dies_with_starter(self) -> bool:
        """Whether a worker should also ask the kernel to kill it when its starter ends.

        The fork server ends when the main process and its guardian have ended: time enough for the worker's
        watchdog to give back what the worker holds, and to kill its whole group. With fork and spawn the kernel
        would be first, and what the environments have started would live on; the guardian gets those whose
        interpreter is stuck in C.
        """
        return self._start_method == "forkserver"

    def make(self, setup: WorkerSetup) -> Any:
        """The `multiprocessing.Process`, not started."""
        context = multiprocessing.get_context(self._start_method)
        name = setup.plan.name.removeprefix("the ").replace(" ", "-")
        return context.Process(  # type: ignore[attr-defined]
            target=worker_main, args=(setup,), name=f"penstock-{name}"
        )

    def start(self, process: Any, name: str) -> None:
        """Start the process, which errors call `name`."""
        _refuse_unsafe_fork(self._start_method)
        main_module = contextlib.nullcontext() if self._start_method == "fork" else _no_main_module()
        with _start_lock, main_module, _not_daemonic():
            try:
                with _explaining(name):
                    process.start()
            except BrokenPipeError as error:  # the fork server's child is gone, and its process id with it
                raise WorkerDiedError(f"{name} died before it could be told what to do (start-up)") from error
            except (EOFError, ConnectionError) as error:
                raise ConfigError(
                    f"{name} could not be started: the fork server has ended ({error}). "
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
    """A fork copies one thread and the locks that the others held: the child may wait for ever."""
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


def _forkserver_is_idle() -> bool:
    return forkserver._forkserver._forkserver_pid is None  # type: ignore[attr-defined]


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """Keep children from importing the user's script.

    The job is pickled by value where it comes from `__main__`, so they do not need it, and a script
    without an `if __name__ == "__main__"` guard would start samplers of its own in every worker.
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

    `multiprocessing` forbids it because it kills daemonic processes without asking, and their children
    would be left behind. Workers here end with their main process however it ends.
    """
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    daemonic = config.pop("daemon", None)
    try:
        yield
    finally:
        if daemonic is not None:
            config["daemon"] = daemonic
