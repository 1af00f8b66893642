"""Action noise: what a random stream for each environment costs, in nanoseconds per environment step.

penstock's agents draw each environment's noise from a separate stream, many steps at a time. So trajectories do not
depend on the number of workers. With one generator for all environments, they do. Such a generator is measured twice:
it draws as many steps at a time, or one row at a time. All take turns, in random order.

    python benchmarks/noise.py
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces
from rich.console import Console
from rich.table import Table
from turns import machine

from penstock.agents import ColumnNoise, draw
from penstock.agents.categorical import CategoricalHead
from penstock.agents.gaussian import GaussianHead
from penstock.envs import Purpose, stream

Draw = Callable[[np.random.Generator, int], Any]

CHUNK = 128  # the steps that `ColumnNoise` draws at once

#: By policy: the function that draws a column's next n numbers.
DRAWS: dict[str, Draw] = {
    "RandomAgent, Discrete(2)": partial(draw, spaces.Discrete(2)),
    "categorical, Discrete(2)": CategoricalHead(spaces.Discrete(2), "agent").draw,
    "Gaussian, Box(6)": GaussianHead(spaces.Box(-1, 1, (6,)), "agent").draw,
}

STREAMS, ONE, ROWS = "a stream for each", "one generator", "one generator, row by row"


def one_generator(draw_column: Draw, n_columns: int, chunk: int) -> Callable[[], Any]:
    """Rows of `n_columns` from one generator, `chunk` rows drawn at a time."""
    rng = stream(0, Purpose.ACTION, 0)

    def next_rows() -> Any:
        while True:
            drawn = draw_column(rng, chunk * n_columns)
            yield from drawn.reshape(chunk, n_columns, *drawn.shape[1:])

    return next_rows().__next__


def make(draw_column: Draw, n_columns: int) -> dict[str, Callable[[], Any]]:
    """By contestant: the function that returns the next row `[B, ...]`."""
    rngs = [stream(0, Purpose.ACTION, column) for column in range(n_columns)]
    return {
        STREAMS: ColumnNoise(rngs, draw_column).next_row,
        ONE: one_generator(draw_column, n_columns, CHUNK),
        ROWS: one_generator(draw_column, n_columns, 1),
    }


def measure(columns: list[int], n_rows: int, repeats: int) -> dict[tuple[str, int, str], list[float]]:
    """ns per environment step by (policy, columns, contestant); `n_rows` are rounded up to whole chunks."""
    n_rows = -(-n_rows // CHUNK) * CHUNK
    contestants = {
        (policy, n, who): next_row
        for policy, draw_column in DRAWS.items()
        for n in columns
        for who, next_row in make(draw_column, n).items()
    }
    figures: dict[tuple[str, int, str], list[float]] = {key: [] for key in contestants}
    for repeat in range(repeats + 1):
        for key in random.sample(list(contestants), len(contestants)):
            next_row = contestants[key]
            began = time.perf_counter()
            for _ in range(n_rows):
                next_row()
            if repeat:  # the first is the warm-up
                figures[key].append((time.perf_counter() - began) / (n_rows * key[1]) * 1e9)
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--columns", type=int, nargs="+", default=[16, 512], help="environments of one worker")
    parser.add_argument("--rows", type=int, default=512, help="steps of all environments in one turn")
    parser.add_argument("--repeats", type=int, default=40, help="turns of each contestant")
    parser.add_argument("--json", help="write settings, machine and all figures to this file")
    args = parser.parse_args(arguments)

    figures = measure(args.columns, args.rows, args.repeats)
    table = Table(title="ns per environment step", caption="median (middle half of the turns)")
    for heading in ("policy", "environments", STREAMS, ONE, ROWS):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for policy in DRAWS:
        for n in args.columns:
            quartiles = [statistics.quantiles(figures[policy, n, who], n=4) for who in (STREAMS, ONE, ROWS)]
            cells = [f"{middle:.1f} ({low:.1f} to {high:.1f})" for low, middle, high in quartiles]
            table.add_row(policy, str(n), *cells)
    Console(width=130).print(table)
    if args.json:
        results = [{"policy": p, "columns": n, "who": who, "ns": v} for (p, n, who), v in figures.items()]
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({**machine(), "settings": vars(args), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
