"""What this machine offers to a sampler, and which fallbacks are in use. Add its output to a bug report."""

from __future__ import annotations

import multiprocessing
import os
import platform
from collections.abc import Callable

from penstock.buffers import native
from penstock.buffers.memory_limits import free_memory
from penstock.workers.affinity import usable_cpus


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
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": ", ".join(map(found, packages)),
        "usable CPUs": f"{len(cpus)} ({', '.join(map(str, cpus))})" if cpus else "unknown: workers are not pinned",
        "free memory": f"{free_memory() / 2**20:,.0f} MiB",
        "start methods": ", ".join(multiprocessing.get_all_start_methods()),
        "shared memory": _which(lambda: os.memfd_create("penstock"), "anonymous (memfd)", "a temporary file"),
        "wake-ups": _which(lambda: os.eventfd(0), "eventfd", "pipe"),
        "compiled part": "in use" if native.COMPILED else f"not in use ({native.WHY_NOT_COMPILED})",
        "death of a process": _which(lambda: os.pidfd_open(os.getpid()), "pidfd", "sentinel"),
    }


def _which(open_one: Callable[[], int], preferred: str, fallback: str) -> str:
    """`preferred` if the system opens such a descriptor, and otherwise `fallback` with the reason."""
    try:
        os.close(open_one())
    except (AttributeError, OSError) as error:
        return f"{fallback} ({error})"
    return preferred
