"""Batched environments: all CartPoles of a worker in one call, against one CartPole at a time.

Samplers with 2 workers take turns in one run, in random order: single environments, Gymnasium's
vectorised CartPole (`BatchedCartPole`), and EnvPool's if it is installed. Each runs with several numbers of
environments. Ratios are to single environments with the first of these numbers, in the same turn.

With `--agents none`, a `ShmVectorEnv` takes the place of the samplers and gets random actions. "bare" is
`BatchedCartPole` without penstock, in this process.

    python benchmarks/batched.py --json batched.json
    python benchmarks/batched.py --agents none --batch-B 16 256
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from throughput import Sampling, Setting
from turns import CAPTION, machine, ratios, spread
from workloads import ENV

from penstock import ParallelSampler
from penstock.envs import BatchedCartPole, BatchedEnvPool
from penstock.vector import ShmVectorEnv

KINDS: dict[str, Callable[..., Any]] = {
    "single": ENV,
    "batched": BatchedCartPole,
    "envpool": partial(BatchedEnvPool, "CartPole-v1"),
}

Contestant = tuple[str, int]  # kind, batch_B


class Stepping:
    """A vector environment that gets random actions."""

    def __init__(self, kind: str, batch_B: int, batch_T: int, n_workers: int) -> None:
        if kind == "bare":
            self._envs: Any = BatchedCartPole(batch_B)
        elif kind == "single":
            self._envs = ShmVectorEnv([ENV] * batch_B, n_workers=n_workers, autoreset_mode="SAME_STEP")
        else:
            self._envs = ShmVectorEnv(KINDS[kind], num_envs=batch_B, n_workers=n_workers)
        self._actions = np.random.default_rng(0).integers(0, 2, (batch_T, batch_B))
        self._envs.reset(seed=0)

    def run(self, seconds: float) -> float:
        """Environment steps per second."""
        began, n_rounds = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            for row in self._actions:
                self._envs.step(row)
            n_rounds += 1
        return n_rounds * self._actions.size / (time.monotonic() - began)

    def close(self) -> None:
        self._envs.close()


def measure(
    agent: str,
    contestants: Sequence[Contestant],
    seconds: float,
    repeats: int,
    *,
    batch_T: int = 128,
    n_workers: int = 2,
    say: Callable[[str], None] = print,
) -> dict[Contestant, list[float]]:
    """Steps per second, `repeats` figures each."""
    running: dict[Contestant, Sampling | Stepping] = {}
    try:
        for kind, batch_B in contestants:
            if agent == "none":
                running[kind, batch_B] = Stepping(kind, batch_B, batch_T, n_workers)
                continue
            running[kind, batch_B] = Sampling(
                ParallelSampler,
                Setting(agent, batch_B, batch_T, n_workers),
                KINDS[kind],
                batched=kind != "single",
                max_decorrelation_steps=0,
            )
        for sampling in running.values():
            sampling.run(seconds / 2)  # warm-up
        figures: dict[Contestant, list[float]] = {contestant: [] for contestant in contestants}
        for repeat in range(repeats):
            for contestant in random.sample(contestants, len(contestants)):
                figures[contestant].append(running[contestant].run(seconds))
            if (repeat + 1) % 10 == 0:
                say(f"  {agent}: turn {repeat + 1} of {repeats}")
        return figures
    finally:
        for sampling in running.values():
            sampling.close()


def summarize(agent: str, figures: dict[Contestant, list[float]]) -> list[dict[str, Any]]:
    """One row per contestant: steps/s, and the ratio to the first contestant's, turn by turn."""
    (_, first), *_ = figures.items()
    return [
        {
            "agent": agent,
            "kind": kind,
            "batch_B": batch_B,
            "steps_per_s": spread(rates),
            "times_single": spread(ratios(rates, first)),
        }
        for (kind, batch_B), rates in figures.items()
    ]


def print_table(rows: Sequence[dict[str, Any]], title: str) -> None:
    table = Table(title=title, caption=CAPTION)
    for heading in ("policy", "environments", "B", "steps/s", "times the first"):
        table.add_column(heading, justify="left" if heading in ("policy", "environments") else "right")
    for row in rows:
        rate, ratio = row["steps_per_s"], row["times_single"]
        table.add_row(
            row["agent"],
            row["kind"],
            str(row["batch_B"]),
            f"{rate['median']:,.0f} ({rate['low']:,.0f} to {rate['high']:,.0f})",
            f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
        )
    Console(width=110).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", nargs="+", default=["random", "mlp"], choices=["mlp", "random", "none"])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), help="kinds; default: all that are installed")
    parser.add_argument("--batch-B", type=int, nargs="+", default=[32, 256, 1024], help="numbers of environments")
    parser.add_argument("--batch-T", type=int, default=128)
    parser.add_argument("--n-workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.4, help="length of one turn")
    parser.add_argument("--repeats", type=int, default=20, help="turns of each contestant")
    parser.add_argument("--json", help="write settings, machine and all figures to this file")
    args = parser.parse_args(arguments)

    kinds = args.kinds or [kind for kind in KINDS if kind != "envpool" or importlib.util.find_spec(kind) is not None]
    results, rows = [], []
    for agent in args.agents:
        own = [*kinds, "bare"] if agent == "none" else kinds
        contestants = [(kind, batch_B) for kind in own for batch_B in args.batch_B]
        figures = measure(
            agent, contestants, args.seconds, args.repeats, batch_T=args.batch_T, n_workers=args.n_workers
        )
        results += [{"agent": agent, "kind": k, "batch_B": b, "steps_per_s": v} for (k, b), v in figures.items()]
        rows += summarize(agent, figures)
    print_table(rows, f"CartPole-v1, T={args.batch_T}, {args.n_workers} workers")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({**machine(), "settings": vars(args), "results": results, "table": rows}, file, indent=1)


if __name__ == "__main__":
    main()
