"""How fast penstock and other libraries step the same environments. They take turns in one run.

    python benchmarks/peers.py random mlp --json peers.json     # measure
    python benchmarks/peers.py --report peers*.json             # the tables and the picture, of one run or several
    python benchmarks/peers.py mlp --pause 0.3                  # with a learner between the batches

`make peers` does the first two, in a virtual environment with all peers. A *work* is what all contestants sample; see
`WORKS` in peer_adapters.py. Each contestant is a process tree, which is stopped while others have their turn.

For each round, the speed is divided by that of the bare loops in step (the slowest of their processes, times their
number), and by that of the fastest peer with the same environments. "Cores" is the speed of the bare loops in all
processes, divided by that of one bare loop. It is 2.0 for two processes on a quiet machine, and less on a shared one.

A turn is disturbed if the host took more than 1 % of the machine's CPU time away (steal in /proc/stat). It is also
disturbed if other programs used more than 5 % of it while the contestant waited for a CPU. Programs at idle priority do
not count. If a contestant has at least three undisturbed rounds, its figures are of these; the last column counts them.

With `--pause SECONDS`, each contestant has three turns in a round: back to back, with a learner that sleeps for so long
between two batches, and with one that works. The pauses themselves do not count. The bare loops take part, and wait for
each other after each batch: what they lose by the pauses is not due to a library. The table also says how often threads
slept, and how often one came to another CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from peer_process import Contestant, Turn, await_calm, serve

WORK_NAMES = ("random", "mlp", "pixels", "sleeping", "central", "short", "uneven", "pong", "nature", "impala", "lstm")


def take_turns(contestant: Contestant, args: argparse.Namespace) -> dict[str, Turn]:
    """The contestant's turns of one round, by its name and what the learner does between the batches."""
    kinds = {"": 0.0}
    if args.pause:
        kinds |= {", sleep": args.pause, ", work": args.pause}
    turns = {}
    for suffix, pause in kinds.items():
        await_calm(args.calm)
        kind = suffix.removeprefix(", ") or "sleep"
        if contestant.missing is None and (turn := contestant.turn(seconds=args.seconds, pause=pause, kind=kind)):
            turns[contestant.name + suffix] = turn
    return turns


def measure(work: str, names: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of turns: `turns[name][i]` is the turn of round i, None if the contestant had none."""
    contestants: list[Contestant] = []
    missing: dict[str, str] = {}
    rounds: list[dict[str, Turn]] = []
    try:
        for name in names:
            contestant = Contestant(work, name, args.limit, bool(args.pause))
            contestants.append(contestant)
            print(f"  {name}: {contestant.missing or 'ready'}", file=sys.stderr, flush=True)
        end = time.monotonic() + args.budget
        while len(rounds) < args.repeats and (not rounds or time.monotonic() < end):
            running = [contestant for contestant in contestants if contestant.missing is None]
            random.Random(len(rounds)).shuffle(running)
            rounds.append({})
            for contestant in running:
                rounds[-1] |= take_turns(contestant, args)
        missing = {contestant.name: contestant.missing for contestant in contestants if contestant.missing}
    finally:
        for contestant in contestants:
            if contestant.missing is None:
                contestant.close()
    return {"work": work, "seconds": args.seconds, "pause": args.pause, "missing": missing, "rounds": rounds}


def joined(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One result for each work and pause, with the rounds of all runs."""
    found: dict[Any, dict[str, Any]] = {}
    for result in results:
        before = found.setdefault((result["work"], result["pause"]), {**result, "rounds": [], "missing": {}})
        before["rounds"] += result["rounds"]
        before["missing"] |= result["missing"]
    return list(found.values())


def versions() -> dict[str, str]:
    """The libraries of peers.txt that are installed, and Sample Factory, which has a virtual environment of its own."""
    lines = (Path(__file__).parent / "peers.txt").read_text(encoding="utf-8").splitlines()
    names = {found[1] for line in lines if (found := re.match(r"(?:--\S+ )*([a-z][\w.-]*)", line))} | {"sample-factory"}
    places = [*sys.path, *map(str, Path(sys.prefix).glob("sample-factory/lib/python*/site-packages"))]
    # A place that comes first wins, as in an import.
    found_there = {each.name.lower().replace("_", "-"): each.version for each in [*distributions(path=places)][::-1]}
    return {name: found_there[name] for name in sorted(names & found_there.keys())}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", help=f"of {', '.join(WORK_NAMES)}; all by default")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts of contestants' names; all by default")
    parser.add_argument("--repeats", type=int, default=15, help="rounds")
    parser.add_argument("--seconds", type=float, default=0.5, help="least length of a turn")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds after which no round begins, per work")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds to start, and for one turn")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two batches, which do not count")
    parser.add_argument("--calm", type=float, default=0.0, help="longest wait before a turn until other programs rest")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--report", type=Path, nargs="+", help="measure nothing: show these files")
    parser.add_argument("--skipped", type=Path, help="a file that says which peers are not installed, and why")
    parser.add_argument(
        "--picture", type=Path, help="write the picture to this file, and that of the first work to FILE_short"
    )
    args = parser.parse_args(arguments)
    if unknown := set(args.works) - set(WORK_NAMES):
        parser.error(f"there is no work {', '.join(unknown)}")

    from peer_report import draw, tables

    results: list[dict[str, Any]] = []
    libraries: dict[str, str] = {} if args.report else versions()
    for file in args.report or ():
        content = json.loads(file.read_text(encoding="utf-8"))
        results = joined([*results, *content["results"]])
        libraries |= content.get("libraries", {})
    if not args.report:
        from peer_adapters import contestants_of

        signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))  # so that contestants are closed
        for work in args.works or WORK_NAMES:
            print(work, file=sys.stderr, flush=True)
            names = [name for name in contestants_of(work) if not args.only or any(part in name for part in args.only)]
            results.append(measure(work, names, args))
    if args.json:
        from turns import machine

        content = {**machine(), "libraries": libraries, "load": os.getloadavg(), "results": results}
        args.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    print(tables(results, args.skipped, libraries))
    if args.picture:
        draw(results, args.picture)
        draw(results, args.picture.with_stem(f"{args.picture.stem}_short"), only=results[0]["work"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], "--whole-batches" in sys.argv)
    else:
        main()
