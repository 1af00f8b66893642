"""`penstock doctor`: each finding is said, with what to do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import system
from penstock.__main__ import main
from penstock.errors import PortLeaseError
from penstock.tools import doctor
from penstock.tools.doctor import describe_machine

from ..scale import FULL
from ..starter import run


def of_linux(reason: str, *values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.linux(reason))


def refuse(*_: Any) -> Any:
    raise OSError("not here")


def refuse_folder() -> Any:
    raise PortLeaseError("unsafe permissions")


@pytest.mark.parametrize(
    ("look", "name", "value", "message"),
    [
        ("_torch", "find_spec", lambda _: None, "torch is not installed.*pip install torch"),
        ("_cpus", "usable_cpus", lambda: (3,), "may use 1 of 64 CPUs.*SerialSampler"),
        of_linux(
            "cgroups", "_quota", "cpu_quota", lambda: 0.5, "may use the time of 0.5 CPUs, less than .* a sampler starts"
        ),
        ("_quota", "cpu_quota", lambda: len(doctor.usable_cpus()), "^$"),
        ("_interpreter", "is_free_threaded", lambda: True, "is free-threaded. penstock has not been tried there"),
        ("_interpreter", "is_free_threaded", lambda: False, "^$"),
        ("_memory", "free_memory", lambda: 2**20, "only 1 MiB of memory are free"),
        ("_ports", "lease_port", refuse_folder, "ports cannot be leased.*unsafe permissions"),
        ("_descriptors", "resource.getrlimit", lambda _: (256, 512), "may open 512 files.*hard limit .ulimit -Hn"),
        ("_descriptors", "resource.getrlimit", lambda _: (256, 4096), "^$"),
        ("_descriptors", "resource.getrlimit", lambda _: (256, -1), "^$"),
        ("_load", "os.getloadavg", lambda: (999.0, 0, 0), "999.0 processes ran"),
        of_linux("memfd_create", "_shared_memory", "os.memfd_create", refuse, "temporary file.*not here"),
        of_linux(
            "masks of CPUs", "_pinning", "os.sched_setaffinity", refuse, "cannot be pinned to CPUs here: not here"
        ),
        of_linux("masks of CPUs", "_pinning", "CpuClaims.assign", lambda *_: [()], "other runs have claimed so many"),
        ("_pinning", "usable_cpus", lambda: (), "no worker is pinned to a CPU: this system"),
    ],
)
def test_findings(monkeypatch: pytest.MonkeyPatch, look: str, name: str, value: Any, message: str) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(f"penstock.tools.doctor.{name}", value, raising=False)
    found = " ".join(getattr(doctor, look)())
    assert re.search(message, found), found


@pytest.mark.linux("eventfd")
def test_what_the_system_refuses_is_named_beside_its_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "eventfd", refuse, raising=False)
    assert describe_machine()["wake-ups"] == "pipe (not here)"


def test_on_a_system_other_than_linux_no_finding_names_what_only_linux_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "PORTABLE", True)
    name, value = next(iter(describe_machine().items()))
    assert (name, value.split()[1]) == ("portable", "experimental:")
    advice = " ".join(
        line for look in (doctor._cpus, doctor._quota, doctor._pinning, doctor._shared_memory) for line in look()
    )
    assert advice == "no worker is pinned to a CPU: this system cannot pin a process."


@pytest.mark.parametrize("part", ["native", "spinning", "distributions", "stepping"])
def test_without_a_compiled_part(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    for name in ("native", "spinning", "distributions", "stepping"):
        reason = "no compiler" if name == part else ""
        monkeypatch.setattr(f"penstock.tools.doctor.{name}.WHY_NOT_COMPILED", reason)
    advice = next(line for line in doctor.advice() if "inner loops" in line)  # the rest is not looked for
    assert re.search(r"in Python \(no compiler\)\. Install a C compiler", advice)
    assert describe_machine()["compiled parts"] == "not in use (no compiler)"


def test_a_package_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    def version(name: str) -> str:
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert "torch not installed" in describe_machine()["packages"]


def says(*arguments: str) -> str:
    command = [sys.executable, "-m", "penstock", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.slow
def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("--version", "--help"):
        with pytest.raises(SystemExit, match=r"^0$"):
            main([word])
    text = capsys.readouterr().out
    assert text.split()[:2] == ["penstock", penstock.__version__]
    text += says()
    for word in ("doctor", "machine", "tune", "usable CPUs", "shared memory", "wake-ups", penstock.__version__):
        assert word in text


@pytest.mark.slow
def test_the_doctor_starts_a_sampler_and_finds_it_well(tmp_path: Path, starter: None) -> None:
    if FULL:
        text = says("doctor")
    else:
        done = run(penstock.__main__.__file__, "doctor", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        text = done.stdout
    assert "usable CPUs" in text
    assert "does not run here" not in text
    assert any(line.startswith("- ") for line in text.splitlines())
