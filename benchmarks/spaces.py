"""Structured observations: a nested Dict against a flat Box of the same bytes.

Both environments step a CartPole, which is a realistic 5 microseconds, and return one of a few observations that
were made beforehand, so that what making them costs an environment does not count. The policy does not look.
Samplers take turns in one run, in random order, and are compared turn by turn. `flat again` is the noise.

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
from itertools import cycle
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from rich.console import Console
from rich.table import Table
from throughput import Sampling, Setting, machine

from penstock import ParallelSampler, SerialSampler

_SHAPES = {"camera": (8, 8), "position": (3,), "velocity": (3,), "goal": (2,)}


def _box(shape: tuple[int, ...]) -> spaces.Box:
    return spaces.Box(-1, 1, shape, np.float32)


def _flat_space() -> spaces.Box:
    return _box((sum(int(np.prod(shape)) for shape in _SHAPES.values()),))


def _nested_space() -> spaces.Dict:
    """Four leaves on two levels."""
    leaf = {name: _box(shape) for name, shape in _SHAPES.items()}
    body = spaces.Dict({"position": leaf["position"], "velocity": leaf["velocity"]})
    return spaces.Dict({"camera": leaf["camera"], "body": body, "goal": leaf["goal"]})


def _deep_space() -> spaces.Dict:
    """Sixteen leaves on three levels, of as many bytes."""
    total = _flat_space().shape[0]
    sizes = iter([total // 16 + (i < total % 16) for i in range(16)])

    def level(depth: int) -> Any:
        if depth == 0:
            return _box((next(sizes),))
        fan = 4 if depth == 1 else 2
        return spaces.Dict({f"part_{i}": level(depth - 1) for i in range(fan)})

    return spaces.Dict(level(3).spaces)


SPACES: dict[str, Callable[[], spaces.Space[Any]]] = {
    "flat": _flat_space,
    "flat again": _flat_space,
    "nested, 4 leaves": _nested_space,
    "nested, 16 leaves": _deep_space,
}


class Returning(gym.Wrapper[Any, Any, Any, Any]):
    """A CartPole that returns elements of `space` instead of its own observations."""

    def __init__(self, make_space: Callable[[], spaces.Space[Any]]) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.observation_space = make_space()
        self.observation_space.seed(0)
        self._next = cycle([self.observation_space.sample() for _ in range(8)]).__next__

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        return self._next(), self.env.reset(**kwargs)[1]

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        _, reward, terminated, truncated, info = self.env.step(action)
        return self._next(), reward, terminated, truncated, info


@dataclass(frozen=True)
class Shape:
    """How much is sampled at a time."""

    batch_B: int = 32
    batch_T: int = 128
    n_workers: int = 2


def measure(shape: Shape, seconds: float, repeats: int) -> dict[str, dict[str, list[float]]]:
    """By space, `repeats` figures each: "steps/s" of a ParallelSampler, and "µs", the CPU time that a step takes the
    one thread of a SerialSampler with a worker's share of the environments, which others' work disturbs less."""
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
    """How much longer a step takes, as a share, turn by turn: median and middle half."""
    low, median, high = statistics.quantiles([t / f - 1 for t, f in zip(times, flat, strict=True)], n=4)
    return f"{median:.1%} ({low:.1%} to {high:.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-B", type=int, default=32)
    parser.add_argument("--batch-T", type=int, default=128)
    parser.add_argument("--n-workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.15, help="length of one turn of the ParallelSampler")
    parser.add_argument("--repeats", type=int, default=40, help="turns of each contestant")
    parser.add_argument("--json", help="write settings, machine and all figures to this file")
    args = parser.parse_args()

    figures = measure(Shape(args.batch_B, args.batch_T, args.n_workers), args.seconds, args.repeats)
    table = Table(
        title=f"observations of {4 * _flat_space().shape[0]} bytes, B={args.batch_B}, T={args.batch_T}",
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
