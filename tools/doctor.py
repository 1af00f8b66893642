"""`penstock doctor`: looks for what slows samplers down or stops them on this machine, and says what to do."""

from __future__ import annotations

import multiprocessing
import os
import platform
import resource
import sysconfig
import time
from collections.abc import Iterator
from importlib.util import find_spec

from penstock import system
from penstock.agents import distributions
from penstock.buffers import native
from penstock.buffers.memory_limits import free_memory
from penstock.buffers.reports import in_one_line
from penstock.columns import stepping
from penstock.errors import PenstockError
from penstock.games import lease_port
from penstock.workers import spinning
from penstock.workers.affinity import cpu_quota, cpus_to_fill, usable_cpus
from penstock.workers.claims import CpuClaims
from penstock.workers.plan import START_METHOD, Affinity


def describe_machine() -> dict[str, str]:
    """Facts by name, ready to print."""
    # Here, because every worker imports this module, and this one is large.
    from importlib.metadata import PackageNotFoundError, version

    def found(name: str) -> str:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return f"{name} not installed"

    cpus = usable_cpus()
    packages = ("numpy", "torch", "gymnasium", "cloudpickle", "psutil", "fasteners", "threadpoolctl")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        **({"portable": "yes, experimental: without what only Linux has"} if system.PORTABLE else {}),
        "python": platform.python_version() + (" (free-threaded)" if is_free_threaded() else ""),
        "system": platform.platform(),
        "packages": ", ".join(map(found, packages)),
        "usable CPUs": f"{len(cpus)} ({', '.join(map(str, cpus))})" if cpus else f"{os.cpu_count()}, without pinning",
        "free memory": f"{free_memory() / 2**20:,.0f} MiB",
        "open files": f"{_limit(soft)}, raised if needed up to {_limit(hard)} (ulimit -n)",
        "start methods": f"{START_METHOD} by default; {', '.join(multiprocessing.get_all_start_methods())}",
        **system.means(),
        "compiled parts": f"not in use ({_why_not_compiled()})" if _why_not_compiled() else "in use",
    }


_FEW_DESCRIPTORS = 1024
_LITTLE_MEMORY = 2**30


def advice() -> Iterator[str]:
    """One sentence or two for each finding: what was found, and what to do. Starts a small sampler."""
    for look in (
        _interpreter,
        _torch,
        _compiler,
        _cpus,
        _quota,
        _pinning,
        _load,
        _memory,
        _shared_memory,
        _descriptors,
        _ports,
        _sampling,
    ):
        yield from look()


def is_free_threaded() -> bool:
    """Whether this interpreter was built to run without the global interpreter lock."""
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def _interpreter() -> Iterator[str]:
    if is_free_threaded():
        yield (
            "this Python is free-threaded. penstock has not been tried there, and its inner loops run in Python. Use "
            "the usual build of Python."
        )


def _torch() -> Iterator[str]:
    if find_spec("torch") is None:
        yield "torch is not installed. Samplers return its tensors: pip install torch"
        return
    import torch

    if not torch.cuda.is_available():
        yield "torch finds no GPU. For small models that is no loss: ParallelSampler acts on the CPU."


def _limit(number: int) -> str:
    return str(number) if 0 < number < 2**62 else "any number"


def _why_not_compiled() -> str:
    """Why some inner loops run in Python, or all. Empty if none does."""
    return next(filter(None, (part.WHY_NOT_COMPILED for part in (native, spinning, distributions, stepping))), "")


def _compiler() -> Iterator[str]:
    if _why_not_compiled():
        yield (
            f"inner loops run in Python ({_why_not_compiled()}). Install a C compiler, then penstock again: "
            "pip install --force-reinstall --no-deps ."
        )


def _cpus() -> Iterator[str]:
    n, n_all = len(usable_cpus() or ()), os.cpu_count() or 1
    if 0 < n < n_all:
        yield f"this process may use {n} of {n_all} CPUs. By default a sampler starts {n} workers (see taskset)."
    if n == 1:
        yield "one CPU is not enough for workers beside the learner. SerialSampler may be as fast as ParallelSampler."


def _quota() -> Iterator[str]:
    cpus, allowed = usable_cpus(), cpu_quota()
    if allowed < len(cpus):
        yield (
            f"the container may use the time of {allowed:.3g} CPUs, less than the {len(cpus)} that it sees: by default "
            f"a sampler starts {cpus_to_fill(cpus)} workers. The system would pause more of them again and again."
        )


def _pinning() -> Iterator[str]:
    cpus, claims = usable_cpus(), CpuClaims()
    try:
        n = cpus_to_fill(cpus)
        if not cpus:
            yield "no worker is pinned to a CPU: this system cannot pin a process."
        elif not any(claims.assign(Affinity(), n, cpus)):
            yield (
                f"other runs have claimed so many of these {len(cpus)} CPUs that fewer than {n} are left: a sampler "
                "with that many workers would not pin them. Give n_workers, or wait for the other runs."
            )
        else:
            system.set_cpu_mask(system.cpu_mask())
    except OSError as error:
        yield f"workers cannot be pinned to CPUs here: {error}. They run where the system places them, a bit slower."
    finally:
        claims.close()


def busy() -> str:
    """How many processes run, if they are more than there are CPUs; else empty."""
    load, n = os.getloadavg()[0], len(usable_cpus() or ()) or os.cpu_count() or 1
    return f"{load:.1f} processes ran on average in the last minute, on {n} CPUs" if load > n else ""


def _load() -> Iterator[str]:
    if text := busy():
        yield f"{text}: figures of speed are too low now."


def _memory() -> Iterator[str]:
    free = free_memory()
    if free < _LITTLE_MEMORY:
        yield f"only {free / 2**20:,.0f} MiB of memory are free: use a smaller batch_T, batch_B or capacity."


def _shared_memory() -> Iterator[str]:
    if (what := system.means()["shared memory"]).startswith("a temporary file"):
        yield f"memory is shared through {what}, since memfd_create does not work. It is slower."


def _descriptors() -> Iterator[str]:
    if 0 <= (most := resource.getrlimit(resource.RLIMIT_NOFILE)[1]) < _FEW_DESCRIPTORS:
        yield f"a process may open {most} files, too few for many workers: let root raise the hard limit (ulimit -Hn)"


def _ports() -> Iterator[str]:
    try:
        lease_port().release()
    except PenstockError as error:
        yield f"ports cannot be leased, and workers of several runs may be pinned to the same CPUs: {error}"


def _sampling() -> Iterator[str]:
    if find_spec("torch") is None:
        return
    from penstock.agents import RandomAgent
    from penstock.envs import CountingEnv
    from penstock.samplers.sampler import ParallelSampler

    began = time.monotonic()
    try:
        with ParallelSampler(CountingEnv, batch_T=8, batch_B=2, n_workers=2) as sampler:
            sampler.initialize(RandomAgent(), seed=0)
            sampler.obtain_samples(0)
    except PenstockError as error:
        yield f"a ParallelSampler with two workers does not run here: {in_one_line(error)}"
        return
    seconds = time.monotonic() - began
    if seconds > 20:
        yield f"two workers took {seconds:.0f} s to start. Is the disk slow, or the machine busy?"
