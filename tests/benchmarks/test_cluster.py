"""The benchmark of many machines runs with few steps, on a Ray of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from .support import ROOT

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    # Not imported here: Ray reads variables when it is imported, which distributed/conftest.py sets.
    pytest.mark.skipif(find_spec("ray") is None, reason='ray is not installed: pip install ".[cluster]"'),
    pytest.mark.skipif(find_spec("rich") is None, reason="the benchmarks need rich"),
    pytest.mark.slow,
]


def test_cluster(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    options = ["speed", "slow", "puts", "memory", "--simulate", 1000, "--repeats", 2, "--seconds", 0.1, "--batches", 20]
    command = [sys.executable, "benchmarks/cluster.py", *map(str, options), "--json", str(file)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environ["RAY_object_store_memory"] = str(100 * 2**20)
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ, timeout=280)
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    assert {"inside", "one at a time", "pieces"} <= results["speed"].keys()
    assert results["slow"].keys() == {"3 shards", "4 shards", "4 shards, one slow, min_ready=3"}
    for part in ("speed", "slow"):
        for turns in results[part].values():
            assert all(min(turn.values()) > 0 for turn in turns)
    assert [row["puts"] for row in results["puts"]] == [row["versions"] for row in results["puts"]]
    assert {len(values) for values in results["memory"].values()} == {11}
    shares = {int(n): row for n, row in results["model"]["share"].items()}
    assert sorted(shares) == [10, 100, 300, 1000]
    assert shares[1000]["0.95"] > shares[1000]["1.0"]
    found = results["model"]["bytes"]
    assert found["images"]["1000"] < 0.2 < 0.6 < found["CartPole"]["1000"], "the bytes are the limit of one driver"
    assert found["images"]["10"] > 0.7
    assert 10 < found["learners"]["1000"] < 100, "of the plan that keeps 0.7 of the ideal rate"
