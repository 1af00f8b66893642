"""The main job, shortened: PPO trains, stops at a goal, and the report reads what it wrote."""

import csv
import importlib
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from .. import starter
from ..scale import scaled

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent


run = partial(starter.run, cwd=ROOT)


def test_a_short_run_learns_and_is_reported(tmp_path: Path) -> None:
    done = run(
        "examples/ppo.py", "--out", tmp_path, "--goal", 60, "--n-workers", 2, *scaled([], ["--eval-max-steps", 3200])
    )
    assert done.returncode == 0, done.stderr
    with (tmp_path / "progress.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    evaluations = [float(row["eval_return_mean"]) for row in rows if row["eval_return_mean"]]
    assert evaluations[0] < 60, "an untrained policy falls at once"
    assert min(evaluations[-2:]) >= 60, "a trained one does not"
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert [worker["steps"] for worker in summary["workers"]] == [int(rows[-1]["steps"]) // 2] * 2
    with np.load(tmp_path / "timeline.npz") as timeline:
        assert timeline["workers"].shape == (2, 2 * 128 + 1)

    for runs in scaled(([tmp_path], [tmp_path] * 2), ([tmp_path] * 2,)):
        done = run("benchmarks/report.py", *runs, "--seconds", 0)
        assert done.returncode == 0, done.stderr
        assert "stepping" in done.stdout
        for picture in ("learning_curve.svg", "timeline.svg"):
            assert "<svg" in (tmp_path / picture).read_text(encoding="utf-8")
            (tmp_path / picture).unlink()


@pytest.mark.parametrize("options", [["--total-steps", "4096"], ["--time-limit", "0.1"]])
def test_a_missed_goal_is_said_and_is_a_failure(tmp_path: Path, options: list[str]) -> None:
    done = run("examples/ppo.py", "--out", tmp_path, *options, *scaled([], ["--eval-max-steps", 800]))
    assert done.returncode == 1
    assert "goal of 475 missed" in done.stderr


@pytest.mark.usefixtures("daily_forks")
def test_the_ceiling_and_the_samplers_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    figures = importlib.import_module("throughput").measure_pair(4, 16, 2, seconds=0.05, repeats=2)
    assert figures.keys() == {"ceiling", "ceiling in step", "ParallelSampler"}
    assert all(len(rates) == 2 and min(rates) > 0 for rates in figures.values())
