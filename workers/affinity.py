"""The CPUs of this process, and the number of threads of its numerical libraries."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import threadpoolctl

# Libraries read these when they are loaded. They are for libraries that an environment loads later, and for programs
# that it starts.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def usable_cpus() -> tuple[int, ...]:
    """The CPUs that this process may run on; empty where the system does not say (macOS)."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def idle_cpus(seconds: float) -> float:
    """How many of the CPUs that this process may use are idle, on average, while it sleeps for `seconds`. All of them
    where the system does not say."""
    before, began = _idle_ticks(), time.monotonic()
    time.sleep(seconds)
    after, took = _idle_ticks(), time.monotonic() - began
    ticks = [after[cpu] - before[cpu] for cpu in usable_cpus() if cpu in before and cpu in after]
    return sum(ticks) / os.sysconf("SC_CLK_TCK") / took if ticks else float(os.cpu_count() or 1)


def _idle_ticks() -> dict[int, int]:
    """For each CPU, how long it has been idle since the system started."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:  # macOS
        return {}
    # After the name: user, nice, system, idle, and idle while a program waits for a disk.
    found = (re.match(r"cpu(\d+) \d+ \d+ \d+ (\d+) (\d+)", line) for line in lines)
    return {int(match[1]): int(match[2]) + int(match[3]) for match in found if match}


def pin(cpus: Sequence[int]) -> None:
    """Run on `cpus` only, from now on."""
    os.sched_setaffinity(0, cpus)
    actual = usable_cpus()
    if set(actual) != set(cpus):
        raise OSError(f"pinning to CPUs {sorted(cpus)} gave {list(actual)}")


@contextlib.contextmanager
def avoid_cpus(cpus: Collection[int]) -> Iterator[None]:
    """Keep the calling thread off these CPUs, to which workers are pinned: a worker that it wakes there would stop it.

    Does nothing if no other CPU is left, or if torch uses several threads, which would then compete for one CPU.
    """
    mask = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    rest = mask - set(cpus)
    if not rest or rest == mask or threads_here() > 1:
        yield
        return
    try:
        os.sched_setaffinity(0, rest)
    except PermissionError:  # a sandbox
        yield
        return
    try:
        yield
    finally:
        os.sched_setaffinity(0, mask)


def threads_here() -> int:
    """How many threads torch uses in this process; 1 if it is not loaded."""
    torch = sys.modules.get("torch")
    return 1 if torch is None else int(torch.get_num_threads())


_n_modules, _libraries = 0, threadpoolctl.ThreadpoolController()


def limit_threads(n: int) -> None:
    """Let torch and the numerical libraries (OpenMP, MKL, OpenBLAS, BLIS) use `n` threads: those that are loaded, and
    those that are loaded later."""
    global _n_modules, _libraries  # forked workers inherit what the fork server has found
    for variable in _THREAD_VARIABLES:
        os.environ[variable] = str(n)
    if len(sys.modules) != _n_modules:  # the search takes a millisecond
        _n_modules, _libraries = len(sys.modules), threadpoolctl.ThreadpoolController()
    for library in _libraries.lib_controllers:
        if library.num_threads != n:
            library.set_num_threads(n)
            if n == 1 and hasattr(library.dynlib, "blas_thread_shutdown_"):
                # In a fork, OpenBLAS has just started its threads again. They would spin for 0.1 s, on this CPU.
                library.dynlib.blas_thread_shutdown_()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(n)
