"""What the gates cost: batches of one time step, with environments that do nothing, compared with bare eventfds.

    python benchmarks/waits.py --workers 2 8 32

Each worker has one environment. The contestant "hub" has only eventfds: the main process writes to one for each worker,
and all workers write to one that the main process reads. Processes that sleep cannot do with less. The contestants take
turns in one run, for each number of workers. `--busy 2` runs two endless loops beside them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from rich.console import Console
from rich.table import Table
from turns import CAPTION, cell, machine

from penstock import GpuSampler, ParallelSampler, RandomAgent, Sampler
from penstock.vector import ShmVectorEnv

Figures = dict[str, list[float]]


class InstantEnv(gym.Env[Any, Any]):
    """Its steps do nothing, and its episodes do not end."""

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._observation = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._observation, {}

    def step(self, action: Any) -> Any:
        return self._observation, 0.0, False, False, {}


class Hub:
    """Processes that wait for an eventfd, count, and write to another."""

    def __init__(self, n_workers: int) -> None:
        context = multiprocessing.get_context("fork")
        self._done = os.eventfd(0)
        self._go = [os.eventfd(0) for _ in range(n_workers)]
        self._processes = [context.Process(target=self._work, args=(go,), daemon=True) for go in self._go]
        for process in self._processes:
            process.start()

    def _work(self, go: int) -> None:
        while True:
            os.read(go, 8)
            os.write(self._done, b"\1\0\0\0\0\0\0\0")

    def batch(self) -> None:
        """Wake all, and wait for all."""
        for go in self._go:
            os.write(go, b"\1\0\0\0\0\0\0\0")
        n_done = 0
        while n_done < len(self._go):
            n_done += int.from_bytes(os.read(self._done, 8), "little")

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for fd in (self._done, *self._go):
            os.close(fd)


class Sampling:
    """A sampler that collects one batch after another."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler, self._itr = sampler, 0
        sampler.initialize(RandomAgent(), seed=0)

    def batch(self) -> None:
        self._sampler.obtain_samples(self._itr)
        self._itr += 1

    def close(self) -> None:
        self._sampler.shutdown()


class Stepping:
    """A vector environment."""

    def __init__(self, n_workers: int) -> None:
        self._envs = ShmVectorEnv([InstantEnv] * n_workers)
        self._actions = np.zeros(n_workers, np.int64)
        self._envs.reset(seed=0)

    def batch(self) -> None:
        self._envs.step(self._actions)

    def close(self) -> None:
        self._envs.close()


def sampling(cls: Callable[..., Sampler], n_workers: int) -> Sampling:
    return Sampling(cls(InstantEnv, batch_T=1, batch_B=n_workers, n_workers=n_workers, max_decorrelation_steps=0))


CONTESTANTS: dict[str, Callable[[int], Any]] = {
    "hub": Hub,
    "ParallelSampler": lambda n: sampling(ParallelSampler, n),
    "GpuSampler": lambda n: sampling(GpuSampler, n),
    "ShmVectorEnv": Stepping,
}


def measure(n_workers: int, repeats: int, seconds: float) -> Figures:
    """µs a batch, `repeats` times for each contestant, in random order."""
    figures: Figures = {name: [] for name in CONTESTANTS}
    with ExitStack() as stack:
        contestants = {}
        for name, make in CONTESTANTS.items():  # the hub first: it forks
            contestants[name] = made = make(n_workers)
            stack.callback(made.close)
            made.batch()
        for repeat in range(repeats):
            for name in np.random.default_rng(repeat).permutation(list(contestants)):
                began, n = time.perf_counter(), 0
                while time.perf_counter() - began < seconds:
                    contestants[name].batch()
                    n += 1
                figures[name].append((time.perf_counter() - began) / n * 1e6)
    return figures


def show(results: dict[int, Figures]) -> None:
    table = Table(title="µs a batch of one time step", caption=CAPTION)
    for heading in ("", *(f"{n} workers" for n in results)):
        table.add_column(heading, justify="right" if heading else "left")
    for name in CONTESTANTS:
        table.add_row(name, *(cell(figures[name], "{:.0f}") for figures in results.values()))
    for name in [name for name in CONTESTANTS if name != "hub"]:
        more = [[a - b for a, b in zip(figures[name], figures["hub"], strict=True)] for figures in results.values()]
        table.add_row(f"{name}, more than the hub", *(cell(values, "{:.0f}") for values in more))
    Console(width=120).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.2, help="minimum length of a turn")
    parser.add_argument("--busy", type=int, default=0, help="how many endless loops run beside the contestants")
    parser.add_argument("--json", help="write machine and all figures to this file")
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.busy)]
    try:
        results = {n: measure(n, args.repeats, args.seconds) for n in args.workers}
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    show(results)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({**machine(), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
