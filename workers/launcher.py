"""Starting worker processes: which supervisor starts them, with what, and whether the system allows so many."""

from __future__ import annotations

import atexit
import contextlib
import errno
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import cloudpickle

from penstock import system
from penstock.buffers import pickling
from penstock.buffers.memory_limits import left_in_cgroups
from penstock.buffers.object_pipe import Mailbox
from penstock.buffers.reports import in_one_line
from penstock.buffers.unpicklable import not_picklable
from penstock.errors import ConfigError, WorkerTimeoutError
from penstock.workers import sigint
from penstock.workers.affinity import blas_limited, thread_numbers, use_thread_numbers
from penstock.workers.forks import HARMLESS_THREAD
from penstock.workers.handle import status_of
from penstock.workers.monitor import DEATH_LOGGER_NAME, death_loggers_stopped
from penstock.workers.plan import PoolArguments, PoolOptions
from penstock.workers.program import WorkerProgram
from penstock.workers.supervisor import SupervisedProcess, Supervisor, import_all

_PRELOAD_SECONDS = 120.0  # what a supervisor may take to import its modules, even if start_timeout is shorter
_KILL_SECONDS = 0.5

_start_lock = threading.Lock()

_supervisors: list[Supervisor] = []  # for all pools of this process


def post_programs(
    programs: Sequence[WorkerProgram], worker_data: Sequence[Any]
) -> tuple[Mailbox, list[tuple[slice, slice]]]:
    """Pickle what each worker needs into a new mailbox. A program that several workers run is pickled once.

    Returns the mailbox, and for each worker where its program and its data lie in it. Raises
    `ConfigError` naming the argument that cannot be pickled.
    """
    distinct = {id(program): program for program in programs}
    if "__mp_main__" in sys.modules:  # this process belongs to a pool; workers cannot import its main module
        cloudpickle.register_pickle_by_value(sys.modules["__mp_main__"])
    try:
        parts = [pickling.dumps(part) for part in (*distinct.values(), *worker_data)]
    except Exception as error:  # pickling runs the user's code, which may raise anything
        named = {name: part for program in distinct.values() for name, part in program.pickled_parts().items()}
        raise unpicklable({**named, programs[0].data_name: worker_data}, error) from error
    mailbox = Mailbox()
    places = mailbox.post_parts(parts)
    place_of = dict(zip(distinct, places, strict=False))  # the data of the workers follow
    own_places = zip(programs, places[len(distinct) :], strict=True)
    return mailbox, [(place_of[id(program)], own) for program, own in own_places]


def unpicklable(parts: Mapping[str, Any], error: Exception) -> ConfigError:
    """The error that names the first of these arguments that cannot be pickled."""
    for name, part in parts.items():
        try:
            pickling.dumps(part)
        except Exception as cause:
            more = ". A SerialSampler needs no pickling"
            return not_picklable(f"{name} cannot be pickled for the workers", part, cause, more=more)
    return ConfigError(f"the workers' program cannot be pickled: {in_one_line(error)}")


class Launcher:
    """Starts the workers of one pool, and later their replacements.

    "forkserver" and "spawn": a supervisor for all pools of this process, as long as this lives. "fork": one for this
    pool, which `close` ends. Raises `ConfigError` if the start method or this machine's limits do not allow this.
    """

    def __init__(self, options: PoolOptions, n_workers: int) -> None:
        self._start_method, self._start_timeout = options.start_method, options.start_timeout
        # A worker of "spawn" is a new interpreter, so the supervisor need not import anything for it.
        self._preload = [] if self._start_method == "spawn" else [*options.preload, "penstock.workers.process"]
        self._fork: Supervisor | None = None
        check_limits(n_workers)
        _refuse_unsafe_fork(self._start_method)
        if self._start_method != "spawn" and system.WHY_NO_FORK:
            text = f'workers may crash with start_method="{self._start_method}": {system.WHY_NO_FORK}. Use "spawn"'
            warnings.warn(text, RuntimeWarning, stacklevel=2)  # once in a process

    def prepare(self) -> None:
        """Start the supervisor if it does not run."""
        with explaining("the supervisor of the workers"):
            self._ensure_supervisor()

    def _ensure_supervisor(self) -> Supervisor:
        if self._start_method != "fork":
            return shared_supervisor(self._preload)
        if self._fork is None:
            import_all(self._preload)  # here, so that all forks share these modules
            with death_loggers_stopped(), blas_limited():
                self._fork = Supervisor(is_fork=True)
        return self._fork

    def start(
        self, name: str, function: Callable[..., Any], *arguments: object, check: Callable[[], None] = lambda: None
    ) -> SupervisedProcess:
        """Start a process that calls `function(*arguments)`. Errors call it `name`. `check` is called while the
        supervisor does not answer, and may raise."""

        def refuse_to_wait(seconds: float) -> None:
            check()
            with sigint.allowed():
                pass  # Ctrl-C may end a wait for a supervisor that does not answer
            is_stopped = status_of(supervisor.pid) == "stopped"
            if seconds > (self._start_timeout if is_stopped else max(self._start_timeout, _PRELOAD_SECONDS)):
                why = "was stopped by a signal, and continues now: try again" if is_stopped else "does not answer"
                raise WorkerTimeoutError(
                    f"{name} could not be started within {seconds:.0f} s: the supervisor (pid {supervisor.pid}) {why} "
                    "(start-up)"
                )

        title = f"penstock-{name.removeprefix('the ').replace(' ', '-')}"
        process = SupervisedProcess(title, function, *arguments, spawns=self._start_method == "spawn")
        with explaining(name):
            while True:
                supervisor = self._ensure_supervisor()
                try:
                    process.start(supervisor, refuse_to_wait)
                except EOFError:
                    if supervisor.has_started and supervisor.has_ended(within=_KILL_SECONDS) and self._fork is None:
                        continue  # it was killed: another one can do it
                    raise
                except BaseException:
                    supervisor.resume()  # it may be stopped, and starts the workers of other pools too
                    raise
                supervisor.has_started = True
                return process

    def close(self) -> None:
        """End the pool's own supervisor."""
        if self._fork is not None:
            self._fork.close()


def start_beside(name: str, function: Callable[..., int], *arguments: object) -> SupervisedProcess:
    """Start a process beside the workers of pools. It calls `function(*arguments)`, exits with what this returns, and
    ends with this process, however this ends. Its libraries have as many threads as here. `function` is one of
    penstock."""
    launcher = Launcher(PoolArguments().pool_options(), 1)
    return launcher.start(name, _as_program, thread_numbers(), function, *arguments)


def _as_program(threads: Mapping[str, int], function: Callable[..., int], *arguments: object) -> int:
    """Call it, and do what Python does at the end of a program: user's code may count on it."""
    use_thread_numbers(threads)  # the supervisor has one
    try:
        return function(*arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # wait for its threads
        atexit._run_exitfuncs()


def shared_supervisor(preload: Sequence[str]) -> Supervisor:
    """A supervisor that has imported `preload`, and the most besides. One that runs and lacks only modules of penstock
    imports them now. It imports no others while it runs: they may be large, as torch is, and it starts no workers
    meanwhile."""
    with _start_lock:
        for supervisor in sorted(_supervisors, key=lambda own: (len({*preload} - own.preload), -len(own.preload))):
            missing = {*preload} - supervisor.preload
            if supervisor.has_ended() or not supervisor.is_own:
                supervisor.close()  # it is still a zombie, or belongs to the parent of this fork
                _supervisors.remove(supervisor)
            elif all(name.startswith("penstock.") for name in missing):
                supervisor.add(missing)
                return supervisor
        _supervisors.append(Supervisor(preload))
        Finalize(None, _close_supervisors, exitpriority=50)  # after the pools (100), whose workers it would kill
        return _supervisors[-1]


def resume_supervisors() -> None:
    """Let those continue that a signal has stopped."""
    for supervisor in _supervisors:
        supervisor.resume()


def _close_supervisors() -> None:
    for supervisor in _supervisors:
        supervisor.close()


@contextlib.contextmanager
def explaining(what: str) -> Iterator[None]:
    """Say what could not be started, and what may help."""
    try:
        yield
    except EOFError as error:
        raise ConfigError(
            f"{what} could not be started: {error}, or may open no more descriptors (ulimit -n). See its error output"
        ) from error
    except (BlockingIOError, MemoryError) as error:
        raise ConfigError(
            f"{what} could not be started: {error}. If this machine allows no more processes, lower n_workers or raise "
            "the limit (ulimit -u, the container's pids limit)"
        ) from error
    except FileNotFoundError as error:
        raise ConfigError(
            f"{what} could not be started: {error}. The current folder was deleted: change to another folder"
        ) from error


def _refuse_unsafe_fork(start_method: str) -> None:
    """Raise `ConfigError` if a fork is not safe: the child would have one thread, and locks that other threads hold for
    ever."""
    if start_method != "fork":
        return
    threads = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    harmless = (DEATH_LOGGER_NAME, HARMLESS_THREAD)  # `start` stops the loggers
    others = [thread.name for thread in threads if thread.name not in harmless]
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


# Per worker in the main process: two wake-ups, both ends of its pipe, its stack file, its control socket, and its pidfd
# where a wake-up is one descriptor.
_DESCRIPTORS_PER_WORKER = 6 + system.WAKE_UP_FDS
_DESCRIPTORS_BESIDE = 32  # the shared blocks, the supervisor, and what one start takes
_PROCESSES_BESIDE = 3  # the supervisor, the resource tracker, the shell of marking.py


def check_limits(n_workers: int) -> None:
    """Raise `ConfigError` naming what is needed and what is left if `n_workers` more cannot be started."""
    descriptors = n_workers * _DESCRIPTORS_PER_WORKER + _DESCRIPTORS_BESIDE
    n_open = 0
    with contextlib.suppress(OSError):  # the system does not say
        n_open = len(os.listdir(system.DESCRIPTORS))
    left = system.allow_files(n_open + descriptors) - n_open  # fewer than 0, if the limit was lowered later
    if descriptors > left:
        raise ConfigError(
            f"{n_workers} workers need about {descriptors} file descriptors and this process may open only "
            f"{max(left, 0)} more: lower n_workers, or raise the limit (ulimit -n)"
        )
    processes = n_workers + _PROCESSES_BESIDE
    left = min(processes_left(), default=math.inf)
    if processes > left:
        raise ConfigError(
            f"{n_workers} workers need {processes} processes and only {left} more are allowed here: lower n_workers, "
            "or raise the limit (ulimit -u, the container's pids limit)"
        )


@contextlib.contextmanager
def naming_descriptor_limit() -> Iterator[None]:
    """Turn the system's "too many open files" into a `ConfigError` that names the limit and says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise ConfigError(
                f"this process has no file descriptor left: its limit is {system.allow_files(0)}. Close files, or "
                f"raise the limit (ulimit -n): penstock needs {_DESCRIPTORS_BESIDE}, and {_DESCRIPTORS_PER_WORKER} for "
                "each worker"
            ) from error
        if error.errno == errno.ENFILE:
            raise ConfigError(
                "this machine has no file descriptor left: close files, or raise its limit (sysctl fs.file-max)"
            ) from error
        raise


def processes_left(*where: Path) -> list[int]:
    """How many processes each enclosing cgroup still allows. The user's own limit (ulimit -u) counts the threads of all
    sessions, which only the system can do; a start that reaches it says so."""
    names = ("pids.max", "pids.current")
    return [left for _, left in left_in_cgroups("pids", names, names, *where)]
