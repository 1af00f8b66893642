"""How much faster is a small policy with inference="traced" and inference="numpy"?

CartPole-v1 with the 64-64 MLP. Each contestant is a separate process tree, and they take short turns in one run, in
random order. "One row" is `agent.step` alone, for 16 environments. The "ceiling in step" is that of `throughput.py`:
bare loops with torch's agent, one process per worker, where each process counts at the speed of the slowest.

`--before FOLDER` adds an earlier version of penstock, installed as the docstring of `compare.py` shows:

    python benchmarks/inference.py --before /tmp/old --json inference.json
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from clocks import cpu_clocks, used
from compare import Turn, Version, cost
from rich.console import Console
from rich.table import Table
from throughput import Ceiling, Setting
from turns import CAPTION, cell, machine, ratios

import penstock

ROW = "one row of 16"
CEILING = "ceiling in step"
SUBJECTS = {ROW: "one row of 16, mlp", "ParallelSampler": "ParallelSampler, mlp, T=128", "GpuSampler": "GpuSampler"}


class Contestant(Protocol):
    """Takes turns."""

    def turn(self, seconds: float) -> Turn: ...
    def close(self) -> None: ...


class BareLoops:
    """The ceiling. Its turn counts the steps of the slowest process for each process; the CPU time is of all steps."""

    def __init__(self) -> None:
        self._ceiling = Ceiling(Setting("mlp"))
        self._pids = [process.pid for process in self._ceiling._processes if process.pid is not None]

    def turn(self, seconds: float) -> Turn:
        before, began = cpu_clocks(self._pids), time.perf_counter()
        rate = self._ceiling.run(seconds)
        wall = time.perf_counter() - began
        in_step = self._ceiling.in_step
        return {"count": in_step * wall, "wall": wall, "cpu": used(before, cpu_clocks(self._pids)) * in_step / rate}

    def close(self) -> None:
        self._ceiling.close()


def contestants(subject: str, before: Path | None) -> dict[str, Contestant]:
    """All that measure `subject`, by name."""
    here = Path(penstock.__file__).absolute().parents[1]
    case, name = SUBJECTS[subject], "one row of 16, mlp" if subject == ROW else f"{subject}, mlp"
    found: dict[str, Contestant] = {} if before is None else {"before": Version(before, case)}
    found['"torch"'] = Version(here, case)
    for inference in ("traced", "numpy"):
        found[f'"{inference}"'] = Version(here, f'{name}, inference="{inference}"')
    if subject == "ParallelSampler":
        found[CEILING] = BareLoops()
    return found


def measure(subject: str, before: Path | None, repeats: int, seconds: float) -> dict[str, list[Turn]]:
    """`repeats` turns of each contestant."""
    found = contestants(subject, before)
    try:
        for name, contestant in found.items():
            missing = getattr(contestant, "missing", None)
            if missing is not None:
                raise SystemExit(f"{name} cannot measure {subject}: {missing}")
            contestant.turn(seconds)  # warm-up
        turns: dict[str, list[Turn]] = {name: [] for name in found}
        for _ in range(repeats):
            for name in random.sample(list(found), len(found)):
                turns[name].append(found[name].turn(seconds))
        return turns
    finally:
        for contestant in found.values():
            contestant.close()


def add_rows(table: Table, subject: str, turns: Mapping[str, list[Turn]]) -> None:
    """One row for each contestant."""
    rates = {name: [turn["count"] / turn["wall"] for turn in found] for name, found in turns.items()}
    for name, found in turns.items():
        cells = [cell(rates[name], "{:,.0f}"), cell([cost(turn, "cpu") * 1e6 for turn in found], "{:.2f}")]
        for other in ("before", CEILING):
            cells.append(cell(ratios(rates[name], rates[other]), "{:.2f}") if other in rates else "")
        table.add_row(subject, name, *cells)
        print(subject, name, *cells, sep=" | ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="folder with an earlier version of penstock")
    parser.add_argument("--subjects", nargs="+", default=list(SUBJECTS), choices=list(SUBJECTS))
    parser.add_argument("--repeats", type=int, default=24, help="turns of each contestant")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each turn, at least")
    parser.add_argument("--json", help="write the machine and all turns to this file")
    args = parser.parse_args()
    table = Table(title='Small policies: steps/s; for "one row", rows/s', caption=CAPTION)
    for heading in ("", "inference", "steps/s", "CPU µs a step", "of before", f"of the {CEILING}"):
        table.add_column(heading, justify="left" if heading in ("", "inference") else "right")
    results: dict[str, Any] = {}
    for subject in args.subjects:
        before = None if args.before is None else args.before.resolve()
        results[subject] = measure(subject, before, args.repeats, args.seconds)
        add_rows(table, subject, results[subject])
    Console(width=160).print(table)
    if args.json:
        Path(args.json).write_text(json.dumps({**machine(), "results": results}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
