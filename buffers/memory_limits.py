"""How much memory this process may still allocate: on the machine, and in every enclosing cgroup."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

from penstock.errors import ConfigError


def free_memory() -> int:
    """Bytes that can still be allocated without swapping or being killed by a cgroup's limit."""
    return min([int(psutil.virtual_memory().available), *_cgroup_headrooms()])


def check_memory(needed: int, purpose: str) -> None:
    """Raise `ConfigError` naming both sizes if `needed` bytes for `purpose` exceed what is free."""
    free = free_memory()
    if needed > free:
        raise ConfigError(
            f"{purpose} needs {needed / 2**20:,.1f} MiB of shared memory and only "
            f"{free / 2**20:,.1f} MiB are free: lower batch_T or batch_B, or record smaller observations"
        )


def _cgroup_headrooms(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return  # not Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # cgroup v2
            base, limit, usage = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):  # cgroup v1
            base, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        # A limit anywhere above binds too. Inside a container the path may lie outside the mount,
        # and then only the mount's own root can be read.
        for place in [folder, *folder.parents]:
            if place == base.parent:
                break
            headroom = _headroom(place, limit, usage)
            if headroom is not None:
                yield headroom


def _headroom(folder: Path, limit_name: str, usage_name: str) -> int | None:
    try:
        limit = (folder / limit_name).read_text().strip()
        usage = int((folder / usage_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    # File cache counts as usage, but the system frees it when memory is short.
    cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))  # v1 lists subtrees separately
    return max(0, int(limit) - usage + cache)
