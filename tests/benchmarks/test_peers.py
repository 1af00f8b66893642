"""`peers.py` with few steps: the contestants take turns, and those that step what is ready record it. And its report:
the tables and pictures that it makes of figures."""

from __future__ import annotations

import contextlib
import html
import importlib
import importlib.util
import io
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
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
    sizes = adapters.WORKS[work] if FULL else replace(adapters.WORKS[work], n_envs=8)
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
        ("random", {"PufferLib"}),
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
        libraries = {"pong": "ale_py", "random": "pufferlib"}
        pytest.importorskip(libraries.get(work, "torchrl"))
    printed, content = peers(work, "--only", *names, "--repeats", scaled(2, 1), "--seconds", 0.01)
    (result,) = content["results"]
    assert not result["missing"]
    assert len(result["rounds"]) == scaled(2, 1)
    for turns in result["rounds"]:
        assert turns.keys() == names
        assert all(turn["rate"] > 0 and turn["cpu_us"] > 0 for turn in turns.values())
    for name, version in content["libraries"].items():
        assert f"| {name} | {version} |" in printed
    assert ("pufferlib-core" in content["libraries"]) is (importlib.util.find_spec("pufferlib") is not None)


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


# ---- the report, for which nothing is measured ---------------------------------------------------


OWN = "#0f9d8c"

#: Steps per second in undisturbed rounds.
RATES = {
    "bare loops": 1000,
    "penstock ParallelSampler, BatchedCartPole": 1500,
    "penstock ParallelSampler": 950,
    "EnvPool (its own CartPole in C++)": 900,
    "a loop in rlpyt's style": 800,
    "penstock ShmVectorEnv": 700,
    "bare loop, 1 process": 500,
    "penstock SerialSampler": 480,
    "Gymnasium SyncVectorEnv": 400,
    "SB3 DummyVecEnv": 300,
    "tianshou DummyVectorEnv": 250,
    "SB3 SubprocVecEnv": 60,
    "Gymnasium AsyncVectorEnv": 50,
    "tianshou ShmemVectorEnv": 40,
    "TorchRL MultiSync": 30,
}


def turn(rate: float, *, disturbed: bool = False) -> dict[str, float]:
    slower = rate / 2 if disturbed else rate
    others = 9.0 if disturbed else 0.0
    return {"rate": slower, "in_step": slower, "cpu_us": 1e6 / slower, "steal": 0.0, "others": others}


@pytest.fixture
def report(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Writes the rounds of a work to a file, and reports them: the picture's path."""
    pytest.importorskip("matplotlib")

    def run(rounds: list[dict[str, Any]]) -> Path:
        results = [{"seconds": 0.5, "pause": 0.0, "missing": {}, "work": "random", "rounds": rounds}]
        file, picture = tmp_path / "figures.json", tmp_path / "peers.svg"
        file.write_text(json.dumps({"results": results}), encoding="utf-8")
        importlib.import_module("peers").main(["--report", str(file), "--picture", str(picture)])
        return picture

    with benchmark_modules():
        yield run


def bars(picture: Path) -> dict[str, str]:
    """Each contestant's name and the number at its bar, from the top."""
    texts = re.findall(r'<text[^>]* y="([\d.]+)"[^>]*>([^<]+)<', picture.read_text(encoding="utf-8"))
    above: list[tuple[float, str]] = sorted((float(y), html.unescape(text)) for y, text in texts)
    return {name: number for (_, name), (_, number) in zip(above[::2], above[1::2], strict=True)}


def rows(printed: str) -> dict[str, list[str]]:
    """The cells of each contestant's row in the first table."""
    table = printed.partition("| work |")[0]
    found = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {name: cells for name, *cells in found[2:]}


def test_pictures_show_every_contestant_in_steps_per_second(report: Callable[..., Path]) -> None:
    picture = report([{name: turn(rate) for name, rate in RATES.items()}] * 3)
    expected = {name: f"{rate:,}" for name, rate in sorted(RATES.items(), key=lambda item: -item[1])}
    assert list(bars(picture).items()) == list(expected.items()), "the fastest is at the top, the slowest is there too"
    short = bars(picture.with_name("peers_short.svg"))
    peers = {
        "a loop in rlpyt's style",
        "EnvPool (its own CartPole in C++)",
        "Gymnasium SyncVectorEnv",
        "SB3 DummyVecEnv",
    }
    few = {"penstock ParallelSampler", *peers}
    assert list(short.items()) == [(name, number) for name, number in expected.items() if name in few]
    for file, n_own in ((picture, 4), (picture.with_name("peers_short.svg"), 1)):
        assert file.read_text(encoding="utf-8").count(OWN) == n_own, "penstock's bars have a colour of their own"


def test_the_table_has_the_figures_of_the_picture(
    report: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Both are of the undisturbed rounds, if there are at least three."""
    calm = {name: turn(rate) for name, rate in RATES.items()}
    noisy = {name: turn(rate, disturbed=name != "a loop in rlpyt's style") for name, rate in RATES.items()}
    picture = report([calm] * 3 + [noisy] * 5)
    table = rows(capsys.readouterr().out)
    assert {name: cells[0].split(" (")[0] for name, cells in table.items()} == bars(picture)
    assert list(table) == list(bars(picture)), "the table has the same order"
    assert table["penstock SerialSampler"] == ["480 (480 to 480)", "0.48", f"{1e6 / 480:.1f}", "3/8"]
    assert table["a loop in rlpyt's style"][-1] == "8/8"
    report([calm] * 2 + [noisy] * 5)
    assert rows(capsys.readouterr().out)["penstock SerialSampler"][::3] == ["240 (240 to 360)", "2/7"]
