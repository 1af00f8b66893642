"""What is missing is named before anything starts."""

import os
import resource
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.workers import launcher
from penstock.workers.launcher import check_limits


def test_what_fits_passes() -> None:
    check_limits(2)


def test_too_few_descriptors_are_an_error_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    used = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used + 50, used + 50))
    with pytest.raises(ConfigError, match=r"100 workers need about 732 file descriptors .* only \d\d more: .*ulimit"):
        check_limits(100)


def test_an_unlimited_number_of_descriptors_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    check_limits(3)


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
