"""Checks: the cost of each check on data, in nanoseconds per environment step.

The benchmark steps environments and writes rows as a collector does, with the loop over environments in Python. It
times the loop as it is, and with one check removed from its source, in alternating order. The figure is the median
difference. An option is compared with the same code without the option. If the loop is compiled, these checks are a
few comparisons in C.

    python benchmarks/checks.py --env CartPole-v1
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import gymnasium as gym
import numpy as np
from rich.console import Console
from rich.table import Table
from turns import machine

from penstock import RandomAgent
from penstock.agents.outputs import write_action
from penstock.buffers.native import put_row
from penstock.columns import SingleColumns, Start, stepping
from penstock.envs import CountingEnv
from penstock.envs.checks import Checks
from penstock.workers.control import ControlBlock

_NOISE = "nothing: the noise"

#: Checks in the loop over environments: the text to remove from its source, and the text to put there instead.
_CUTS = {
    "info is a dict": (" and info.__class__ is dict", ""),
    "terminated and truncated are bools": ("terminated.__class__ is truncated.__class__ is bool", "True"),
    "step returns five values": ("type(result) is not tuple or len(result) != size", "False"),
}


def step_without(*checks: str) -> Any:
    """`SingleColumns.step` with a loop that lacks these checks."""
    loop = stepping.PYTHON["step_ordinary"]
    source = "\n".join(map(inspect.getsource, (loop, stepping._is_ordinary)))
    for check in checks:
        old, new = _CUTS[check]
        if source.count(old) != 1:
            raise SystemExit(f"{loop.__name__} has changed: update the text of {check!r} in {__file__}")
        source = source.replace(old, new)
    names: dict[str, Any] = dict(loop.__globals__)
    exec(compile("from __future__ import annotations\n" + source, "<without checks>", "exec"), names)
    own = SingleColumns.step
    return FunctionType(
        own.__code__, {**own.__globals__, "step_ordinary": names[loop.__name__]}, "step", own.__defaults__
    )


def write_step_unchecked(self: SingleColumns, arrays: Any, rewards: Any, t: int) -> None:
    if self.checks or not put_row(arrays, t, self.observations):
        self.write_row(arrays, t)
    rewards[t] = self.rewards


def write_action_unchecked(row: Any, action: Any) -> None:
    row[...] = action


class Contestant:
    """Environments, and one way to step them."""

    def __init__(self, env_fn: Callable[[], Any], n_envs: int, methods: dict[str, Any], write: Any, checks: Checks):
        envs = [env_fn() for _ in range(n_envs)]
        progress = ControlBlock(1, 1, shared=False).progress(0)
        self.columns = type("Columns", (SingleColumns,), methods)(envs, range(n_envs), progress, checks)
        self.columns.reset(range(n_envs), [Start(e) for e in range(n_envs)])
        agent = RandomAgent()
        agent.initialize(envs[0].observation_space, envs[0].action_space)
        agent.seed_columns([np.random.default_rng(i) for i in range(n_envs)])
        self.actions = [agent.step(None, None, None).action for _ in range(64)]  # type: ignore[arg-type]
        self.action_row, self.write_action = np.zeros_like(self.actions[0]), write
        self.reward = np.zeros((1, n_envs), np.float32)
        space = envs[0].observation_space
        self.observation = np.zeros((1, n_envs, *space.shape), space.dtype)

    def seconds(self, n_rows: int) -> float:
        """Seconds that `n_rows` rows take."""
        columns, actions, row, write = self.columns, self.actions, self.action_row, self.write_action
        began = time.perf_counter()
        for t in range(n_rows):
            write(row, actions[t % 64])
            if (events := columns.step([row])) is not None:
                columns.reset(events.over)
            columns.write_step(self.observation, self.reward, 0)
        return time.perf_counter() - began


def make_pairs(env_fn: Callable[[], Any], n_envs: int) -> dict[str, tuple[Contestant, Contestant]]:
    """For each check, by name: a contestant with the check, and one without."""

    def contestant(methods: dict[str, Any] | None = None, write: Any = write_action, **options: bool) -> Contestant:
        return Contestant(env_fn, n_envs, {"step": step_without(), **(methods or {})}, write, Checks(**options))

    rewards = {"write_step": write_step_unchecked}
    without_check = {name: contestant({"step": step_without(name)}) for name in _CUTS}
    without_check["rewards are numbers"] = contestant(rewards)
    without_check["actions have shape and dtype of the row"] = contestant(write=write_action_unchecked)
    without_check["all of these"] = contestant({"step": step_without(*_CUTS), **rewards}, write_action_unchecked)
    pairs = {name: (contestant(), without) for name, without in without_check.items()}
    pairs[_NOISE] = contestant(), contestant()
    pairs["check_finite=True"] = contestant(check_finite=True), contestant()
    pairs["debug=True"] = contestant(debug=True), contestant()
    return pairs


def measure(pairs: dict[str, tuple[Contestant, Contestant]], repeats: int, n_rows: int) -> dict[str, list[float]]:
    """Differences in seconds, by check, one for each repeat."""
    differences: dict[str, list[float]] = {name: [] for name in pairs}
    for repeat in range(repeats):
        for name in random.sample(list(pairs), len(pairs)):
            checked, unchecked = pairs[name]
            if repeat % 2:
                without, with_it = unchecked.seconds(n_rows), checked.seconds(n_rows)
            else:
                with_it, without = checked.seconds(n_rows), unchecked.seconds(n_rows)
            differences[name].append(with_it - without)
    return differences


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", help="an environment id; by default environments that only count")
    parser.add_argument("--n-envs", type=int, default=16)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--json", help="write machine and all figures to this file")
    args = parser.parse_args(arguments)

    pairs = make_pairs((lambda: gym.make(args.env)) if args.env else lambda: CountingEnv(length=200), args.n_envs)
    measure(pairs, 2, args.rows)  # warm-up
    differences = measure(pairs, args.repeats, args.rows)
    steps = args.rows * args.n_envs
    as_it_is = statistics.median(pairs[_NOISE][0].seconds(args.rows) for _ in range(9)) / steps * 1e9
    table = Table(
        title=f"{args.env or 'CountingEnv'}, {args.n_envs} environments, ns per environment step",
        caption=f"of {args.repeats} differences; without options a step takes {as_it_is:,.0f} ns",
    )
    for heading, justify in (("check", "left"), ("median", "right"), ("middle half", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for name, seconds in differences.items():
        low, middle, high = (q / steps * 1e9 for q in statistics.quantiles(seconds, n=4))
        table.add_row(name, f"{middle:.0f}", f"{low:.0f} to {high:.0f}")
    Console(width=110).print(table)
    if args.json:
        ns = {name: [s / steps * 1e9 for s in seconds] for name, seconds in differences.items()}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({**machine(), "ns_per_step": ns}, file, indent=1)


if __name__ == "__main__":
    main()
