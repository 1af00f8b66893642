"""Each of these benchmarks runs, in a tiny configuration, and prints a row for every contestant."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.buffers.native import COMPILED, PYTHON

ROOT = Path(__file__).parent.parent.parent


def run(path: Path, name: str, *options: object) -> tuple[str, Any]:
    line = [sys.executable, f"benchmarks/{name}.py", *map(str, options), "--json", str(path / "out.json")]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((path / "out.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("agent", ["random", "mlp"])
def test_batched(tmp_path: Path, agent: str) -> None:
    options = ["--agents", agent, "--batch-B", 4, 6, "--batch-T", 8, "--seconds", 0.02, "--repeats", 2]
    printed, content = run(tmp_path, "batched", *options)
    assert "times the first" in printed
    rows = {(row["kind"], row["batch_B"]): row for row in content["table"]}
    assert rows.keys() >= {(kind, n) for kind in ("single", "batched") for n in (4, 6)}
    assert rows["single", 4]["times_single"]["median"] == 1
    assert all(len(result["steps_per_s"]) == 2 and min(result["steps_per_s"]) > 0 for result in content["results"])


def test_spaces(tmp_path: Path) -> None:
    options = ["--batch-B", 4, "--batch-T", 8, "--seconds", 0.02, "--repeats", 2]
    printed, content = run(tmp_path, "spaces", *options)
    assert "observations of 288 bytes" in printed
    assert content["figures"].keys() == {"flat", "flat again", "nested, 4 leaves", "nested, 16 leaves"}
    assert all(len(v) == 2 and min(v) > 0 for figures in content["figures"].values() for v in figures.values())


def test_noise(tmp_path: Path) -> None:
    printed, content = run(tmp_path, "noise", "--columns", 2, 3, "--rows", 10, "--repeats", 2)
    assert "ns per environment step" in printed
    assert len(content["results"]) == 3 * 2 * 3
    assert all(len(result["ns"]) == 2 and min(result["ns"]) > 0 for result in content["results"])


@pytest.mark.parametrize("what", ["vector", "uneven", "alternating", "sync"])
def test_central(tmp_path: Path, what: str) -> None:
    options = [what, "--repeats", 2, "--seconds", 0.02, "--batch-T", 8, "--n-envs", 2]
    _, content = run(tmp_path, "central", *options)
    figures = content["results"][what]
    assert {"GpuSampler", "AlternatingSampler", "lock-step", "1 worker"} & figures.keys()
    assert all(len(values) == 2 for values in figures.values())
    assert what == "sync" or all(min(values) > 0 for values in figures.values())


@pytest.mark.parametrize("what", ["cartpole", "pixels", "sleeping"])
def test_vector_env(tmp_path: Path, what: str) -> None:
    options = ["--repeats", 2, "--seconds", 0.01, "--n-envs", 2, "--batch-T", 8]
    printed, content = run(tmp_path, "vector_env", what, *options)
    assert "steps/s" in printed
    assert all(len(values) == 2 and min(values) > 0 for values in content["results"][what].values())


def test_startup(tmp_path: Path) -> None:
    options = ["--workers", 1, "--methods", "forkserver", "--samplers", "GpuSampler, server", "--repeats", 1]
    printed, ((row),) = run(tmp_path, "startup", *options)
    assert "MB a worker" in printed
    (figures,) = row["figures"]
    assert figures.keys() == {"first", "again", "worker", "server"}
    assert min(figures.values()) > 0
    assert figures["worker"] < figures["server"] / 4, "a process with torch takes more than one without"


def test_checks(tmp_path: Path) -> None:
    printed, content = run(tmp_path, "checks", "--n-envs", 2, "--rows", 300, "--repeats", 2)
    assert "ns per environment step" in printed
    assert len(content["ns_per_step"]) == 9
    assert all(len(values) == 2 for values in content["ns_per_step"].values())


@pytest.mark.skipif(not COMPILED, reason="was built without a C compiler")
def test_native(tmp_path: Path) -> None:
    printed, content = run(tmp_path, "native", "--repeats", 3)
    assert "saved" in printed
    assert {"CartPole, random", "CartPole, mlp", "Dict of 16", "pixels"} <= content["results"].keys()
    for figures in content["results"].values():
        assert figures.keys() == {"nothing", *PYTHON, "everything"}
        assert all(len(pairs) == 3 and np.min(pairs) > 0 for pairs in figures.values())
