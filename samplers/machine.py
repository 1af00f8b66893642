"""What this machine offers a sampler, and which fallbacks are in use: the first thing to ask in a bug report."""

from __future__ import annotations

import multiprocessing
import os
import platform
from importlib.metadata import version

from penstock.buffers import native as copies
from penstock.buffers.memory_limits import free_memory
from penstock.collectors import native as loops
from penstock.workers.affinity import usable_cpus

__all__ = ["describe_machine"]


def describe_machine() -> dict[str, str]:
    """Facts by name, ready to print."""
    cpus = usable_cpus()
    packages = ("numpy", "torch", "gymnasium", "cloudpickle", "psutil")
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": ", ".join(f"{name} {version(name)}" for name in packages),
        "usable CPUs": f"{len(cpus)} ({', '.join(map(str, cpus))})" if cpus else "unknown: workers are not pinned",
        "free memory": f"{free_memory() / 2**20:,.0f} MiB",
        "start methods": ", ".join(multiprocessing.get_all_start_methods()),
        "shared memory": _which("memfd_create", "anonymous (memfd)", "multiprocessing.RawArray"),
        "wake-ups": _which("eventfd", "eventfd", "pipe"),
        "compiled parts": f"not in use: {'; '.join(missing)}" if (missing := _missing()) else "in use",
        "death of a process": _which("pidfd_open", "pidfd", "sentinel"),
    }


def _missing() -> list[str]:
    """Which of the compiled parts are not there, and why."""
    return [f"{part.__name__} ({part.MISSING})" for part in (copies, loops) if part.MISSING]


def _which(name: str, there: str, fallback: str) -> str:
    return there if hasattr(os, name) else f"{fallback} (no os.{name} here)"
