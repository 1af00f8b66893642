"""ShmVectorEnv on environments of several agents, and SuperSuit's concat_vec_envs_v1, with equal processes and actions.

    python benchmarks/seats_vector.py idle3 idle20 spread

`idle3`, `idle20`: 8 games of 3 and of 20 agents that take no time.
`spread`: 8 games of mpe2's simple_spread, which has 3 agents and takes most of the time itself.

Each contestant has one or two processes that step games. SuperSuit with one steps them in the main process, and
ShmVectorEnv in a worker. Contestants take turns in one run. A ratio is computed for each turn. A step is one step of
one agent. CPU time is that of all processes of a contestant.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from clocks import cpu_clocks, used
from gymnasium import spaces
from rich.console import Console
from rich.table import Table
from turns import CAPTION, Figures, cell, machine, ratios

from penstock.vector import ShmVectorEnv

N_GAMES, T = 8, 64
Clocked = dict[str, Figures]  #: by clock


class IdleGame:
    """A game of `k` agents that takes no time: it returns the same dicts again and again. Nobody ends."""

    metadata: dict[str, Any] = {}  # noqa: RUF012
    render_mode = None

    def __init__(self, k: int) -> None:
        self.possible_agents = [f"agent_{i}" for i in range(k)]
        self.agents = list(self.possible_agents)
        self._space, self._actions = spaces.Box(-np.inf, np.inf, (18,), np.float32), spaces.Discrete(5)
        observation = {agent: np.zeros(18, np.float32) for agent in self.agents}
        flags, self._infos = dict.fromkeys(self.agents, False), {agent: {} for agent in self.agents}
        self._result = observation, dict.fromkeys(self.agents, 0.0), flags, dict(flags), self._infos

    @property
    def unwrapped(self) -> IdleGame:
        return self

    def observation_space(self, agent: str) -> spaces.Box:
        return self._space

    def action_space(self, agent: str) -> spaces.Discrete:
        return self._actions

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        return self._result[0], self._infos

    def step(self, actions: dict[str, Any]) -> tuple[Any, ...]:
        return self._result

    def render(self) -> None:
        """Nothing is shown."""

    def close(self) -> None:
        """There is nothing to close."""


def spread() -> Any:
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env()


class Contestant:
    """Steps a vector environment with random actions, and knows its processes."""

    def __init__(self, envs: Any, pids: Sequence[int], n_actions: int = 5) -> None:
        self.envs, self.pids = envs, pids
        self.actions = np.random.default_rng(0).integers(0, n_actions, (T, envs.num_envs))
        envs.reset(seed=0)

    def batch(self) -> int:
        for action in self.actions:
            self.envs.step(action)
        return int(self.actions.size)


def contestants(make: Any) -> dict[str, Contestant]:
    """All, by name. SuperSuit comes first: it forks."""
    import os

    import supersuit
    from supersuit.vector import MarkovVectorEnv

    here, found = os.getpid(), {}
    for n in (2, 1):
        theirs = supersuit.concat_vec_envs_v1(MarkovVectorEnv(make()), N_GAMES, num_cpus=n)
        pids = [process.pid for process in getattr(theirs, "procs", ())]
        found[f"SuperSuit, {n}"] = Contestant(theirs, [here, *pids])
    for n in (2, 1):
        ours = ShmVectorEnv([make] * N_GAMES, n_workers=n)
        found[f"ShmVectorEnv, {n}"] = Contestant(ours, [here, *ours.worker_pids])
    return found


def measure(make: Any, repeats: int, seconds: float) -> Clocked:
    """Microseconds per step of one agent, wall and CPU, of every contestant in every round."""
    everyone = contestants(make)
    figures: Clocked = {clock: {name: [] for name in everyone} for clock in ("wall", "cpu")}
    try:
        for contestant in everyone.values():
            contestant.batch()
        for repeat in range(repeats):
            for name in np.random.default_rng(repeat).permutation(list(everyone)):
                contestant, steps = everyone[name], 0
                began, clocks = time.monotonic(), cpu_clocks(contestant.pids)
                while time.monotonic() - began < seconds:
                    steps += contestant.batch()
                figures["wall"][name].append((time.monotonic() - began) * 1e6 / steps)
                figures["cpu"][name].append(used(clocks, cpu_clocks(contestant.pids)) * 1e6 / steps)
    finally:
        for contestant in everyone.values():
            contestant.envs.close()
    return figures


def show(title: str, figures: Clocked) -> None:
    """Print the figures, and how many times faster each is than SuperSuit with as many processes."""
    table = Table(title=title, caption=CAPTION)
    for heading in ("processes", "wall µs an agent step", "CPU µs", "times faster, wall", "CPU"):
        table.add_column(heading, justify="left" if heading == "processes" else "right")
    for name in figures["wall"]:
        yardstick = f"SuperSuit, {name[-1]}"
        rows = [figures[clock] for clock in ("wall", "cpu")]
        faster = [cell(ratios(row[yardstick], row[name]), "{:.2f}") for row in rows]
        table.add_row(name, *(cell(row[name], "{:.2f}") for row in rows), *faster)
    Console(width=140).print(table)


GAMES = {"idle3": partial(IdleGame, 3), "idle20": partial(IdleGame, 20), "spread": spread}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help=f"of {', '.join(GAMES)}; all by default")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.4, help="minimum length of a turn")
    parser.add_argument("--json", help="write machine and all figures to this file")
    args = parser.parse_args(arguments)
    if unknown := set(args.what) - set(GAMES):
        parser.error(f"there is no measurement {', '.join(unknown)}")
    results = {}
    for name in args.what or GAMES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SuperSuit and Gymnasium warn of each other
            results[name] = measure(GAMES[name], args.repeats, args.seconds)
        show(name, results[name])
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({**machine(), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
