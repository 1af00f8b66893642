"""What traces cost: the rings in each batch, in nanoseconds, and a file of 100,000 events, in seconds of CPU time.

python benchmarks/traces.py
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from turns import machine

from penstock.workers import tracing
from penstock.workers.control import ASKED, DONE, Command, ControlBlock, Phase, Progress
from penstock.workers.plan import WorkerPlan

T, N_WORKERS, N_BATCHES = 128, 13, 31  # 31 batches have rows: 100,000 events


def best(work: Callable[[], object], n: int = 200, rounds: int = 50) -> float:
    """Nanoseconds of a call, in the fastest round."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter_ns()
        for _ in range(n):
            work()
        times.append((time.perf_counter_ns() - began) / n)
    return min(times)


def run_command(progress: Progress) -> None:
    """A batch whose rows do nothing."""
    progress.begin_record(progress.enter(Phase.WAITING), time.monotonic_ns())
    progress.begin()
    for t in range(T):
        progress.begin_acting(t)
        progress.begin_stepping(t)
    progress.end_batch(T, T, time.monotonic_ns())
    progress.enter(Phase.WAITING)
    progress.arrived += 1


def costs() -> dict[str, float]:
    """What each part takes in one batch, in nanoseconds."""
    block = ControlBlock(1, T, shared=True)
    progress = block.progress(0)

    def arrive() -> None:
        progress.arrived += 1

    return {
        "worker: begin and end a record": best(lambda: progress.begin_record(0, 1)) + best(arrive),
        "main process: note an opening": best(lambda: block.note_opening(Command(), 1, 1)),
        "main process: note a wait": best(lambda: block.note_wait(2, ASKED)) + best(lambda: block.note_wait(2, DONE)),
        "inference server: note a step": best(lambda: block.note_served(1, 2, 32, 1)),
    }


def write() -> dict[str, float]:
    """The CPU time of a trace with as many batches with rows as are kept."""
    block = ControlBlock(N_WORKERS, T, shared=True)
    plans = [WorkerPlan(worker_rank=rank, env_ranks=range(rank, rank + 1)) for rank in range(N_WORKERS)]
    rows = [block.progress(rank) for rank in range(N_WORKERS)]
    for itr in range(N_BATCHES + 1):
        block.open(Command(itr), range(N_WORKERS))
        for row in rows:
            run_command(row)
        block.note_wait(block.n_openings, DONE)
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        path = tracing.write(
            Path(folder) / "x.json", [tracing.read(block.memory.arrays, tracing.describe("", T, plans))]
        )
        seconds = time.process_time() - began
        n_events = len(json.loads(path.read_text())["traceEvents"])
        return {"events": n_events, "seconds of CPU time": seconds, "MiB": path.stat().st_size / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"machine": machine(), "ns": costs(), "file": write()}
    table = Table(title="traces", title_justify="left")
    table.add_column("what")
    table.add_column("figure", justify="right")
    for what, figure in figures["ns"].items():
        table.add_row(what, f"{figure:,.0f} ns")
    for what, figure in figures["file"].items():
        table.add_row(f"file: {what}", f"{figure:,.2f}")
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
