"""The example of self-play, shortened; and its ledger."""

import importlib
import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from .. import starter

ROOT = Path(__file__).parent.parent.parent
SHORT = ("--batch-T", 8, "--batch-B", 4, "--iterations", 4, "--new-self-every", 2, "--eval-games", 10, "--goal", 0)
run = partial(starter.run, cwd=ROOT)


@pytest.mark.slow
def test_a_short_run_saves_its_past_selves_and_continues(tmp_path: Path) -> None:
    pytest.importorskip("pettingzoo.classic.connect_four_v3", exc_type=ImportError)
    picture = tmp_path / "elo.png"
    done = run("examples/self_play.py", *SHORT, "--folder", tmp_path, "--picture", picture)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "games against random moves" in done.stdout
    assert picture.stat().st_size > 1000
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["self_0.pt", "self_1.pt", "self_2.pt"]
    done = run("examples/self_play.py", *SHORT, "--folder", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "self_4.pt").exists()
    players = {name for *pair, _ in json.loads((tmp_path / "ledger.json").read_text()) for name in pair}
    assert players <= {"main", *(f"self_{i}" for i in range(5))}


def test_the_ledger_knows_who_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pettingzoo.classic.connect_four_v3", exc_type=ImportError)
    monkeypatch.syspath_prepend(ROOT / "examples")
    module = importlib.import_module("self_play")
    ledger = module.Ledger()
    ledger.wins.update({("a", "b"): 75.0, ("b", "a"): 25.0, ("main", "a"): 50.0, ("a", "main"): 50.0})
    ledger.promote("c")
    assert ledger.wins["c", "a"] == 50
    ratings = ledger.ratings(["b", "a", "c"], "b")
    assert ratings["a"] == pytest.approx(400 * np.log10(3), abs=2)  # that is what Elo says of 3 points to 1
    assert ratings["c"] == pytest.approx(ratings["a"], abs=2)
    chances = module.matchmaking(ledger, "a", ["b", "c"])
    assert chances.sum() == pytest.approx(1)
    assert chances[1] > chances[0], "the one that is harder to beat comes more often"
    del sys.modules["self_play"]
