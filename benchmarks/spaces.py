"""Structured observations: a nested Dict against a flat Box of the same size.

Each environment steps a CartPole, which takes some 5 µs, and returns one of a few observations that were sampled at the
start. So the environment spends no time on making observations. The policy ignores them. Samplers take turns in one
run, in random order, and are compared turn by turn. `flat again` shows the noise.

    python benchmarks/spaces.py
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces
from rich.console import Console
from rich.table import Table
from throughput import Sampling, Setting
from turns import machine, ratios
from workloads import Returning, deep_space, flat_space, nested_space

from penstock import ParallelSampler, SerialSampler

SPACES: dict[str, Callable[[], spaces.Space[Any]]] = {
    "flat": flat_space,
    "flat again": flat_space,
    "nested, 4 leaves": nested_space,
    "nested, 16 leaves": deep_space,
}


@dataclass(frozen=True)
class Shape:
    """The size of a batch, and the number of workers."""

    batch_B: int = 32
    batch_T: int = 128
    n_workers: int = 2


def measure(shape: Shape, seconds: float, repeats: int) -> dict[str, dict[str, list[float]]]:
    """By space, `repeats` figures each: "steps/s" of a ParallelSampler, and "µs", the CPU time of a step in a
    SerialSampler with one worker's share of the environments. Other programs disturb the CPU time less."""
    serial: dict[str, Sampling] = {}
    parallel: dict[str, Sampling] = {}
    try:
        for name, make_space in SPACES.items():
            env_fn, alone = partial(Returning, make_space), shape.batch_B // shape.n_workers
            serial[name] = Sampling(SerialSampler, Setting("random", alone, shape.batch_T, 1), env_fn)
            whole = Setting("random", shape.batch_B, shape.batch_T, shape.n_workers)
            parallel[name] = Sampling(ParallelSampler, whole, env_fn)
        figures: dict[str, dict[str, list[float]]] = {name: {"steps/s": [], "µs": []} for name in SPACES}
        for repeat in range(repeats + 1):
            for name in random.sample(list(SPACES), len(SPACES)):
                rate, cost = parallel[name].run(seconds), cpu_time(serial[name])
                if repeat:  # the first is the warm-up
                    figures[name]["steps/s"].append(rate)
                    figures[name]["µs"].append(cost)
        return figures
    finally:
        for sampling in (*serial.values(), *parallel.values()):
            sampling.close()


def cpu_time(sampling: Sampling, batches: int = 4) -> float:
    """Microseconds of this thread per environment step."""
    began, steps = time.thread_time(), 0
    for itr in range(batches):
        samples, _ = sampling.sampler.obtain_samples(itr)
        steps += samples.env.reward.numel()
    return (time.thread_time() - began) / steps * 1e6


def longer(times: Sequence[float], flat: Sequence[float]) -> str:
    """How much longer a step takes than with the flat Box, turn by turn: median and middle half."""
    low, median, high = statistics.quantiles([ratio - 1 for ratio in ratios(times, flat)], n=4)
    return f"{median:.1%} ({low:.1%} to {high:.1%})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-B", type=int, default=32)
    parser.add_argument("--batch-T", type=int, default=128)
    parser.add_argument("--n-workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.15, help="length of one turn of the ParallelSampler")
    parser.add_argument("--repeats", type=int, default=40, help="turns of each contestant")
    parser.add_argument("--json", help="write settings, machine and all figures to this file")
    args = parser.parse_args(arguments)

    figures = measure(Shape(args.batch_B, args.batch_T, args.n_workers), args.seconds, args.repeats)
    table = Table(
        title=f"observations of {4 * np.prod(flat_space().shape)} bytes, B={args.batch_B}, T={args.batch_T}",
        caption="medians; how much longer, turn by turn, with the middle half of the turns",
    )
    for heading in ("observation", "steps/s", "a step is longer by", "CPU µs a step", "longer by"):
        table.add_column(heading, justify="left" if heading == "observation" else "right")
    flat = figures["flat"]
    for name, of in figures.items():
        periods, flat_periods = ([1 / rate for rate in each["steps/s"]] for each in (of, flat))
        cells = [f"{statistics.median(of['steps/s']):,.0f}", longer(periods, flat_periods)]
        table.add_row(name, *cells, f"{statistics.median(of['µs']):.2f}", longer(of["µs"], flat["µs"]))
    Console(width=130).print(table)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({**machine(), "settings": vars(args), "figures": figures}, file, indent=1)


if __name__ == "__main__":
    main()
