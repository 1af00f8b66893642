"""How much faster is a small policy with inference="traced" and inference="numpy"?

CartPole-v1 with the 64-64 MLP. Each contestant is a separate process tree, and they take short turns in one run, in
random order. "One row" is `agent.step` alone, for 16 environments. The "ceiling in step" is that of `throughput.py`:
bare loops with torch's agent, one process per worker, where each process counts at the speed of the slowest.

`--before FOLDER` adds an earlier version of penstock, installed as the docstring of `compare.py` shows:

    python benchmarks/inference.py --before /tmp/old --json inference.json

`--layers` measures models with other layers instead, in a SerialSampler: the CPU time of all that a step takes.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch
from clocks import cpu_clocks, used
from compare import Turn, Version, cost
from rich.console import Console
from rich.table import Table
from throughput import Ceiling, Setting
from torch import nn
from turns import CAPTION, cell, machine, ratios
from workloads import ENV, Returning

import penstock
from penstock import CategoricalPgAgent, ConfigError, GaussianPgAgent, SerialSampler

ROW = "one row of 16"
CEILING = "ceiling in step"
SUBJECTS = {ROW: "one row of 16, mlp", "ParallelSampler": "ParallelSampler, mlp, T=128", "GpuSampler": "GpuSampler"}


class Contestant(Protocol):
    """Takes turns."""

    def turn(self, seconds: float) -> Turn: ...
    def close(self) -> None: ...


class BareLoops:
    """The ceiling. Its turn counts the steps of the slowest process for each process; the CPU time is of all steps."""

    def __init__(self) -> None:
        self._ceiling = Ceiling(Setting("mlp"))
        self._pids = [process.pid for process in self._ceiling._processes if process.pid is not None]

    def turn(self, seconds: float) -> Turn:
        before, began = cpu_clocks(self._pids), time.perf_counter()
        rate = self._ceiling.run(seconds)
        wall = time.perf_counter() - began
        in_step = self._ceiling.in_step
        return {"count": in_step * wall, "wall": wall, "cpu": used(before, cpu_clocks(self._pids)) * in_step / rate}

    def close(self) -> None:
        self._ceiling.close()


def contestants(subject: str, before: Path | None) -> dict[str, Contestant]:
    """All that measure `subject`, by name."""
    here = Path(penstock.__file__).absolute().parents[1]
    case, name = SUBJECTS[subject], "one row of 16, mlp" if subject == ROW else f"{subject}, mlp"
    found: dict[str, Contestant] = {} if before is None else {"before": Version(before, case)}
    found['"torch"'] = Version(here, case)
    for inference in ("traced", "numpy"):
        found[f'"{inference}"'] = Version(here, f'{name}, inference="{inference}"')
    if subject == "ParallelSampler":
        found[CEILING] = BareLoops()
    return found


def measure(subject: str, before: Path | None, repeats: int, seconds: float) -> dict[str, list[Turn]]:
    """`repeats` turns of each contestant."""
    found = contestants(subject, before)
    try:
        for name, contestant in found.items():
            missing = getattr(contestant, "missing", None)
            if missing is not None:
                raise SystemExit(f"{name} cannot measure {subject}: {missing}")
            contestant.turn(seconds)  # warm-up
        turns: dict[str, list[Turn]] = {name: [] for name in found}
        for _ in range(repeats):
            for name in random.sample(list(found), len(found)):
                turns[name].append(found[name].turn(seconds))
        return turns
    finally:
        for contestant in found.values():
            contestant.close()


def add_rows(table: Table, subject: str, turns: Mapping[str, list[Turn]]) -> None:
    """One row for each contestant."""
    rates = {name: [turn["count"] / turn["wall"] for turn in found] for name, found in turns.items()}
    for name, found in turns.items():
        cells = [cell(rates[name], "{:,.0f}"), cell([cost(turn, "cpu") * 1e6 for turn in found], "{:.2f}")]
        for other in ("before", CEILING):
            cells.append(cell(ratios(rates[name], rates[other]), "{:.2f}") if other in rates else "")
        table.add_row(subject, name, *cells)
        print(subject, name, *cells, sep=" | ")


# ---- single layers -----------------------------------------------------------------------------------


class Mlp(nn.Module):
    """The 64-64 MLP with `layer` in place of Tanh."""

    def __init__(self, observation_space: Any, action_space: Any, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(observation_space.shape[0], 64), layer(), nn.Linear(64, 64), layer())
        self.policy, self.value = nn.Linear(64, int(getattr(action_space, "n", 1))), nn.Linear(64, 1)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features = self.body(observation)
        return self.policy(features), self.value(features).squeeze(-1)


class Gaussian(Mlp):
    """For continuous actions: with one log_std for all observations, or with a clamped one for each."""

    def __init__(self, observation_space: Any, action_space: Any, is_clamped: bool) -> None:
        super().__init__(observation_space, action_space, nn.Tanh)
        self.is_clamped, self.layer, self.log_std = is_clamped, nn.Linear(64, 1), nn.Parameter(torch.zeros(1, 1))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features = self.body(observation)
        mean = self.policy(features)
        log_std = self.layer(features).clamp(-20, 2) if self.is_clamped else self.log_std.expand_as(mean)
        return mean, log_std, self.value(features).squeeze(-1)


class GridCnn(nn.Module):
    """Three small convolutions, as for the grid worlds of 7 x 7 cells."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        one, two, three = nn.Conv2d(3, 16, 2), nn.Conv2d(16, 32, 2), nn.Conv2d(32, 64, 2)
        self.body = nn.Sequential(one, nn.ReLU(), two, nn.ReLU(), three, nn.ReLU(), nn.Flatten())
        self.policy, self.value = nn.Linear(1024, int(action_space.n)), nn.Linear(1024, 1)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features = self.body(observation.float() / 10)
        return self.policy(features), self.value(features).squeeze(-1)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Tanh": nn.Tanh,
    "ELU": nn.ELU,
    "GELU": nn.GELU,
    "LayerNorm": partial(nn.LayerNorm, 64),
    "SiLU": nn.SiLU,
    "LeakyReLU": nn.LeakyReLU,
}
#: By name: environment, agent, model.
MODELS: dict[str, tuple[Any, Any, Any]] = {
    **{name: (ENV, CategoricalPgAgent, partial(Mlp, layer=layer)) for name, layer in LAYERS.items()},
    "expand_as": (partial(gym.make, "Pendulum-v1"), GaussianPgAgent, partial(Gaussian, is_clamped=False)),
    "clamp": (partial(gym.make, "Pendulum-v1"), GaussianPgAgent, partial(Gaussian, is_clamped=True)),
    "convolutions": (
        partial(Returning, partial(gym.spaces.Box, 0, 10, (3, 7, 7), np.uint8)),
        CategoricalPgAgent,
        GridCnn,
    ),
}


def sampler_of(name: str, inference: Any, n_envs: int) -> SerialSampler | None:
    """A sampler of this model, or None if `inference` cannot run it."""
    env, agent_cls, model = MODELS[name]
    sampler = SerialSampler(env, batch_T=32, batch_B=n_envs)
    try:
        sampler.initialize(agent_cls(model, inference=inference), seed=0)
    except ConfigError as error:
        print(f"{name}: {error}")
        sampler.shutdown()
        return None
    return sampler


def measure_layers(n_envs: int, repeats: int, seconds: float) -> dict[str, dict[str, list[float]]]:
    """CPU µs of a step for each model and each `inference` that can run it."""
    torch.set_num_threads(1)
    kinds = ("torch", "traced", "numpy")
    print(f"{n_envs} environments, CPU µs a step", *kinds, "torch / traced", "traced / numpy", sep=" | ")
    results: dict[str, dict[str, list[float]]] = {}
    for name in MODELS:
        samplers = {kind: made for kind in kinds if (made := sampler_of(name, kind, n_envs)) is not None}
        results[name] = found = {kind: list[float]() for kind in samplers}
        for itr in range(repeats + 1):  # the first is for warming up
            for kind in random.sample(list(samplers), len(samplers)):
                began, steps = time.process_time(), 0
                while (took := time.process_time() - began) < seconds or not steps:
                    samplers[kind].obtain_samples(itr)
                    steps += 32 * n_envs
                found[kind] += [1e6 * took / steps] if itr else []
        for sampler in samplers.values():
            sampler.shutdown()
        cells = [cell(found[kind], "{:.2f}") if kind in found else "-" for kind in kinds]
        for one, other in (kinds[:2], kinds[1:]):
            cells.append(cell(ratios(found[one], found[other]), "{:.2f}") if other in found else "-")
        print(name, *cells, sep=" | ", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="folder with an earlier version of penstock")
    parser.add_argument("--subjects", nargs="+", default=list(SUBJECTS), choices=list(SUBJECTS))
    parser.add_argument("--repeats", type=int, default=24, help="turns of each contestant")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each turn, at least")
    parser.add_argument("--layers", action="store_true", help="measure models with other layers instead")
    parser.add_argument("--n-envs", type=int, default=16, help="with --layers")
    parser.add_argument("--json", help="write the machine and all turns to this file")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    table = Table(title='Small policies: steps/s; for "one row", rows/s', caption=CAPTION)
    for heading in ("", "inference", "steps/s", "CPU µs a step", "of before", f"of the {CEILING}"):
        table.add_column(heading, justify="left" if heading in ("", "inference") else "right")
    if args.layers:
        results |= measure_layers(args.n_envs, args.repeats, args.seconds)
    else:
        for subject in args.subjects:
            before = None if args.before is None else args.before.resolve()
            results[subject] = measure(subject, before, args.repeats, args.seconds)
            add_rows(table, subject, results[subject])
        Console(width=160).print(table)
    if args.json:
        Path(args.json).write_text(json.dumps({**machine(), "results": results}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
