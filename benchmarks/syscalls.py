"""System calls for each row of a batch, counted by strace, which must be installed.

    python benchmarks/syscalls.py --workers 1 2

A row is one time step of all environments. Between two sides that are awake there are none. A process that has waited
for too long sleeps (`poll`), and the other side wakes it (`write`). If there are more processes than CPUs, a process
that spins yields the CPU (`sched_yield`).
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from clocks import processes
from rich.console import Console
from rich.table import Table
from turns import machine
from workloads import ENV, ActorCritic

import penstock
from penstock.vector import ShmVectorEnv


class Sampling:
    """A sampler with the MLP."""

    def __init__(self, name: str, n_workers: int) -> None:
        self._sampler = getattr(penstock, name)(ENV, batch_T=128, batch_B=16 * n_workers, n_workers=n_workers)
        self._sampler.initialize(penstock.CategoricalPgAgent(ActorCritic), seed=0)
        self.close, self._itr = self._sampler.shutdown, 0

    def batch(self) -> None:
        self._sampler.obtain_samples(self._itr)
        self._itr += 1


class Stepping:
    """A vector environment."""

    def __init__(self, n_workers: int) -> None:
        self._envs = ShmVectorEnv([ENV] * 16 * n_workers, n_workers=n_workers)
        self._actions, self.close = np.zeros(16 * n_workers, np.int64), self._envs.close
        self._envs.reset(seed=0)

    def batch(self) -> None:
        for _ in range(128):
            self._envs.step(self._actions)


def count(contestant: Any, batches: int) -> Counter[str]:
    """System calls of this process and its descendants in so many batches."""
    for _ in range(20):
        contestant.batch()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "counts"
        pids = [option for pid in processes() for option in ("-p", str(pid))]
        strace = subprocess.Popen(["strace", "-f", "-c", "-o", str(file), *pids], stderr=subprocess.PIPE, text=True)
        assert strace.stderr is not None
        for _ in pids[::2]:
            if "attached" not in (line := strace.stderr.readline()):
                raise SystemExit(f"strace cannot trace the processes: {line.strip()}")
        for _ in range(batches):
            contestant.batch()
        strace.send_signal(signal.SIGINT)
        strace.communicate()
        lines = re.findall(r"^ *[\d.]+ +[\d.]+ +\d+ +(\d+) +(?:\d+ +)?(\w+)$", file.read_text(), re.MULTILINE)
    return Counter({name: int(number) for number, name in lines if name != "total"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--json", type=Path, help="write machine and all counts to this file")
    args = parser.parse_args()
    table = Table(title="System calls for each row, of all processes together")
    for heading in ("", "workers", "all", "the most frequent ones"):
        table.add_column(heading)
    results = []
    for n in args.workers:
        for name in ("ParallelSampler", "GpuSampler", "ShmVectorEnv"):
            contestant: Any = Stepping(n) if name == "ShmVectorEnv" else Sampling(name, n)
            try:
                found = count(contestant, args.batches)
            finally:
                contestant.close()
            per_row = {call: number / args.batches / 128 for call, number in found.most_common()}
            shown = ", ".join(f"{call} {number:.3f}" for call, number in list(per_row.items())[:4])
            table.add_row(name, str(n), f"{sum(per_row.values()):.3f}", shown)
            results.append({"contestant": name, "workers": n, "per_row": per_row})
    Console(width=120).print(table)
    if args.json:
        args.json.write_text(json.dumps({**machine(), "results": results}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
