"""How often the observations of a batched environment are copied on their way into the samples.

Two environments that do nothing take turns in one run: one returns its observations, the other writes them in place
(`step_into`, which here has nothing to write). A third turn copies as many bytes into the rows of a batch, and nothing
else. The copies in each step are the time of a row of the sampler, less that of one in place, over that of a copy.

    python benchmarks/batched_copies.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from turns import CAPTION, cell

from penstock import RandomAgent, SerialSampler

SHAPE = (4, 84, 84)


class Returned(VectorEnv[Any, Any, Any]):
    """Returns the same observations in every step."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012  Gymnasium's own declaration

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(0, 255, SHAPE, np.uint8)
        self.single_action_space = spaces.Discrete(6)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.frames = np.zeros((num_envs, *SHAPE), np.uint8)
        flags = np.zeros(num_envs, np.bool_)
        self.rest: tuple[Any, ...] = (np.zeros(num_envs), flags, flags, {})

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.frames, {}

    def step(self, actions: Any) -> Any:
        return (self.frames, *self.rest)


class InPlace(Returned):
    """Has its observations where they belong."""

    def step(self, actions: Any) -> Any:
        return super().step(actions)

    def step_into(self, out: Any, actions: Any) -> Any:
        return self.rest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-T", type=int, default=32)
    parser.add_argument("--batch-B", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    T, B = args.batch_T, args.batch_B
    rows, row = np.zeros((T, B, *SHAPE), np.uint8), np.zeros((B, *SHAPE), np.uint8)

    def copy() -> None:
        for t in range(T):
            rows[t] = row

    options: dict[str, Any] = {"batch_T": T, "batch_B": B, "batched": True}
    with SerialSampler(Returned, **options) as returned, SerialSampler(InPlace, **options) as in_place:
        for sampler in (returned, in_place):
            sampler.initialize(RandomAgent(), seed=0)
        turns: list[Callable[[], Any]] = [lambda: returned.obtain_samples(0), lambda: in_place.obtain_samples(0), copy]
        times = []
        for _ in range(args.repeats + 3):
            marks = [time.perf_counter()]
            for turn in turns:
                turn()
                marks.append(time.perf_counter())
            times.append(np.diff(marks) * 1e6 / T)
    times = times[3:]  # the first ones touch new memory
    for name, each in zip(("returned", "in place", "one copy"), zip(*times, strict=True), strict=True):
        print(f"{name:10} {cell(each, '{:.1f}')} µs for a row of {row.nbytes:,} bytes")
    print(f"copies in each step: {cell([(a - b) / c for a, b, c in times], '{:.2f}')}. {CAPTION}")


if __name__ == "__main__":
    main()
