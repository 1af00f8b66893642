"""Steps of an environment in a process of its own: `EnvProcess` beside `AsyncVectorEnv` with one environment.

The environment returns one array and does nothing else. The two take turns. Each round gives a ratio of their times:
the table has its median and quartiles, and the CPU time of both processes together.

    python benchmarks/env_process.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv

from penstock import EnvProcess

#: Names, shapes, and steps of a round.
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "4 numbers": ((4,), 1000),
    "84x84x4": ((84, 84, 4), 1000),
    "256x256x6, 393 kB": ((256, 256, 6), 200),
    "4 x 512x512x3, 3 MB": ((4, 512, 512, 3), 40),
}


class Still(gym.Env[Any, Any]):
    """Returns the same array in each step."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        dtype: Any = np.float32 if len(shape) == 1 else np.uint8
        self.observation_space = gym.spaces.Box(0, 1, shape, dtype)
        self.action_space = gym.spaces.Discrete(2)
        self._observation = np.ones(shape, dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._observation.copy(), {}

    def step(self, action: Any) -> Any:
        return self._observation.copy(), 1.0, False, False, {}


def cpu_of(pid: int) -> int:
    """Nanoseconds of CPU time that this process has used."""
    return time.clock_gettime_ns(~pid << 3 | 2)  # its clock, as in clock_getcpuclockid(3)


def round_of(env: Any, action: Any, pid: int, n: int) -> tuple[float, float]:
    """Wall clock, and CPU time of both processes, in microseconds per step."""
    env.step(action)  # the other one has used the caches
    there, here, wall = cpu_of(pid), time.process_time_ns(), time.perf_counter_ns()
    for _ in range(n):
        env.step(action)
    wall = time.perf_counter_ns() - wall
    return wall / n / 1e3, (time.process_time_ns() - here + cpu_of(pid) - there) / n / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--share", type=float, default=1.0, help="of the steps of a round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = {}
    print("us per step, median: wall clock (CPU); ratio of wall clocks, median (quartiles)")
    for name, (shape, n_steps) in SHAPES.items():
        make, n = partial(Still, shape), max(1, int(n_steps * options.share))
        own, other = EnvProcess(make), AsyncVectorEnv([make])
        own.reset(seed=0), other.reset(seed=0)
        ways: list[Any] = [(own, 1, own.pid), (other, np.array([1]), other.processes[0].pid)]
        for env, action, _ in ways:  # the first large observation makes shared memory
            env.step(action)
        rounds = [[round_of(*way, n) for way in ways] for _ in range(options.rounds)]
        own.close(), other.close()
        ratios = [ours[0] / theirs[0] for ours, theirs in rounds]
        low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        walls, cpus = ([statistics.median(each[k][i] for each in rounds) for k in (0, 1)] for i in (0, 1))
        figures[name] = {"ratio": ratio, "low": low, "high": high, "wall": walls, "cpu": cpus}
        columns = [f"{wall:6.0f} ({cpu:5.0f})" for wall, cpu in zip(walls, cpus, strict=True)]
        print(
            f"{name:<20}  EnvProcess {columns[0]}  AsyncVectorEnv {columns[1]}  {ratio:.2f} ({low:.2f} to {high:.2f})",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
