"""The CPU quota of a container limits how many workers a sampler starts by default."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from penstock.workers import affinity
from penstock.workers.affinity import cpu_quota, cpus_to_fill

from ..children import exit_code_of_fork

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
    assert cpus_to_fill(()) == 1


CGROUP = Path("/sys/fs/cgroup/cpu")


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
