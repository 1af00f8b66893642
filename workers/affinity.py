"""The CPUs of this process, and the number of threads of its numerical libraries."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from threadpoolctl import LibController, ThreadpoolController

from penstock import system
from penstock.buffers.memory_limits import enclosing_cgroups

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def usable_cpus() -> tuple[int, ...]:
    """The CPUs that this process may run on; empty where the system does not say (macOS)."""
    return tuple(sorted(system.cpu_mask()))


def cpu_quota(*where: Path) -> float:
    """The CPU quota of the containers around this process: with 2.5, it and its workers together get the time of two
    and a half CPUs. inf: there is no limit."""
    least = math.inf
    for folder, is_v1 in enclosing_cgroups("cpu", *where):
        try:
            if is_v1:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            else:
                quota, period = (folder / "cpu.max").read_text().split()
            if float(quota) > 0:  # -1: no limit
                least = min(least, float(quota) / float(period))
        except (OSError, ValueError):  # the root has no such file, or it says "max"
            continue
    return least


def cpus_to_fill(mask: Sequence[int]) -> int:
    """How many processes keep the CPUs of `mask` busy: one for each, and no more than the quota of the container. Where
    the system has no mask, and it is empty, all CPUs count."""
    return max(1, math.floor(min(len(mask) or os.cpu_count() or 1, cpu_quota())))


def pin(cpus: Sequence[int]) -> None:
    """Run on `cpus` only, from now on."""
    system.set_cpu_mask(cpus)
    actual = usable_cpus()
    if set(actual) != set(cpus):
        raise OSError(f"pinning to CPUs {sorted(cpus)} gave {list(actual)}")


@contextlib.contextmanager
def avoid_cpus(cpus: Collection[int]) -> Iterator[None]:
    """Keep the calling thread off these CPUs, to which workers are pinned: a worker that it wakes there would stop it.

    Does nothing if no other CPU is left, or if torch uses several threads, which would then compete for one CPU.
    """
    mask = system.cpu_mask()
    rest = mask - set(cpus)
    if not rest or rest == mask or threads_here() > 1:
        yield
        return
    try:
        system.set_cpu_mask(rest)
    except OSError:  # a sandbox
        yield
        return
    try:
        yield
    finally:
        system.set_cpu_mask(mask)


def threads_here() -> int:
    """How many threads torch uses in this process; 1 if it is not loaded."""
    torch = sys.modules.get("torch")
    return 1 if torch is None else int(torch.get_num_threads())


def thread_numbers() -> dict[str, int]:
    """How many threads each loaded library uses in this process, by its name."""
    numbers = {library.internal_api: library.num_threads for library in _libraries()}
    return numbers | ({"torch": threads_here()} if "torch" in sys.modules else {})


def use_thread_numbers(numbers: Mapping[str, int]) -> None:
    """Let the libraries that are loaded here use as many threads as in the process in which `numbers` were read; torch
    also if it is loaded later."""
    if "torch" in numbers:
        os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(numbers["torch"])))
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(numbers["torch"])
    for library in _libraries():
        _use_threads(library, numbers.get(library.internal_api, library.num_threads))


def limit_threads(n: int) -> None:
    """Let torch, OpenMP, and the libraries of linear algebra (OpenBLAS, MKL, BLIS) use `n` threads in this process.

    Libraries that this process loads later, and programs that it starts, read the number from environment variables.
    """
    for variable in _THREAD_VARIABLES:
        os.environ[variable] = str(n)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(n)  # its MKL is a part of it, which a search does not find
    for library in _libraries():
        _use_threads(library, n)


def limit_blas() -> list[tuple[LibController, int]]:
    """Let linear algebra use one thread here and in later forks. Returns its libraries and their numbers before.

    Do this before a fork: if a fork changes the number, OpenBLAS first starts one thread per CPU there, and each spins
    for a tenth of a second.
    """
    before = [(library, library.num_threads) for library in _libraries() if library.user_api == "blas"]
    for library, _ in before:
        _use_threads(library, 1)
    return before


@contextlib.contextmanager
def blas_limited() -> Iterator[None]:
    """`limit_blas`, and afterwards as many threads as before."""
    before = limit_blas()
    try:
        yield
    finally:
        for library, n in before:
            _use_threads(library, n)
            # This has started OpenBLAS's threads, which would spin for a tenth of a second. It starts them again when
            # it needs them, as after every fork.
            getattr(library.dynlib, "blas_thread_shutdown_", int)()


def _use_threads(library: LibController, n: int) -> None:
    if library.num_threads != n:
        library.set_num_threads(n)


_found: tuple[int, list[LibController]] = (0, [])  # the libraries, and how many modules were imported then


def _libraries() -> list[LibController]:
    """The loaded libraries that have threads. The search takes a millisecond, so forks inherit what it has found.

    A library that is loaded later, without an import, gets its number of threads from the environment variables alone.
    """
    global _found  # noqa: PLW0603 - a property of the process
    if len(sys.modules) != _found[0]:
        _found = len(sys.modules), ThreadpoolController().lib_controllers
    return _found[1]
