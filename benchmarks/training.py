"""Time to a trained agent: whole trainings with PPO in CleanRL's loop, in Stable-Baselines3, and with penstock.

    python benchmarks/training.py --envs cartpole halfcheetah pong --seeds 5 --json training.json

All loops have CleanRL's networks, hyper-parameters and number of steps (`training_loops.py`). For each seed, every
arm trains once, in a process of its own and in random order. The seconds begin before the environments are made, and
end after the last update: they contain the start of the workers. The learner's share is the part of them that passes
between the sampling of one batch and of the next: advantages, epochs, new parameters for the workers. Its bound, 1 /
share, is how much faster the arm could be if sampling took no time. "Of the learner" are its process's CPU seconds in
this part.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from training_loops import ARMS, TASKS, updates_by_name
from turns import CAPTION, cell, machine, ratios

LOOPS = Path(__file__).with_name("training_loops.py")
DEFAULT_ARMS = ["cleanrl", "cleanrl, 1 thread", "sb3", "penstock", "penstock, lag=1"]
#: Environment steps of one training. Pong learns nothing in so few.
STEPS = {"cartpole": 500_000, "halfcheetah": 300_000, "pong": 20_480}
Runs = dict[str, list[dict[str, Any]]]


def train(env: str, arm: str, seed: int, steps: int, limit: float) -> dict[str, Any]:
    """One training in a process of its own. Raises if it fails, or takes more than `limit` seconds."""
    command = [sys.executable, str(LOOPS), env, arm, str(seed), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    if done.returncode:
        raise SystemExit(f"{env}, {arm}, seed {seed} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    returns = found.pop("returns")
    last = statistics.fmean(returns[-100:]) if returns else float("nan")
    return {"seed": seed, **found, "share": found["learning"] / found["seconds"], "return": last}


def show(env: str, steps: int, runs: Runs) -> None:
    first = next(iter(runs))
    caption = "median (middle half of the seeds); returns: mean of the last 100 episodes, mean (smallest to largest)"
    table = Table(title=f"{env}, {steps:,} steps, {len(runs[first])} seeds", caption=caption)
    for heading in (
        "arm",
        "seconds",
        "CPU s",
        "of the learner",
        "return",
        "learner's share",
        "bound",
        f"speed, of {first}",
    ):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for arm, found in runs.items():
        column = {name: [run[name] for run in found] for name in ("seconds", "cpu", "learning_cpu", "share", "return")}
        ends = column["return"]
        table.add_row(
            arm,
            cell(column["seconds"], "{:.1f}"),
            f"{statistics.median(column['cpu']):.1f}",
            f"{statistics.median(column['learning_cpu']):.1f}",
            f"{statistics.fmean(ends):.0f} ({min(ends):.0f} to {max(ends):.0f})",
            f"{statistics.median(column['share']):.2f}",
            f"{1 / statistics.median(column['share']):.2f}",
            cell(ratios([run["seconds"] for run in runs[first]], column["seconds"]), "{:.2f}"),
        )
    Console(width=150).print(table)


def write(file: Path | None, results: dict[str, Any]) -> None:
    if file:
        file.write_text(json.dumps({**machine(), "results": results}, indent=1), encoding="utf-8")


def measure_updates(env: str, rounds: int) -> dict[str, list[float]]:
    """CPU milliseconds of one whole update, in turns on the same batch with one thread of torch."""
    import torch

    torch.set_num_threads(1)
    updates = updates_by_name(env)
    found: dict[str, list[float]] = {name: [] for name in updates}
    for i in range(rounds):
        for name in list(updates) if i % 2 else list(updates)[::-1]:
            began = time.process_time()
            updates[name]()
            found[name].append((time.process_time() - began) * 1000)
    table = Table("", "CPU ms", "of CleanRL's", title=f"one update, {env}", caption=CAPTION)
    for name, values in found.items():
        table.add_row(name, cell(values, "{:.1f}"), cell(ratios(values, found["CleanRL's"]), "{:.2f}"))
    Console(width=100).print(table)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=DEFAULT_ARMS, help="the first one is 1.00")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each arm")
    parser.add_argument("--steps", type=int, help=f"of one training; default: {STEPS}")
    parser.add_argument("--limit", type=float, default=7200, help="seconds that one training may take")
    parser.add_argument("--json", type=Path, help="write all figures to this file, after every round")
    parser.add_argument("--updates", type=int, metavar="ROUNDS", help="only the CPU time of single updates")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for env in args.envs if args.updates else ():
        results[env] = measure_updates(env, args.updates)
    for env in args.envs if not args.updates else ():
        steps, runs = args.steps or STEPS[env], {arm: [] for arm in args.arms}
        for seed in range(1, args.seeds + 1):
            for arm in np.random.default_rng(seed).permutation(args.arms):
                runs[arm].append(train(env, str(arm), seed, steps, args.limit))
            results[env] = {"steps": steps, "runs": runs}
            write(args.json, results)
        show(env, steps, runs)
    write(args.json, results)


if __name__ == "__main__":
    main()
