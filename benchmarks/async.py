"""Sampling while the learner trains: what it gains, and what it costs. Contestants take turns in one run.

1. An idle learner: the steps per second of AsyncSampler, divided by those of ParallelSampler.
2. A learner that takes as long as sampling does: the wall clock of a loop with AsyncSampler, divided by that of the
   same loop with ParallelSampler. Learner and worker have a CPU each. The best possible figure is 0.5.
3. The microseconds that `obtain_samples` takes if a batch is complete: while the workers collect the next batches, and
   while they wait.

    python benchmarks/async.py --json async.json

Pixels are environments that return 84 x 84 x 4 bytes, with random actions. The others are CartPole with the MLP.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from environments import PixelEnv
from rich.console import Console
from rich.table import Table
from turns import CAPTION, Figures, cell, machine, ratios, spread, take_turns
from workloads import ENV, ActorCritic

from penstock import AsyncSampler, CategoricalPgAgent, ParallelSampler, RandomAgent, Sampler
from penstock.workers.affinity import pin, usable_cpus


def begin(cls: type[Sampler], n_workers: int, cpus: list[int] | None = None, **options: Any) -> Any:
    agent = CategoricalPgAgent(ActorCritic) if options.pop("mlp", True) else RandomAgent()
    sampler = cls(options.pop("env", ENV), n_workers=n_workers, **options)
    sampler.initialize(agent, seed=0, affinity=cpus)
    if isinstance(sampler, AsyncSampler):
        sampler.start()
    return sampler


class Loop:
    """One loop over batches. The learner calculates for `seconds` of its CPU time after each batch."""

    def __init__(self, sampler: Sampler, seconds: float = 0.0) -> None:
        self.sampler, self.seconds, self.itr = sampler, seconds, 0

    def batch(self) -> int:
        samples, _ = self.sampler.obtain_samples(self.itr)
        self.itr += 1
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass
        return int(samples.env.reward.numel())

    def close(self) -> None:
        self.sampler.shutdown()


def sampling_seconds(sampler: Sampler, n: int = 20) -> float:
    """The median time of one batch."""
    loop, times = Loop(sampler), []
    for _ in range(n):
        began = time.monotonic()
        loop.batch()
        times.append(time.monotonic() - began)
    return float(np.median(times))


def idle_learner(repeats: int, seconds: float, **options: Any) -> Figures:
    """Steps per second of both samplers, without training."""
    samplers, size = {cls.__name__: cls for cls in (ParallelSampler, AsyncSampler)}, {"batch_T": 128, "batch_B": 32}
    contestants = {name: Loop(begin(cls, 2, **{**size, **options})) for name, cls in samplers.items()}
    return take_turns(Paused.around(contestants), repeats, seconds)


class Paused:
    """A contestant whose workers stand still outside its turns."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    @classmethod
    def around(cls, loops: dict[str, Loop]) -> dict[str, Paused]:
        return {name: cls(loop) for name, loop in loops.items()}

    def batch(self) -> int:
        """Twenty batches, and the batches that the workers have begun by then: no work is left for the next turn."""
        sampler, steps = self._loop.sampler, 0
        if isinstance(sampler, AsyncSampler) and sampler.state.name == "PAUSED":
            sampler.resume()
        for _ in range(20):
            steps += self._loop.batch()
        if isinstance(sampler, AsyncSampler):
            sampler.pause()
            while sampler.run.schedule.open:
                steps += self._loop.batch()
        return steps

    def close(self) -> None:
        self._loop.close()


def equal_learner(repeats: int, seconds: float, **options: Any) -> Figures:
    """Steps per second of both loops, if training takes as long as sampling; one worker and the learner, a CPU each."""
    first, second = usable_cpus()[:2]
    everything = os.sched_getaffinity(0)
    size = {"batch_T": 128, "batch_B": 16, **options}
    synchronous, asynchronous = (begin(cls, 1, [second], **size) for cls in (ParallelSampler, AsyncSampler))
    pin([first])  # after the samplers have started: they refuse CPUs that this process may not use
    try:
        training = sampling_seconds(synchronous)
        contestants = {
            "ParallelSampler": Loop(synchronous, training),
            "AsyncSampler": Loop(asynchronous, training),
        }
        return take_turns(Paused.around(contestants), repeats, seconds)
    finally:
        os.sched_setaffinity(0, everything)


def complete_batches(n_workers: int, n: int, *, at_work: bool) -> list[float]:
    """Microseconds of `obtain_samples` calls for which a batch was complete. The workers were all `at_work` on the next
    batches, as they are while they keep up with the learner; or they all waited, and the call had to wake them."""
    times = list[float]()
    with begin(AsyncSampler, n_workers, batch_T=16, batch_B=32, n_slots=8, mlp=False) as sampler:
        control, itr = sampler.run.memory.control, 0
        while len(times) < n:
            while control.pending(n_workers) if not at_work else not control.have_completed(itr + 2, n_workers):
                time.sleep(0.0002)
            is_wanted = not at_work or len(control.pending(n_workers)) == n_workers
            began = time.perf_counter_ns()
            sampler.obtain_samples(itr)
            itr += 1
            if is_wanted:
                times.append((time.perf_counter_ns() - began) / 1000)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one turn")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = machine()
    table = Table("", "figure", title="asynchronous sampling", caption=CAPTION)
    pixels: dict[str, Any] = {"env": PixelEnv, "mlp": False, "batch_T": 32, "batch_B": 16}
    turns = options.repeats, options.seconds
    for name, figures in {
        "idle learner, speed of AsyncSampler": idle_learner(*turns),
        "idle learner, pixels, speed of AsyncSampler": idle_learner(*turns, **pixels),
        "training takes as long, speed of AsyncSampler": equal_learner(*turns),
        "training takes as long, pixels, speed of AsyncSampler": equal_learner(*turns, **pixels),
    }.items():
        speed = ratios(figures["AsyncSampler"], figures["ParallelSampler"])
        wall = ratios(figures["ParallelSampler"], figures["AsyncSampler"])
        table.add_row(name, cell(speed, "{:.3f}"))
        table.add_row("  the same as wall clock", cell(wall, "{:.3f}"))
        results[name] = {"speed": spread(speed), "wall clock": spread(wall), "steps per second": figures}
    for n_workers, at_work in product((1, 2, 4), (True, False)):
        times = complete_batches(n_workers, 400, at_work=at_work)
        name = f"{n_workers} workers {'at work' if at_work else 'waiting'}"
        table.add_row(f"obtain_samples of a complete batch, {name}, µs", cell(times, "{:.0f}"))
        results[f"obtain_samples, {name}, us"] = spread(times)
    Console(width=120).print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
