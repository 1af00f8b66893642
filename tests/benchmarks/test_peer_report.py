"""The tables and the pictures that `make peers` makes of its figures. Nothing is measured here."""

from __future__ import annotations

import html
import importlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .support import benchmark_modules

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.slow

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
    """Writes the rounds of each work to a file, and reports them: the picture's path."""

    def run(rounds: list[dict[str, Any]], **others: list[dict[str, Any]]) -> Path:
        same = {"seconds": 0.5, "pause": 0.0, "missing": {}}
        results = [{**same, "work": work, "rounds": found} for work, found in {"random": rounds, **others}.items()]
        file, picture = tmp_path / "figures.json", tmp_path / "peers.svg"
        file.write_text(json.dumps({"results": results}), encoding="utf-8")
        importlib.import_module("peers").main(["--report", str(file), "--picture", str(picture)])
        return picture

    with benchmark_modules():
        yield run


def all_bars(picture: Path) -> list[tuple[str, str]]:
    """Each contestant's name and the number at its bar, from the top."""
    texts = re.findall(r'<text[^>]* y="([\d.]+)"[^>]*>([^<]+)<', picture.read_text(encoding="utf-8"))
    above: list[tuple[float, str]] = sorted((float(y), html.unescape(text)) for y, text in texts)
    return [(name, number) for (_, name), (_, number) in zip(above[::2], above[1::2], strict=True)]


def bars(picture: Path) -> dict[str, str]:
    """The bars of a picture of one work."""
    return dict(all_bars(picture))


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
    few = {"penstock ParallelSampler", "a loop in rlpyt's style", "Gymnasium SyncVectorEnv", "SB3 DummyVecEnv"}
    assert list(short.items()) == [(name, number) for name, number in expected.items() if name in few]
    for file, n_own in ((picture, 4), (picture.with_name("peers_short.svg"), 1)):
        assert file.read_text(encoding="utf-8").count(OWN) == n_own, "penstock's bars have a colour of their own"


def test_every_panel_shows_every_contestant(report: Callable[..., Path]) -> None:
    """All works with all contestants; of "short" there are no figures, since nothing could be measured."""
    adapters = importlib.import_module("peer_adapters")
    panels = {}
    for i, work in enumerate(adapters.WORKS):
        names = adapters.contestants_of(work)
        panels[work] = {name: 10_000 * (i + 1) - j for j, name in enumerate(names)}
    assert min(map(len, panels.values())) >= 5
    assert {"TorchRL MultiAsync", "EnvPool, send and recv (its own CartPole)"} <= panels["random"].keys()
    assert {"TorchRL AsyncBatched", "TorchRL AsyncBatched, server process"} <= panels["uneven"].keys()
    assert {"ALE AtariVectorEnv", "ALE AtariVectorEnv, send and recv"} <= panels["pong"].keys()
    panels["short"] = {}
    rounds = {work: [{name: turn(rate) for name, rate in panel.items()}] for work, panel in panels.items()}
    expected = [(name, f"{rate:,}") for panel in panels.values() for name, rate in panel.items()]
    assert all_bars(report(rounds.pop("random"), **rounds)) == expected


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
