"""Learning curves of the examples, each with several seeds.

    python benchmarks/curves.py --picture docs/pictures/learning_curves.svg

Runs each example with its defaults until it reaches its goal, and draws the mean return of its evaluations.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
from report import EVAL_RETURN, GREY, STYLE

matplotlib.use("Agg")  # before pyplot: there may be no screen
from matplotlib import pyplot as plt

EXAMPLES = Path(__file__).parent.parent / "examples"
#: A title, the file, and its options.
RUNS = [
    ("PPO, CartPole", "ppo.py", []),
    ("PPO, Pendulum", "ppo.py", ["--env-id=Pendulum-v1", "--goal=-250", "--discount=0.9", "--gae-lambda=0.95"]),
    (
        "PPO, MuJoCo's InvertedPendulum",
        "ppo.py",
        ["--env-id=InvertedPendulum-v5", "--goal=950", "--discount=0.99", "--gae-lambda=0.95", "--time-limit=300"],
    ),
    ("AsyncSampler, CartPole", "async_ppo.py", []),
    ("A2C, CartPole", "a2c.py", []),
    ("DQN, CartPole", "dqn.py", []),
    ("SAC, Pendulum", "sac.py", []),
]
_LINE = re.compile(r"^([\d,]+) steps, .*: (-?\d+)$", re.MULTILINE)

Curve = list[tuple[float, float]]


def run(file: str, options: list[str], seed: int) -> Curve:
    """Steps and mean returns of the evaluations."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(EXAMPLES / file), "--seed", str(seed), *options]
        progress = Path(out) / "progress.csv"
        if file in ("ppo.py", "async_ppo.py"):
            command += ["--out", out]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1) or "Traceback" in done.stderr:
            raise SystemExit(f"{' '.join(command)} failed: {done.stderr}")
        if not progress.exists():
            return [(float(steps.replace(",", "")), float(mean)) for steps, mean in _LINE.findall(done.stdout)]
        with progress.open(encoding="utf-8") as rows:
            found = [(row["steps"], row["eval_return_mean"]) for row in csv.DictReader(rows)]
        return [(float(steps), float(mean)) for steps, mean in found if mean not in ("", "nan")]


def draw(results: dict[str, list[Curve]], file: Path) -> None:
    plt.rcParams.update(STYLE)
    # One below the other, so that a phone shows them large enough.
    figure, panels = plt.subplots(len(results), figsize=(5, 2.2 * len(results)), squeeze=False, layout="constrained")
    for axes, (title, curves) in zip(panels.flat, results.items(), strict=True):
        for curve in curves:
            axes.plot(*zip(*curve, strict=True), color=EVAL_RETURN, linewidth=1.2, marker="o", markersize=2)
        axes.set_title(f"{title}, {len(curves)} seeds", color=GREY)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k" if x else "0")
        axes.set_xlim(0, None)
        axes.grid()
    figure.savefig(file)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each example")
    parser.add_argument("--only", default="", help="part of a title")
    parser.add_argument("--picture", type=Path, help="draw the curves into this file")
    parser.add_argument("--json", type=Path, help="write all curves to this file")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for title, file, options in RUNS:
        if args.only in title:
            results[title] = [run(file, options, seed) for seed in range(args.seeds)]
            ends = ", ".join(f"{curve[-1][1]:.0f} after {curve[-1][0]:,.0f} steps" for curve in results[title])
            print(f"{title}: {ends}", flush=True)
    if args.picture:
        draw(results, args.picture)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
