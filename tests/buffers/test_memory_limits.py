"""How much memory is free: the machine's, and every enclosing cgroup's, read from a tree made for the test."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.buffers import memory_limits
from penstock.buffers.memory_limits import check_memory, free_memory
from penstock.errors import ConfigError

from ..scale import examples
from ..support import leave_memory

MIB = 2**20


class CgroupTree:
    """A made-up /sys/fs/cgroup with a made-up /proc/self/cgroup."""

    def __init__(self, folder: Path, own: str) -> None:
        self.root, self.own = folder / "fs" / "cgroup", folder / "own"
        self.root.mkdir(parents=True)
        self.own.write_text(own)

    def v2(self, path: str, limit: object, usage: int, stat: str = "anon 5\ninactive_file 0\n") -> None:
        self._write(self.root / path.strip("/"), {"memory.max": limit, "memory.current": usage, "memory.stat": stat})

    def v1(self, path: str, limit: object, usage: int, stat: str = "inactive_file 0\ntotal_inactive_file 0\n") -> None:
        files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": usage, "memory.stat": stat}
        self._write(self.root / "memory" / path.strip("/"), files)

    def _write(self, folder: Path, files: dict[str, object]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(f"{content}".rstrip() + "\n")

    def headrooms(self) -> list[int]:
        return list(memory_limits.cgroup_headrooms(self.root, self.own))


@pytest.mark.parametrize(
    ("own", "stat", "headroom"),
    [
        ("3:cpuset:/other\n2:memory:/job\n", "total_inactive_file 0\n", [10]),
        ("2:hugetlb,memory:/job\n", "total_inactive_file 0\n", [10]),  # mounted with another controller
        ("2:memory_but_not_quite,cpu:/job\n", "total_inactive_file 0\n", []),
        # usage_in_bytes includes the groups below, and so does total_inactive_file, but not inactive_file.
        ("2:memory:/job\n", "cache 41\ninactive_file 1\ntotal_inactive_file 40\n", [50]),
    ],
)
def test_v1_headroom_is_the_limit_less_what_is_used_and_no_cache(
    tmp_path: Path, own: str, stat: str, headroom: list[int]
) -> None:
    tree = CgroupTree(tmp_path, own)
    tree.v1("/job", limit=100, usage=90, stat=stat)
    assert tree.headrooms() == headroom


@pytest.mark.parametrize(
    ("own", "group", "limit", "usage", "headroom"),
    [
        ("/job", "/job", 100 * MIB, 30 * MIB, [70 * MIB]),
        ("/job", "/job", "max", 30, []),
        ("/job", "/job", 100, 130, [0]),
        ("/user:1000", "/user:1000", 100, 30, [70]),
        # In a container, whose path lies elsewhere, the root of the mount counts.
        ("/not/mounted/here", "/", 100, 30, [70]),
        ("/../outside", "/", 100, 30, [70]),
        ("/", "/", 100, 30, [70]),
    ],
)
def test_v2_headroom_is_the_limit_less_what_is_used(
    tmp_path: Path, own: str, group: str, limit: object, usage: int, headroom: list[int]
) -> None:
    tree = CgroupTree(tmp_path, f"0::{own}\n")
    tree.v2(group, limit, usage)
    assert tree.headrooms() == headroom


def test_v2_file_cache_is_free_and_nothing_above_the_mount_is_read(tmp_path: Path) -> None:
    tree = CgroupTree(tmp_path, "0::/job\n")
    tree.v2("/job", limit=100, usage=90, stat="anon 50\ninactive_file 40\nactive_file 3\n")
    tree.v2("..", limit=1, usage=0)
    assert tree.headrooms() == [50]


@examples(20, 20)
@given(st.lists(st.one_of(st.just("max"), st.integers(0, 2**40)), min_size=1, max_size=5), st.integers(0, 2**39))
def test_every_enclosing_limit_counts_innermost_first(limits: list[object], usage: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = ["/" + "/".join("abcde"[:depth]) for depth in range(len(limits))]  # "/", "/a", "/a/b", ...
        tree = CgroupTree(Path(folder), f"0::{paths[-1]}\n")
        for path, limit in zip(paths, limits, strict=True):
            tree.v2(path, limit, usage)
        expected = [max(0, limit - usage) for limit in reversed(limits) if isinstance(limit, int)]
        assert tree.headrooms() == expected


@pytest.mark.parametrize("missing", ["memory.max", "memory.current"])
def test_a_group_that_cannot_be_read_does_not_count(tmp_path: Path, missing: str) -> None:
    tree = CgroupTree(tmp_path, "0::/a/job\n")
    tree.v2("/a/job", limit=10, usage=0)
    tree.v2("/a", limit=100, usage=30)
    (tree.root / "a" / "job" / missing).unlink()
    assert tree.headrooms() == [70]
    assert list(memory_limits.cgroup_headrooms(tmp_path, tmp_path / "missing")) == [], "there are no cgroups"


@pytest.mark.parametrize(("available", "headrooms", "free"), [(500, [], 500), (500, [900, 300, 400], 300), (5, [9], 5)])
def test_free_memory_is_the_least_of_machine_and_cgroups(
    monkeypatch: pytest.MonkeyPatch, available: int, headrooms: list[int], free: int
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    monkeypatch.setattr(memory_limits, "cgroup_headrooms", lambda: iter(headrooms))
    assert free_memory() == free


def test_this_machine_has_some_memory_free() -> None:
    assert 0 < free_memory() < 2**50


def test_the_check_passes_up_to_the_last_free_byte_and_for_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_memory(monkeypatch, MIB)
    check_memory(MIB, "a test")
    with pytest.raises(ConfigError):
        check_memory(MIB + 1, "a test")
    leave_memory(monkeypatch, 0)
    check_memory(memory_limits.SMALL_BYTES - 1, "a test")  # so little is not checked


@pytest.mark.parametrize(("needed", "free"), [(1536 * MIB, 20 * MIB), (2 * MIB, 3 * MIB // 2), (12_207_031 * MIB, 0)])
def test_the_error_names_purpose_needed_and_free_size(monkeypatch: pytest.MonkeyPatch, needed: int, free: int) -> None:
    leave_memory(monkeypatch, free)
    with pytest.raises(ConfigError, match=r"^the replay of a test needs .* batch_T or batch_B") as caught:
        check_memory(needed, "the replay of a test")
    found = re.findall(r"([\d.,]+) (bytes|MiB|GiB|TiB)", str(caught.value))
    units = {"bytes": 1, "MiB": MIB, "GiB": 1024 * MIB, "TiB": 1024**2 * MIB}
    assert [float(size) * units[unit] for size, unit in found] == pytest.approx([needed, free], rel=0.001)
