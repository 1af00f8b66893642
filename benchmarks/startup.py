"""Start-up: seconds from `initialize` to ready, for each start method and number of workers.

The first sampler of a process also starts the fork server, which imports torch once; "first" is that,
"again" a second sampler in the same process. Every figure is taken in a process of its own.

    python benchmarks/startup.py --workers 2 8
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

_PROGRAM = """
import json, sys, time
import gymnasium as gym
import torch
from torch import nn
from penstock import CategoricalPgAgent, ParallelSampler

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy, self.value = nn.Linear(4, 2), nn.Linear(4, 1)
    def forward(self, observation):
        return self.policy(observation), self.value(observation)

method, n_workers = sys.argv[1], int(sys.argv[2])
seconds = []
for _ in range(2):
    size = {"batch_T": 8, "batch_B": n_workers, "n_workers": n_workers}
    with ParallelSampler("CartPole-v1", start_method=method, **size) as sampler:
        began = time.monotonic()
        sampler.initialize(CategoricalPgAgent(Model), seed=0)
        seconds.append(time.monotonic() - began)
print(json.dumps(seconds))
"""


def measure(method: str, n_workers: int) -> tuple[float, float]:
    """Seconds of the first and of the second `initialize` in a fresh process."""
    command = [sys.executable, "-c", _PROGRAM, method, str(n_workers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    first, again = json.loads(done.stdout)
    return first, again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--methods", nargs="+", default=["forkserver", "fork", "spawn"])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    table = Table(title="seconds until all workers are ready", caption="median (minimum to maximum)")
    for heading in ("start method", "workers", "first", "again"):
        table.add_column(heading, justify="left" if heading == "start method" else "right")
    cases = [(method, n) for method in args.methods for n in args.workers]
    figures: dict[tuple[str, int], list[tuple[float, float]]] = {case: [] for case in cases}
    for _ in range(args.repeats):
        for case in cases:
            figures[case].append(measure(*case))
    for (method, n), pairs in figures.items():
        first, again = zip(*pairs, strict=True)
        table.add_row(method, str(n), _spread(first), _spread(again))
    Console(width=100).print(table)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
