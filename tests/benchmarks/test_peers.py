"""The contestants of `peers.py` that step the environments which are ready, and TorchRL's collectors."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .. import starter
from ..scale import scaled

ROOT = Path(__file__).parent.parent.parent
SECONDS = 300  # for a machine that is busy with other work


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield importlib.import_module("peer_adapters")
    for module in set(sys.modules) - before:
        if str(getattr(sys.modules[module], "__file__", "")).startswith(str(ROOT / "benchmarks")):
            del sys.modules[module]


@pytest.mark.parametrize(
    ("work", "name", "library"),
    [
        ("sleeping", "penstock ShmVectorEnv, send and recv", None),
        ("random", "EnvPool, send and recv (its own CartPole)", "envpool"),
        ("central", "EnvPool, send and recv (its own CartPole)", "envpool"),
        ("pong", "EnvPool, send and recv (its own Pong)", "envpool"),
        ("pong", "ALE AtariVectorEnv, send and recv", "ale_py"),
    ],
)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of EnvPool's bounds
def test_what_is_ready_is_stepped_and_recorded(adapters: Any, work: str, name: str, library: str | None) -> None:
    """Each environment has rows of its own: as many as its steps, whichever were ready."""
    if library is not None:
        pytest.importorskip(library)
    sizes = adapters.WORKS[work]
    contestant = adapters.CONTESTANTS[name][0](sizes)
    try:
        steps = sum(contestant.advance() for _ in range(6))
        times = contestant._times
        assert steps == times.sum()
        assert 0 < times.max() < sizes.T
        recorded = np.abs(contestant._observations.astype(np.float64)).reshape(sizes.T, sizes.n_envs, -1).sum(-1) > 0
        if work != "sleeping":  # whose observations are zeros
            assert np.array_equal(recorded, np.arange(sizes.T)[:, np.newaxis] < times)
        if sizes.policy == "mlp":
            assert np.array_equal(contestant._log_probs < 0, recorded), "an action's probability is below 1"
    finally:
        contestant.close()


@pytest.mark.parametrize(
    ("work", "names"),
    [
        ("short", {"TorchRL MultiSync", "TorchRL MultiAsync"}),
        ("uneven", {"TorchRL AsyncBatched", "TorchRL AsyncBatched, server process"}),
        ("uneven", {"Sample Factory"}),
        (
            "pong",
            # Daily, the other two only in `test_what_is_ready_is_stepped_and_recorded`: all load the same games.
            scaled(
                {
                    "ALE AtariVectorEnv",
                    "ALE AtariVectorEnv, send and recv",
                    "penstock ParallelSampler, AtariVectorEnv",
                },
                {"penstock ParallelSampler, AtariVectorEnv"},
            ),
        ),
    ],
    ids=("multi", "batched", "sample-factory", "ale"),
)
@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.usefixtures("starter")
def test_peers_take_turns(tmp_path: Path, work: str, names: set[str]) -> None:
    """Each in a process tree of its own, with `make peers`'s program."""
    if names == {"Sample Factory"}:
        if not Path(sys.prefix, "sample-factory").exists():
            pytest.skip("needs the virtual environment of `make peers`")
    else:
        pytest.importorskip("ale_py" if work == "pong" else "torchrl")
    file = tmp_path / "figures.json"
    options = ["--only", *names, "--repeats", 2, "--seconds", 0.01, "--json", file]
    done = starter.run("benchmarks/peers.py", work, *options, cwd=ROOT, seconds=SECONDS)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(file.read_text(encoding="utf-8"))["results"]
    assert not result["missing"]
    for turns in result["rounds"]:
        assert turns.keys() == names
        assert all(turn["rate"] > 0 and turn["cpu_us"] > 0 for turn in turns.values())
