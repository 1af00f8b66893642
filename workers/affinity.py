"""Pinning this process to CPUs, and the number of threads of its numerical libraries."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Iterator, Sequence

import psutil

__all__ = ["avoid_cpus", "limit_threads", "pin", "threads_here", "usable_cpus"]

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def usable_cpus() -> tuple[int, ...]:
    """The CPUs that this process may run on; empty where the system cannot tell (macOS)."""
    process = psutil.Process()
    return tuple(sorted(process.cpu_affinity())) if hasattr(process, "cpu_affinity") else ()


def pin(cpus: Sequence[int]) -> None:
    """Run on `cpus` only, from now on."""
    psutil.Process().cpu_affinity(list(cpus))
    actual = usable_cpus()
    if set(actual) != set(cpus):
        raise OSError(f"pinning to CPUs {sorted(cpus)} gave {list(actual)}")


@contextlib.contextmanager
def avoid_cpus(cpus: Collection[int]) -> Iterator[None]:
    """Keep the calling thread off these CPUs, on which workers are pinned: it would be stopped for every one that it
    wakes there. Does nothing if that leaves it no CPU, or if torch works with several threads, which a single CPU
    would set against each other."""
    mask = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    rest = mask - set(cpus)
    if not rest or rest == mask or threads_here() > 1:
        yield
        return
    os.sched_setaffinity(0, rest)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mask)


def threads_here() -> int:
    """How many threads torch works with in this process; 1 if it is not loaded."""
    torch = sys.modules.get("torch")
    return 1 if torch is None else int(torch.get_num_threads())


def limit_threads(n: int) -> None:
    """Let libraries loaded from here on use `n` threads, and torch if it is loaded already."""
    for variable in _THREAD_VARIABLES:
        os.environ[variable] = str(n)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(n)
