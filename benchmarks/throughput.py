"""Throughput on CartPole-v1: how close do the samplers come to a bare loop?

The ceiling is a bare loop: one process per worker, pinned to the same CPU, with the same environments and policy.
It records nothing. Ceiling and samplers take short turns in random order, in one run, and are compared turn by turn.

With the MLP, the ceiling acts with penstock's own agent, which is faster than `torch.distributions`. "By hand" is the
same loop with `torch.distributions`, as training scripts have it. `SerialSampler` is compared with the bare loop in one
process.

A batch waits for its slowest worker, but bare processes do not wait for each other. On a shared host one CPU may be
much slower than another for a while. Therefore the table also has the ceiling in step: the speed of the slowest bare
process, times the number of processes. On a quiet machine both ceilings agree.

    python benchmarks/throughput.py --json throughput.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributions import Categorical
from turns import CAPTION, machine, ratios, spread
from workloads import ENV, ActorCritic

from penstock import Agent, CategoricalPgAgent, ParallelSampler, RandomAgent, Sampler, SerialSampler, TorchAgent
from penstock.workers.affinity import limit_threads, pin, usable_cpus
from penstock.workers.plan import split


@dataclass(frozen=True)
class Setting:
    """One row of the benchmark."""

    agent: str  # "mlp" or "random"
    batch_B: int = 32
    batch_T: int = 128
    n_workers: int = 2

    def make_agent(self) -> Agent:
        return CategoricalPgAgent(ActorCritic) if self.agent == "mlp" else RandomAgent()


Act = Callable[[], Sequence[int]]  #: the actions of one row
ONE_PROCESS = "ceiling, one process"  #: what SerialSampler is compared with
BY_HAND = "ceiling, by hand"


# ---- the ceiling -------------------------------------------------------------------------------


def _bare_process(pipe: Any, n_envs: int, cpu: int | None, setting: Setting, by_hand: bool) -> None:
    """For each number that the pipe sends, step `n_envs` environments for as many seconds. Reply with steps/s."""
    if cpu is not None:
        pin([cpu])
    limit_threads(1)
    envs = [ENV() for _ in range(n_envs)]
    agent = setting.make_agent()
    agent.initialize(envs[0].observation_space, envs[0].action_space, seed=0)
    agent.seed_columns([np.random.default_rng(i) for i in range(n_envs)])
    agent.sample_mode(0)
    observation = np.stack([env.reset(seed=i)[0] for i, env in enumerate(envs)])
    prev_action, prev_reward = np.zeros(n_envs, np.int64), np.zeros(n_envs, np.float32)

    def act() -> Sequence[int]:
        actions: list[int] = agent.step(observation, prev_action, prev_reward).action.tolist()
        return actions

    run = _bare_loop if setting.agent == "mlp" else _bare_loop_random
    choose = _by_hand(cast(TorchAgent, agent).model, observation) if by_hand else act
    while (seconds := pipe.recv()) is not None:
        began = time.monotonic()
        steps = run(envs, choose, observation, seconds)
        pipe.send(steps / (time.monotonic() - began))


def _by_hand(model: nn.Module, observation: Any) -> Act:
    """Actions of the same network, drawn by `torch.distributions`."""
    model_input = torch.from_numpy(observation)

    def act() -> list[int]:
        with torch.no_grad():
            logits, _ = model(model_input)
            actions: list[int] = Categorical(logits=logits).sample().tolist()
            return actions

    return act


def _bare_loop(envs: Sequence[gym.Env[Any, Any]], act: Act, observation: Any, seconds: float) -> int:
    steps = [env.step for env in envs]
    rows, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for b, (step, action) in enumerate(zip(steps, act(), strict=True)):
            seen, _, terminated, truncated, _ = step(action)
            if terminated or truncated:
                seen, _ = envs[b].reset()
            observation[b] = seen
        rows += 1
    return rows * len(envs)


def _bare_loop_random(envs: Sequence[gym.Env[Any, Any]], act: Act, observation: Any, seconds: float) -> int:
    """The bare loop for a policy that ignores observations."""
    steps = [env.step for env in envs]
    rows, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for b, (step, action) in enumerate(zip(steps, act(), strict=True)):
            _, _, terminated, truncated, _ = step(action)
            if terminated or truncated:
                envs[b].reset()
        rows += 1
    return rows * len(envs)


class Ceiling:
    """The bare processes."""

    def __init__(self, setting: Setting, *, by_hand: bool = False) -> None:
        cpus = usable_cpus()
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for i, columns in enumerate(split(setting.batch_B, setting.n_workers)):
            here, there = context.Pipe()
            cpu = cpus[i % len(cpus)] if cpus else None
            process = context.Process(
                target=_bare_process, args=(there, len(columns), cpu, setting, by_hand), daemon=True
            )
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, seconds: float) -> float:
        """Environment steps per second of all processes together. Sets `in_step`, the other ceiling."""
        for pipe in self._pipes:
            pipe.send(seconds)
        rates: list[float] = [pipe.recv() for pipe in self._pipes]
        self.in_step = min(rates) * len(rates)
        return sum(rates)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(5)


# ---- the samplers ------------------------------------------------------------------------------


class Sampling:
    """An initialized sampler."""

    def __init__(self, cls: type[Sampler], setting: Setting, env_fn: Callable[..., Any] = ENV, **options: Any) -> None:
        shape = {"batch_T": setting.batch_T, "batch_B": setting.batch_B, "n_workers": setting.n_workers}
        self.sampler = cls(env_fn, **shape, **options)
        self.sampler.initialize(setting.make_agent(), seed=0, bootstrap_value=setting.agent == "mlp")
        self._batch_steps = setting.batch_T * setting.batch_B
        self._itr = 0

    def run(self, seconds: float) -> float:
        """Environment steps per second over whole batches."""
        began, batches = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            self.sampler.obtain_samples(self._itr)
            self._itr += 1
            batches += 1
        return batches * self._batch_steps / (time.monotonic() - began)

    def close(self) -> None:
        self.sampler.shutdown()


def measure(
    setting: Setting, seconds: float, repeats: int, serial: bool = True, say: Callable[[str], None] = print
) -> dict[str, list[float]]:
    """Steps per second, `repeats` figures each: "ceiling", "ceiling in step", "ParallelSampler" and, if
    `serial`, "SerialSampler", "ceiling, one process" and "ceiling, by hand"."""
    # SerialSampler is measured on one core. And torch's idle threads spin for milliseconds, which would slow down the
    # contestant that has the next turn.
    limit_threads(1)
    ceiling = Ceiling(setting)
    contestants: dict[str, Ceiling | Sampling] = {"ceiling": ceiling}
    try:
        contestants["ParallelSampler"] = Sampling(ParallelSampler, setting)
        if serial:
            contestants[ONE_PROCESS] = Ceiling(replace(setting, n_workers=1))
            contestants["SerialSampler"] = Sampling(SerialSampler, setting)
            if setting.agent == "mlp":
                contestants[BY_HAND] = Ceiling(setting, by_hand=True)
        for contestant in contestants.values():
            contestant.run(seconds / 4)  # warm-up
        figures: dict[str, list[float]] = {name: [] for name in ("ceiling", "ceiling in step", *contestants)}
        for repeat in range(repeats):
            order = list(contestants)
            random.shuffle(order)
            for name in order:
                figures[name].append(contestants[name].run(seconds))
            figures["ceiling in step"].append(ceiling.in_step)
            if (repeat + 1) % 10 == 0:
                say(f"  {setting.agent}: turn {repeat + 1} of {repeats}")
        return figures
    finally:
        for contestant in contestants.values():
            contestant.close()


def measure_pair(
    batch_B: int, batch_T: int, n_workers: int, seconds: float = 2.0, repeats: int = 3
) -> dict[str, list[float]]:
    """`measure` for the MLP policy, with ceiling and ParallelSampler alone. Prints nothing."""
    setting = Setting("mlp", batch_B, batch_T, n_workers)
    return measure(setting, seconds, repeats, serial=False, say=lambda text: None)


# ---- the table ---------------------------------------------------------------------------------


def summarize(setting: Setting, figures: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row per contestant: steps/s, shares of its ceilings turn by turn, and µs that a step of one worker takes
    longer than in the ceiling in step."""
    rows = []
    for name, rates in figures.items():
        is_alone = name in ("SerialSampler", ONE_PROCESS)
        workers = 1 if is_alone else setting.n_workers
        shares = ratios(rates, figures[ONE_PROCESS if is_alone else "ceiling"])
        in_step = shares if is_alone else ratios(rates, figures["ceiling in step"])
        cost = [workers * (1 - share) / rate * 1e6 for rate, share in zip(rates, in_step, strict=True)]
        rows.append(
            {
                "agent": setting.agent,
                "who": name,
                "steps_per_s": spread(rates),
                "share_of_ceiling": spread(shares),
                "share_in_step": spread(in_step),
                "framework_us_per_step": spread(cost),
            }
        )
        if BY_HAND in figures and not is_alone:
            rows[-1]["share_by_hand"] = spread(ratios(rates, figures[BY_HAND]))
    return rows


def print_table(rows: Sequence[dict[str, Any]], title: str) -> None:
    table = Table(title=title, caption=CAPTION)
    headings = ("policy", "", "steps/s", "of the ceiling", "of it in step", "beyond it, µs a step", "of it by hand")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("policy", "") else "right")
    columns = {
        "steps_per_s": "{:,.0f}",
        "share_of_ceiling": "{:.1%}",
        "share_in_step": "{:.1%}",
        "framework_us_per_step": "{:.2f}",
        "share_by_hand": "{:.1%}",
    }
    for row in rows:
        cells = []
        for name, form in columns.items():
            if name not in row:
                continue
            middle, low, high = (form.format(row[name][key]) for key in ("median", "low", "high"))
            cells.append(f"{middle} ({low} to {high})")
        table.add_row(row["agent"], row["who"], *cells)
    Console(width=180).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", nargs="+", default=["mlp", "random"], choices=["mlp", "random"])
    parser.add_argument("--batch-B", type=int, default=32)
    parser.add_argument("--batch-T", type=int, default=128)
    parser.add_argument("--n-workers", type=int, default=max(1, len(usable_cpus())))
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one turn")
    parser.add_argument("--repeats", type=int, default=30, help="turns of each contestant")
    parser.add_argument("--json", help="write settings, machine and all figures to this file")
    args = parser.parse_args()

    results, rows = [], []
    for agent in args.agents:
        setting = Setting(agent, args.batch_B, args.batch_T, args.n_workers)
        figures = measure(setting, args.seconds, args.repeats)
        results.append({"setting": asdict(setting), "steps_per_s": figures})
        rows += summarize(setting, figures)
    print_table(rows, f"CartPole-v1, B={args.batch_B}, T={args.batch_T}, {args.n_workers} workers")
    if args.json:
        content = {**machine(), "seconds": args.seconds, "results": results, "table": rows}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)


if __name__ == "__main__":
    main()
