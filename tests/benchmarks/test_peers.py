"""`peers.py` with few steps: the contestants take turns, and those that step what is ready record it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .. import starter as starters
from ..scale import FULL, scaled
from .support import SECONDS, benchmark_modules

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS)]


@pytest.fixture
def adapters() -> Iterator[Any]:
    with benchmark_modules():
        yield importlib.import_module("peer_adapters")


@pytest.fixture
def peers(starter: None, adapters: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Runs `peers.py`: what it prints, and what it writes. Daily, its contestants are forks of a process that has
    imported torch."""

    if not FULL:
        monkeypatch.setattr(importlib.import_module("peer_process"), "subprocess", starters.FORKING_SUBPROCESS)

    def run(*options: object) -> tuple[str, Any]:
        file, printed = tmp_path / "figures.json", io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
            warnings.simplefilter("ignore")
            importlib.import_module("peers").main([*map(str, options), "--json", str(file)])
        return printed.getvalue(), json.loads(file.read_text(encoding="utf-8"))

    return run


@pytest.mark.parametrize(
    ("work", "name", "library"),
    [
        ("sleeping", "penstock ShmVectorEnv, send and recv", None),
        ("central", "EnvPool, send and recv (its own CartPole)", "envpool"),
        ("pong", "ALE AtariVectorEnv, send and recv", "ale_py"),
        *scaled(
            [
                ("random", "EnvPool, send and recv (its own CartPole)", "envpool"),
                ("pong", "EnvPool, send and recv (its own Pong)", "envpool"),
            ],
            [],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of EnvPool's bounds
def test_what_is_ready_is_stepped_and_recorded(adapters: Any, work: str, name: str, library: str | None) -> None:
    """Each environment has rows of its own: as many as its steps, whichever were ready."""
    if library is not None:
        pytest.importorskip(library)
    sizes = adapters.WORKS[work]
    contestant = adapters.CONTESTANTS[name][0](sizes)
    try:
        steps = sum(contestant.advance() for _ in range(scaled(6, 3)))
        times = contestant.times
        assert steps == times.sum()
        assert 0 < times.max() < sizes.T
        recorded = contestant.observations.reshape(sizes.T, sizes.n_envs, -1).any(-1)
        if work != "sleeping":  # whose observations are zeros
            assert np.array_equal(recorded, np.arange(sizes.T)[:, np.newaxis] < times)
        if sizes.policy == "mlp":
            assert np.array_equal(contestant.log_probs < 0, recorded), "an action's probability is below 1"
    finally:
        contestant.close()


ALE_PEERS = {"ALE AtariVectorEnv", "ALE AtariVectorEnv, send and recv", "penstock ParallelSampler, AtariVectorEnv"}


@pytest.mark.parametrize(
    ("work", "names"),
    [
        ("short", {"TorchRL MultiSync", "TorchRL MultiAsync"}),
        ("uneven", {"TorchRL AsyncBatched", "TorchRL AsyncBatched, server process"}),
        ("uneven", {"Sample Factory"}),
        # Daily, ALE only in `test_what_is_ready_is_stepped_and_recorded`: all load the same games.
        *scaled([("pong", ALE_PEERS)], []),
    ],
    ids=lambda value: value if isinstance(value, str) else min(value),
)
def test_peers_take_turns(peers: Callable[..., Any], work: str, names: set[str]) -> None:
    """Each in a process tree of its own."""
    if names == {"Sample Factory"}:
        if not Path(sys.prefix, "sample-factory").exists():
            pytest.skip("needs the virtual environment of `make peers`")
    else:
        pytest.importorskip("ale_py" if work == "pong" else "torchrl")
    _, content = peers(work, "--only", *names, "--repeats", scaled(2, 1), "--seconds", 0.01)
    (result,) = content["results"]
    assert not result["missing"]
    assert len(result["rounds"]) == scaled(2, 1)
    for turns in result["rounds"]:
        assert turns.keys() == names
        assert all(turn["rate"] > 0 and turn["cpu_us"] > 0 for turn in turns.values())


@pytest.mark.skipif(importlib.util.find_spec("pufferlib") is not None, reason="PufferLib is installed here")
def test_peers(peers: Callable[..., Any], tmp_path: Path) -> None:
    picture = tmp_path / "peers.svg"
    sizes = ["--repeats", 1, "--seconds", 0.02, "--only", "bare", "penstock ParallelSampler", *scaled(["rlpyt"], [])]
    sizes += ["PufferLib", "--picture", picture]
    printed, content = peers("random", *sizes)
    assert "Cores: " in printed
    assert "PufferLib took no part: " in printed, "a missing peer is named with the reason"
    (result,) = content["results"]
    (turns,) = result["rounds"]
    names = {"bare loop, 1 process", "bare loops", "penstock ParallelSampler", *scaled(["a loop in rlpyt's style"], [])}
    assert names <= turns.keys()
    assert all(turn["rate"] > 0 and turn["cpu_us"] > 0 for turn in turns.values())
    assert b"<svg" in picture.read_bytes()
    assert picture.stat().st_size < 60_000


def test_peers_with_a_pause_of_the_learner(peers: Callable[..., Any]) -> None:
    sizes = ["--repeats", 1, "--seconds", 0.02, "--only", "penstock SerialSampler", "bare loops", "--pause", 0.02]
    printed, content = peers("short", *sizes)
    assert "of back to back" in printed
    (result,) = content["results"]
    (turns,) = result["rounds"]
    names = ("penstock SerialSampler", "bare loops")
    assert turns.keys() == {f"{name}{kind}" for name in names for kind in ("", ", sleep", ", work")}
    assert turns["penstock SerialSampler, sleep"]["sleeps"] >= 1000 / (5 * 32), "once a batch, with 1,000 steps"
    assert all(turn["steps"] % (5 * 32) == 0 for turn in turns.values()), "whole batches"
    # A working learner takes more CPU than a batch of so few steps, but its time does not count.
    assert turns["penstock SerialSampler, work"]["cpu_us"] < 0.02 * 1e6 / (5 * 32)
