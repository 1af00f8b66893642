"""The compiled part: what it saves, in microseconds of CPU time per environment step.

The same sampler in this process, 16 environments, collects batch after batch with and without what was compiled, in
turn. Without it everything is left to Python and numpy, as on a machine that has no C compiler.

    python benchmarks/native.py
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table
from spaces import SPACES, Returning
from throughput import ENV, Setting, machine, spread

from penstock import RandomAgent, SerialSampler
from penstock.buffers import native as copies
from penstock.collectors import native as loops
from penstock.workers.affinity import limit_threads

BATCH_T, BATCH_B = 128, 16
PLAIN = {**copies.PYTHON, **loops.PYTHON}
COMPILED = {name: getattr(copies if name in copies.PYTHON else loops, name) for name in PLAIN}
#: Who has which of them. `copy` may also be the standard library's.
USES = [
    (user, name)
    for module, user in list(sys.modules.items())
    for name, function in COMPILED.items()
    if module.startswith("penstock.") and vars(user).get(name) is function
]

CASES: dict[str, tuple[Any, Any]] = {
    "CartPole-v1, random": (ENV, RandomAgent),
    "CartPole-v1, mlp": (ENV, Setting("mlp").make_agent),
    "4 leaves, random": (partial(Returning, SPACES["nested, 4 leaves"]), RandomAgent),
    "16 leaves, random": (partial(Returning, SPACES["nested, 16 leaves"]), RandomAgent),
}


def use(functions: dict[str, Any]) -> None:
    """Have all who use the compiled functions use these."""
    for module, name in USES:
        setattr(module, name, functions[name])


def measure(env_fn: Any, make_agent: Any, repeats: int) -> dict[str, list[float]]:
    """CPU time of a step in µs, `repeats` batches each."""
    figures: dict[str, list[float]] = {"compiled": [], "numpy": []}
    with SerialSampler(env_fn, batch_T=BATCH_T, batch_B=BATCH_B) as sampler:
        sampler.initialize(make_agent(), seed=0)
        sampler.obtain_samples(0)
        for repeat in range(repeats):
            for name in random.sample(list(figures), 2):
                use(COMPILED if name == "compiled" else PLAIN)
                began = time.process_time()
                sampler.obtain_samples(repeat)
                figures[name].append((time.process_time() - began) / (BATCH_T * BATCH_B) * 1e6)
    use(COMPILED)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=200, help="batches of each")
    parser.add_argument("--json", help="write machine and all figures to this file")
    args = parser.parse_args()
    limit_threads(1)
    if not (copies.COMPILED and loops.COMPILED):
        raise SystemExit("nothing is compiled here: install penstock where there is a C compiler")

    results = {case: measure(*arguments, args.repeats) for case, arguments in CASES.items()}
    table = Table(title="CPU µs a step, 16 environments", caption="median (middle half of the turns), turn by turn")
    for heading in ("", "compiled", "numpy", "saved"):
        table.add_column(heading, justify="right" if heading else "left")
    for case, figures in results.items():
        saved = [plain - compiled for compiled, plain in zip(figures["compiled"], figures["numpy"], strict=True)]
        cells = [spread(values) for values in (figures["compiled"], figures["numpy"], saved)]
        table.add_row(case, *(f"{cell['median']:.2f} ({cell['low']:.2f} to {cell['high']:.2f})" for cell in cells))
    Console(width=120).print(table)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({**machine(), "cpu_us_per_step": results}, file, indent=1)


if __name__ == "__main__":
    main()
