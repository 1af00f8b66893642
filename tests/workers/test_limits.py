"""Limits of the machine: what is missing is named before anything starts, and a quota of CPUs limits the workers."""

import math
import os
import resource
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.workers import affinity, launcher
from penstock.workers.affinity import cpu_quota, cpus_to_fill
from penstock.workers.launcher import check_limits

from ..children import exit_code_of_fork


def test_an_unlimited_number_of_descriptors_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    check_limits(3)


def test_the_soft_limit_of_descriptors_is_raised_as_far_as_it_must() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
        check_limits(30)
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert 100 < raised[0] < hard
        assert raised[1] == hard
        check_limits(3)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == raised
        with pytest.raises(
            ConfigError, match=r"workers need about \d+ file descriptors and this process may open only"
        ):
            check_limits(hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("refuses", [False, True])
def test_no_hard_limit_of_descriptors(monkeypatch: pytest.MonkeyPatch, refuses: bool) -> None:
    """As on macOS, which refuses to set none as the soft limit."""
    limits = [256, resource.RLIM_INFINITY]

    def set_limits(kind: int, values: tuple[int, int]) -> None:
        if refuses or values[0] == resource.RLIM_INFINITY:
            raise ValueError("current limit exceeds maximum limit")
        limits[:] = values

    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    if refuses:
        with pytest.raises(ConfigError, match="file descriptors and this process may open only"):
            check_limits(1000)
    else:
        check_limits(1000)
        assert limits == [pytest.approx(9000, rel=0.5), resource.RLIM_INFINITY]


def cgroup(folder: Path, maximum: str, current: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pids.max").write_text(maximum)
    (folder / "pids.current").write_text(str(current))


def test_every_enclosing_cgroup_counts(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("0::/outer/inner\n")
    cgroup(root / "outer" / "inner", "max", 3)
    cgroup(root / "outer", "40\n", 30)
    assert list(launcher.processes_left(root, own)) == [10]


def test_the_older_hierarchy_is_understood_too(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("12:memory:/x\n11:pids:/job\n")
    cgroup(root / "pids" / "job", "64\n", 60)
    assert list(launcher.processes_left(root, own)) == [4]


def test_too_few_processes_are_an_error_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "processes_left", lambda: [500, 4])
    with pytest.raises(
        ConfigError, match=r"3 workers need 6 processes and only 4 more are allowed here: lower n_workers"
    ):
        check_limits(3)


# ---- the CPU quota of a container ----------------------------------------------------------

V2 = "0::/job/inner\n"
V1 = "4:memory:/job\n3:cpu,cpuacct:/job/inner\n"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        (V2, {"job/inner/cpu.max": "250000 100000"}, 2.5),
        (V2, {"job/inner/cpu.max": "max 100000", "job/cpu.max": "50000 100000"}, 0.5),
        (V2, {"job/inner/cpu.max": "300000 100000", "cpu.max": "200000 100000"}, 2.0),
        (V2, {"job/inner/cpu.max": "max 100000"}, math.inf),
        (V2, {"job/inner/cpu.max": "what"}, math.inf),
        (V2, {}, math.inf),
        (V1, {"cpu/job/inner/cpu.cfs_quota_us": "150000", "cpu/job/inner/cpu.cfs_period_us": "100000"}, 1.5),
        (V1, {"cpu/job/inner/cpu.cfs_quota_us": "-1", "cpu/job/inner/cpu.cfs_period_us": "100000"}, math.inf),
    ],
)
def test_the_smallest_quota_counts(own: str, files: dict[str, str], expected: float, tmp_path: Path) -> None:
    root, own_cgroups = tmp_path / "cgroup", tmp_path / "own"
    own_cgroups.write_text(own)
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    assert cpu_quota(root, own_cgroups) == expected


@pytest.mark.parametrize(("quota", "n"), [(math.inf, 4), (9.0, 4), (2.5, 2), (0.3, 1)])
def test_as_many_processes_as_cpus_and_quota_allow(quota: float, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "cpu_quota", lambda: quota)
    assert cpus_to_fill(range(4)) == n
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert cpus_to_fill(()) == n  # a system without a mask


CGROUP = Path("/sys/fs/cgroup/cpu")


@pytest.mark.linux("cgroups")
@pytest.mark.skipif(not os.access(CGROUP / "tasks", os.W_OK), reason="needs root and version 1 of cgroups")
def test_a_real_quota() -> None:
    folder = CGROUP / f"penstock-test-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "cpu.cfs_quota_us").write_text("150000")

        def in_fork() -> None:
            (folder / "tasks").write_text(str(os.getpid()))
            assert cpu_quota() == 1.5

        assert exit_code_of_fork(in_fork) == 0
    finally:
        folder.rmdir()
