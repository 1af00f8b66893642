"""The asynchronous example, shortened: it trains, stops at a goal, and the same seed gives the same run."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from .. import starter
from ..scale import scaled

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent


def trained(folder: Path, *options: object) -> tuple[list[dict[str, str]], dict[str, Any]]:
    sizes = ["--n-workers", 2, *scaled([], ["--eval-max-steps", 3200])]
    done = starter.run("examples/async_ppo.py", "--out", folder, *sizes, *options, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    with (folder / "progress.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return rows, json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def test_a_short_run_learns_and_can_be_repeated(tmp_path: Path) -> None:
    first, summary = trained(tmp_path / "first", "--goal", 45)
    again, _ = trained(tmp_path / "again", "--goal", scaled(45, 1), "--n-slots", 4)  # 1: two evaluations
    returns = [[(row["train_return_mean"], row["eval_return_mean"]) for row in rows] for rows in (first, again)]
    assert len(again) == scaled(len(first), 5)
    assert returns[0][: len(again)] == returns[1]
    evaluations = [float(row["eval_return_mean"]) for row in first if row["eval_return_mean"]]
    assert evaluations[0] < 45 <= min(evaluations[-2:])
    assert summary["lag"]["max"] == 1
