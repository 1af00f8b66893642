"""How samplers and vector environments scale: from one worker to all CPUs, and from 16 sleeping workers to 512.

    python benchmarks/scale.py --json scale.json --picture docs/scale.svg      # measure
    python benchmarks/scale.py --report scale.json --picture docs/scale.svg    # the table and the picture again

*Computing* environments (Acrobot-v1, eight for each worker) need a CPU: 1, 2, 4 ... workers, up to all CPUs. *Sleeping*
ones, one for each worker, wait 10 ms in each step, as one does that asks a program on another machine. So many more
workers than CPUs are useful. All actions are random.

Each contestant takes turns with bare loops, which have as many processes, step the same environments, and record
nothing. The table divides their speeds in the same round: a batch waits for its slowest worker, so each process of the
bare loops counts at the speed of the slowest. It also has the CPU time of a step, the seconds until all workers were
ready, and the memory that each worker has for itself (unique set size).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
from environments import SleepingEnv
from peer_adapters import ALL, CONTESTANTS, Work
from peer_process import Contestant, serve
from peer_report import OTHER, OWN
from turns import cell, machine, spread

from penstock.workers.affinity import usable_cpus

PENSTOCK = ["penstock ParallelSampler", "penstock GpuSampler", "penstock ShmVectorEnv"]
NAMES = [*PENSTOCK, "Gymnasium AsyncVectorEnv"]
SLEEP_SECONDS = 0.01

Point = dict[str, Any]  #: what was measured of one contestant with one number of workers


def computing(n_workers: int) -> Work:
    return Work(f"computing {n_workers}", partial(gym.make, "Acrobot-v1"), 8 * n_workers, 32, n_workers=n_workers)


def sleeping(n_workers: int) -> Work:
    """The environments do not compute, so few rows are enough."""
    make = partial(SleepingEnv, SLEEP_SECONDS)
    return Work(f"sleeping {n_workers}", make, n_workers, 16, n_workers=n_workers)


class Works(dict[str, Work]):
    """The works by name, such as "computing 8"."""

    def __missing__(self, name: str) -> Work:
        kind, n_workers = name.split()
        return {"computing": computing, "sleeping": sleeping}[kind](int(n_workers))


WORKS = Works()
__all__ = ["CONTESTANTS", "WORKS"]  # `serve` looks for them here


def up_to(most: int) -> list[int]:
    """1, 2, 4 ... and `most`."""
    return [*(2**i for i in range(most.bit_length()) if 2**i < most), most]


def measure(kind: str, n_workers: int, name: str, args: argparse.Namespace) -> Point:
    """The rounds of one contestant and of the bare loops beside it."""
    work = f"{kind} {n_workers}"
    with ExitStack() as stack:
        pair = [Contestant(work, each, args.limit, False, script=__file__) for each in (name, ALL)]
        for each in pair:
            stack.enter_context(closing(each))
        contestant, bare = pair
        point: Point = {"kind": kind, "workers": n_workers, "name": name, "missing": contestant.missing or bare.missing}
        if point["missing"] is None:
            point |= {"ready": contestant.start_seconds, "memory": contestant.memory(), "rounds": []}
        while point["missing"] is None and len(point["rounds"]) < args.repeats:
            turns = [each.turn(seconds=args.seconds, pause=0.0, kind="sleep") for each in pair]
            point["missing"] = contestant.missing or bare.missing
            if point["missing"] is None:
                point["rounds"].append(turns)
    return point


def shares(point: Point) -> list[float]:
    """The speed of the contestant, divided by that of the bare loops in step, in each round."""
    return [own["rate"] / bare["in_step"] for own, bare in point["rounds"]]


def table(points: Sequence[Point]) -> str:
    """Markdown, a line for each point."""
    headings = "environments, workers, contestant, of the bare loops, CPU µs a step, seconds to start, MB a worker"
    lines = [f"| {headings.replace(', ', ' | ')} |", "| --- | ---: | --- | ---: | ---: | ---: | ---: |"]
    for point in points:
        cells = [point["kind"], str(point["workers"]), point["name"]]
        if point["missing"] is None:
            cells += [cell(shares(point), "{:.2f}"), cell([own["cpu_us"] for own, _ in point["rounds"]], "{:.1f}")]
            cells += [f"{point['ready']:.2f}", f"{point['memory']:.1f}"]
        else:
            cells += [f"took no part: {point['missing'].splitlines()[0][:100]}", "", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(points: Sequence[Point], file: Path) -> None:
    """A panel for each kind of environments: the share of the bare loops over the number of workers."""
    import matplotlib
    from report import GREY, STYLE

    matplotlib.use("Agg")  # before pyplot: there may be no screen
    import matplotlib.pyplot as plt

    plt.rcParams.update(STYLE)
    kinds = sorted({point["kind"] for point in points})
    figure, panels = plt.subplots(len(kinds), figsize=(5, 3 * len(kinds) + 1), squeeze=False, layout="constrained")
    for axes, kind in zip(panels.flat, kinds, strict=True):
        for name, style in zip(NAMES, ("-", "--", ":", "-"), strict=True):
            own = [each for each in points if (each["kind"], each["name"]) == (kind, name) and each["missing"] is None]
            middle = [spread(shares(each))["median"] for each in own]
            colour = OWN if name in PENSTOCK else OTHER
            axes.plot(
                [each["workers"] for each in own], middle, style, color=colour, marker="o", markersize=3, label=name
            )
        ticks = sorted({each["workers"] for each in points if each["kind"] == kind})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(n) for n in ticks])
        axes.set_ylim(0, 1.1)
        axes.set_title(f"{kind} environments: share of the\nbare loops, over the number of workers", color=GREY)
        axes.grid()
    lines = panels.flat[-1].get_legend_handles_labels()
    figure.legend(*lines, labelcolor=GREY, frameon=False, loc="outside lower left")
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    n_cpus = len(usable_cpus()) or os.cpu_count() or 1
    parser.add_argument(
        "--computing", type=int, nargs="*", default=up_to(n_cpus), metavar="N", help="numbers of workers"
    )
    parser.add_argument("--sleeping", type=int, nargs="*", default=up_to(512)[4:], metavar="N", help="workers")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="parts of contestants' names")
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument("--seconds", type=float, default=0.5, help="least length of a turn")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds to start, and for one turn")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--report", type=Path, help="measure nothing: show this file")
    parser.add_argument("--picture", type=Path, help="draw the curves into this file")
    args = parser.parse_args(arguments)
    if args.report:
        points = json.loads(args.report.read_text(encoding="utf-8"))["points"]
    else:
        points = []
        for kind, numbers in (("computing", args.computing), ("sleeping", args.sleeping)):
            for n_workers in numbers:
                for name in (each for each in NAMES if any(part in each for part in args.only)):
                    points.append(measure(kind, n_workers, name, args))
                    print(table(points[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    if args.json:
        args.json.write_text(json.dumps({**machine(), "points": points}, indent=1), encoding="utf-8")
    print(table(points))
    if args.picture:
        draw(points, args.picture)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], "--whole-batches" in sys.argv, module="scale")
    else:
        main()
