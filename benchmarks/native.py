"""What each compiled function saves, in microseconds of CPU time per environment step.

One SerialSampler collects batches in this process, in turns of a few milliseconds. In a turn, one function is replaced
by its Python version. The turn just before or after it, in which all functions are compiled, is compared with it.
"nothing" replaces no function: it shows the noise. "everything" replaces all functions, as on a machine without a C
compiler.

    python benchmarks/native.py --json native.json
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from rich.console import Console
from rich.table import Table
from spaces import SPACES, Returning
from throughput import ENV, Setting, machine, spread

from penstock import RandomAgent, SerialSampler
from penstock.agents import distributions
from penstock.buffers import native
from penstock.columns import stepping
from penstock.workers.affinity import limit_threads

PARTS = (native, distributions, stepping)
PYTHON = {name: function for part in PARTS for name, function in part.PYTHON.items()}
COMPILED = {name: getattr(part, name) for part in PARTS for name in part.PYTHON}
#: Pairs (module, name): every module that uses a compiled function, with the function's name.
USES = [
    (user, name)
    for module, user in list(sys.modules.items())
    for name, function in COMPILED.items()
    if module.startswith("penstock.") and vars(user).get(name) is function
]
#: The functions that a turn replaces, by the name of the table's row.
REPLACED: dict[str, tuple[str, ...]] = {
    "nothing": (),
    **{name: (name,) for name in COMPILED},
    "everything": tuple(COMPILED),
}


@dataclass(frozen=True)
class Case:
    """What is sampled."""

    env_fn: Any
    make_agent: Any = RandomAgent
    batch_T: int = 128
    batch_B: int = 16


def _pixels() -> spaces.Space[Any]:
    return spaces.Box(0, 255, (84, 84, 4), np.uint8)


CASES = {
    "CartPole, random": Case(ENV),
    "CartPole, mlp": Case(ENV, Setting("mlp").make_agent),
    "CartPole, 4 environments": Case(ENV, batch_T=128, batch_B=4),
    "CartPole, T = 5": Case(ENV, batch_T=5),
    "Dict of 4": Case(partial(Returning, SPACES["nested, 4 leaves"])),
    "Dict of 16": Case(partial(Returning, SPACES["nested, 16 leaves"])),
    "pixels": Case(partial(Returning, _pixels)),
    "episodes of 5": Case(partial(gym.make, "CartPole-v1", max_episode_steps=5)),
}

#: By row of the table: pairs of turns (compiled, replaced), each with CPU µs and wall-clock µs per step.
Figures = dict[str, list[tuple[tuple[float, float], tuple[float, float]]]]


def use(replaced: tuple[str, ...]) -> None:
    """Make every module use the compiled functions, except those in `replaced`."""
    for module, name in USES:
        setattr(module, name, PYTHON[name] if name in replaced else COMPILED[name])


def measure(case: Case, repeats: int, turn_steps: int) -> Figures:
    """`repeats` pairs of turns for everything in `REPLACED`."""
    figures: Figures = {name: [] for name in REPLACED}
    n_batches, itr = max(1, turn_steps // (case.batch_T * case.batch_B)), 0
    n_steps = n_batches * case.batch_T * case.batch_B
    with SerialSampler(case.env_fn, batch_T=case.batch_T, batch_B=case.batch_B) as sampler:
        sampler.initialize(case.make_agent(), seed=0)

        def turn(replaced: tuple[str, ...]) -> tuple[float, float]:
            nonlocal itr
            use(replaced)
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(n_batches):
                sampler.obtain_samples(itr)
                itr += 1
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            return cpu / n_steps * 1e6, wall / n_steps * 1e6

        turn(())
        gc.collect()
        gc.disable()
        for _ in range(repeats):
            for name in random.sample(list(REPLACED), len(REPLACED)):
                is_compiled_first = random.random() < 0.5
                order = ((), REPLACED[name]) if is_compiled_first else (REPLACED[name], ())
                one, other = turn(order[0]), turn(order[1])
                figures[name].append((one, other) if is_compiled_first else (other, one))
    gc.enable()
    use(())
    return figures


def summarize(figures: Figures) -> list[dict[str, Any]]:
    """A row for everything that was replaced: the CPU and wall-clock µs a step that the compiled way saves, and the
    ratio of the CPU times, pair by pair."""
    return [
        {
            "replaced": name,
            "compiled_us": spread([compiled[0] for compiled, _ in pairs]),
            "saved_us": spread([plain[0] - compiled[0] for compiled, plain in pairs]),
            "ratio": spread([plain[0] / compiled[0] for compiled, plain in pairs]),
            "saved_wall_us": spread([plain[1] - compiled[1] for compiled, plain in pairs]),
        }
        for name, pairs in figures.items()
    ]


def print_table(case: str, rows: list[dict[str, Any]]) -> None:
    compiled = next(row["compiled_us"]["median"] for row in rows)
    caption = "median (middle half of the pairs); saved by the compiled function"
    table = Table(title=f"{case}: {compiled:.2f} CPU µs a step", caption=caption)
    for heading in ("Python instead of", "CPU µs a step", "CPU, %", "wall-clock µs"):
        table.add_column(heading, justify="left" if heading.startswith("Python") else "right")
    for row in rows:
        cells = []
        for name, form, shift in (
            ("saved_us", "{:+.3f}", 0.0),
            ("ratio", "{:+.1%}", 1.0),
            ("saved_wall_us", "{:+.3f}", 0.0),
        ):
            middle, low, high = (form.format(row[name][key] - shift) for key in ("median", "low", "high"))
            cells.append(f"{middle} ({low} to {high})")
        table.add_row(row["replaced"], *cells)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=400, help="pairs of batches for each function")
    parser.add_argument("--turn", type=int, default=1024, help="environment steps of a turn, at least one batch")
    parser.add_argument("--batch-T", type=int, help="time steps of a batch; each case has a default")
    parser.add_argument("--json", help="write machine, table and all figures to this file")
    args = parser.parse_args()
    limit_threads(1)
    if any(part.WHY_NOT_COMPILED for part in PARTS):
        raise SystemExit("nothing is compiled here: install penstock where there is a C compiler")

    results, table = {}, {}
    for case in args.cases:
        sized = CASES[case] if args.batch_T is None else replace(CASES[case], batch_T=args.batch_T)
        results[case] = measure(sized, args.repeats, args.turn)
        table[case] = summarize(results[case])
        print_table(case, table[case])
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({**machine(), "results": results, "table": table}, file, indent=1)


if __name__ == "__main__":
    main()
