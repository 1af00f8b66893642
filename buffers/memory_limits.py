"""How much memory this process may still allocate: on the machine, and in every enclosing cgroup."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock import system
from penstock.errors import ConfigError

#: What is smaller is not checked: to read the limits takes longer than to allocate it, up to some milliseconds.
SMALL_BYTES = 2**20

_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path(system.OWN_CGROUPS)


def free_memory() -> int:
    """Bytes that can still be allocated without swapping or being killed by a cgroup's limit."""
    import psutil  # here, because to import it takes 9 ms, and few starts need it

    return min([int(psutil.virtual_memory().available), *cgroup_headrooms()])


BATCH_REMEDY = "free some memory, lower batch_T or batch_B, or record smaller observations"


def check_memory(needed: int, purpose: str, remedy: str = BATCH_REMEDY) -> None:
    """Raise `ConfigError`, with both sizes and the `remedy`, if `needed` bytes for `purpose` are more than the free
    memory."""
    if needed < SMALL_BYTES:
        return
    free = free_memory()
    if needed > free:
        raise ConfigError(
            f"{purpose} needs {size_text(needed)} of memory, but only {size_text(free)} are free: {remedy}"
        )


def size_text(nbytes: int) -> str:
    """A number of bytes for people."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:,.2f} {unit}"
    return f"{nbytes} bytes"


def left_in_cgroups(
    controller: str, v2: tuple[str, str], v1: tuple[str, str], root: Path = _CGROUPS, own: Path = _OWN_CGROUPS
) -> Iterator[tuple[Path, int]]:
    """The folder of each enclosing cgroup that has a limit, innermost first, and the limit less the usage.

    `v2` and `v1` are the names of the files with limit and usage, in both versions of cgroups.
    """
    for place, is_v1 in enclosing_cgroups(controller, root, own):
        limit_name, usage_name = v1 if is_v1 else v2
        try:
            limit, usage = (place / limit_name).read_text().strip(), int((place / usage_name).read_text())
        except (OSError, ValueError):
            continue
        if limit != "max":
            yield place, int(limit) - usage


def enclosing_cgroups(controller: str, root: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> Iterator[tuple[Path, bool]]:
    """The folders of the cgroups around this process that `controller` may limit, innermost first, and whether they are
    of version 1 of cgroups."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return  # not Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        folder = base / path.lstrip("/")
        # In a container the path may not exist under `base`. Then only `base` itself can be read.
        for place in [folder, *folder.parents]:
            if place == base.parent:
                break
            yield place, bool(controllers)


def cgroup_headrooms(*where: Path) -> Iterator[int]:
    """How many bytes each enclosing cgroup with a limit has left."""
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for folder, left in left_in_cgroups("memory", ("memory.max", "memory.current"), v1, *where):
        try:
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        # File cache counts as usage, but the system frees it when memory is short. In v1, inactive_file does not
        # include the groups below.
        cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        yield max(0, left + cache)
