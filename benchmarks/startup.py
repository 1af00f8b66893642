"""Start-up: seconds until all workers are ready, and memory, for each sampler, start method and number of workers.

"first" is the first sampler of a process. It also starts the supervisor, which imports torch if the workers act.
"again" is a second sampler in the same process. Memory is the unique set size after one batch: of the
average worker, and of the inference server if it is a process. Every figure is taken in a new process.

    python benchmarks/startup.py --workers 2 8
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

_PROGRAM = """
import json, sys, time
import gymnasium as gym
import psutil
import torch
from torch import nn
import penstock

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy, self.value = nn.Linear(4, 2), nn.Linear(4, 1)
    def forward(self, observation):
        return self.policy(observation), self.value(observation)

cls, method, n_workers = getattr(penstock, sys.argv[1]), sys.argv[2], int(sys.argv[3])
kwargs = json.loads(sys.argv[4])
seconds = []
for _ in range(2):
    size = {"batch_T": 8, "batch_B": n_workers, "n_workers": n_workers}
    with cls("CartPole-v1", start_method=method, **size, **kwargs) as sampler:
        began = time.monotonic()
        sampler.initialize(penstock.CategoricalPgAgent(Model), seed=0)
        seconds.append(time.monotonic() - began)
        sampler.obtain_samples(0)
        memory = [psutil.Process(pid).memory_full_info().uss / 2**20 for pid in sampler.worker_pids]
print(json.dumps({"seconds": seconds, "memory": memory}))
"""

SAMPLERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ParallelSampler": ("ParallelSampler", {}),
    "GpuSampler": ("GpuSampler", {}),
    "GpuSampler, server": ("GpuSampler", {"server": "process"}),
}


def measure(sampler: str, method: str, n_workers: int) -> dict[str, float]:
    """Seconds of the first and of the second `initialize` in a fresh process, and MB of a worker and of the server."""
    cls, kwargs = SAMPLERS[sampler]
    command = [sys.executable, "-c", _PROGRAM, cls, method, str(n_workers), json.dumps(kwargs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"{sampler}, {method}, {n_workers} workers:\n{done.stderr}")
    found = json.loads(done.stdout)
    workers, server = found["memory"][:n_workers], found["memory"][n_workers:]
    figures = {"first": found["seconds"][0], "again": found["seconds"][1], "worker": statistics.mean(workers)}
    return {**figures, "server": server[0]} if server else figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--methods", nargs="+", default=["forkserver", "fork", "spawn"])
    parser.add_argument("--samplers", nargs="+", default=list(SAMPLERS), choices=list(SAMPLERS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="write all figures to this file")
    args = parser.parse_args(arguments)

    table = Table(title="until all workers are ready", caption="median (minimum to maximum)")
    headings = ("sampler", "start method", "workers", "first, s", "again, s", "MB a worker", "MB the server")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i < 2 else "right")
    cases = [(sampler, method, n) for method in args.methods for n in args.workers for sampler in args.samplers]
    figures: dict[tuple[str, str, int], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(args.repeats):
        for case in cases:
            figures[case].append(measure(*case))
    for (sampler, method, n), found in figures.items():
        cells = [
            _spread([one[key] for one in found if key in one], form)
            for key, form in (("first", ".2f"), ("again", ".2f"), ("worker", ".1f"), ("server", ".1f"))
        ]
        table.add_row(sampler, method, str(n), *cells)
    Console(width=130).print(table)
    if args.json:
        content = [{"sampler": s, "method": m, "workers": n, "figures": f} for (s, m, n), f in figures.items()]
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


if __name__ == "__main__":
    main()
