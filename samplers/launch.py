"""Starting worker processes: the start method, what is preloaded, and what the children must not see."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import types
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

import cloudpickle
from gymnasium.vector.utils import clear_mpi_env_vars

from penstock.errors import ConfigError
from penstock.samplers.process import WorkerSetup, worker_main
from penstock.samplers.worker import Job

__all__ = ["START_METHODS", "dies_with_starter", "pickle_job", "start_worker", "worker_environ"]

START_METHODS = ("fork", "forkserver", "spawn")

#: Imported once by the fork server, so that workers start in milliseconds, not seconds.
_PRELOAD = ["torch", "penstock.samplers.process", "gymnasium", "gymnasium.envs.classic_control"]

_start_lock = threading.Lock()


def pickle_job(job: Job) -> bytes:
    """The job for a worker. Raises `ConfigError` naming the argument that cannot be pickled."""
    try:
        return bytes(cloudpickle.dumps(job))
    except Exception as error:  # pickling runs the user's code: anything may come
        for name, value in vars(job).items():
            try:
                cloudpickle.dumps(value)
            except Exception as cause:
                raise ConfigError(
                    f"{_ARGUMENT_NAMES.get(name, name)} cannot be pickled for the workers: {cause}. Build such "
                    "objects inside the function instead of closing over them; SerialSampler pickles nothing"
                ) from cause
        raise ConfigError(f"the workers' job cannot be pickled: {error}") from error


_ARGUMENT_NAMES = {"env_factories": "env_fn (or env_kwargs)", "eval_env_factories": "env_fn (or eval_env_kwargs)"}


def worker_environ() -> dict[str, str]:
    """The environment variables that workers get: today's, not those of the day the fork server began,
    and without the MPI variables, which would make libraries think that they are MPI ranks."""
    with clear_mpi_env_vars():
        return dict(os.environ)


def dies_with_starter(start_method: str) -> bool:
    """Whether a worker should also ask the kernel to kill it when its starter ends.

    The fork server ends a moment after the main process: time enough for the worker's watchdog to kill its
    whole group first, and the kernel then gets the worker whose interpreter was stuck in C. With fork and
    spawn the kernel would be first, and what the environments have started would live on.
    """
    return start_method == "forkserver"


def start_worker(setup: WorkerSetup, start_method: str) -> Any:
    """Start the process; returns the `multiprocessing.Process`."""
    context = multiprocessing.get_context(start_method)
    process = context.Process(  # type: ignore[attr-defined]
        target=worker_main, args=(setup,), name=f"penstock-worker-{setup.plan.worker_rank}"
    )
    with _start_lock:
        if start_method == "forkserver" and _forkserver_is_idle():
            multiprocessing.set_forkserver_preload(_PRELOAD)
        with contextlib.nullcontext() if start_method == "fork" else _no_main_module():
            process.start()
    return process


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
