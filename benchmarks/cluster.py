"""What does it cost to sample on a cluster? `RaySampler` on this machine, beside the sampler inside it and RLlib.

    python benchmarks/cluster.py speed slow --json cluster.json
    python benchmarks/cluster.py --simulate 1000                    # no cluster: a model of one

One Ray serves all contestants. They take short turns in one run, in random order, and wait while others have theirs.

- `speed`, `batched`, `instant`, `pixels`: one shard, with one worker. They sample CartPole, Gymnasium's vectorized
  CartPole, an environment that takes no time, and images, in this order. "Inside": the same sampler in an actor of Ray,
  which returns nothing. "One at a time": `obtain_samples`. "Pieces": `pieces(max_in_flight=2)`. "RLlib":
  `EnvRunnerGroup` with one runner for the same number of environments, on the new API stack, with random actions; if
  `pip install "ray[rllib]"` was done.
- `slow`: four shards that sleep in their steps; one is 10 times slower, and `min_ready=3`. The ratio is of batches.
- `puts`: how often parameters are put into Ray's object store, for 1, 2 and 4 shards.
- `memory`: the memory of this process, while it samples `--batches` batches.

`--simulate N` computes the rate of clusters of up to N shards, each on one node. It measures what an order and a reply
cost this process, and how long a new actor takes; the other constants are assumptions, which it prints.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

# Ray reads these when it is imported. All its processes get the priority of this one: by default Ray lowers that of
# actors, and penstock's shards undo it.
os.environ |= {
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}

import cloudpickle
import environments
import gymnasium as gym
import psutil
import ray
import workloads
from clocks import cpu_clocks, processes, used
from cluster_model import simulate
from environments import SleepingEnv
from rich.console import Console
from rich.table import Table
from turns import CAPTION, cell, machine, ratios
from workloads import ActorCritic, Pixels

from penstock import Affinity, CategoricalPgAgent, ParallelSampler, RandomAgent, SerialSampler
from penstock.distributed import Piece, RaySampler
from penstock.distributed.placement import actor_options, connect
from penstock.envs import BatchedCartPole

PARTS = ("speed", "batched", "instant", "pixels", "slow", "puts", "memory")
INSIDE, ONE, PIECES, RLLIB = "inside", "one at a time", "pieces", "RLlib"
N_CPUS = 16  # that Ray may give away: contestants wait while others have their turn

Turn = dict[str, float]


@dataclass(frozen=True)
class Work:
    """What one shard samples."""

    env_fn: Callable[..., Any]
    batch_T: int
    batch_B: int
    vectorized: str = ""  #: for RLlib: the environment whose vectorized form `env_fn` makes

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the sampler."""
        sizes = {"env_fn": self.env_fn, "batch_T": self.batch_T, "batch_B": self.batch_B, "n_workers": 1}
        return {**sizes, "batched": True} if self.vectorized else sizes

    @property
    def steps(self) -> int:
        return self.batch_T * self.batch_B


WORKS = {
    "speed": Work(partial(gym.make, "CartPole-v1"), 128, 32),
    "batched": Work(BatchedCartPole, 128, 32, "CartPole-v1"),
    "instant": Work(partial(SleepingEnv, 0.0), 128, 32),
    "pixels": Work(Pixels, 64, 16),
}


# ---- contestants -----------------------------------------------------------------------------------


class Contestant(Protocol):
    """Takes turns."""

    def turn(self, seconds: float) -> Turn: ...
    def close(self) -> None: ...


@contextmanager
def metered(turn: Turn) -> Iterator[None]:
    """Add the CPU seconds of this process and its descendants, which are Ray's processes too."""
    before = cpu_clocks(processes())
    yield
    turn["cpu"] = used(before, cpu_clocks(processes()))


def repeated(batch: Callable[[], int], seconds: float) -> Turn:
    """Call `batch`, which returns a number of steps, for so many seconds."""
    began, steps, batches = time.perf_counter(), 0, 0
    while time.perf_counter() - began < seconds:
        steps, batches = steps + batch(), batches + 1
    return {"steps": steps, "batches": batches, "wall": time.perf_counter() - began}


def metered_turn(batch: Callable[[], int], seconds: float) -> Turn:
    """`repeated`, with the CPU seconds."""
    cost: Turn = {}
    with metered(cost):
        turn = repeated(batch, seconds)
    return turn | cost


class InActor:
    """What runs in the actor of `Inside`."""

    def __init__(self, work: Work) -> None:
        self._sampler = ParallelSampler(**work.options)
        self._sampler.initialize(RandomAgent(), seed=0, affinity=Affinity(pin=False))
        self._steps, self._itr = work.steps, 0

    def batch(self) -> int:
        self._sampler.obtain_samples(self._itr)
        self._itr += 1
        return self._steps

    def turn(self, seconds: float) -> Turn:
        return repeated(self.batch, seconds)

    def close(self) -> None:
        self._sampler.shutdown()


class Inside:
    """The sampler of a shard, in an actor with the same options."""

    def __init__(self, work: Work) -> None:
        self._actor = ray.remote(InActor).options(**actor_options({"CPU": 1})).remote(work)

    def turn(self, seconds: float) -> Turn:
        cost: Turn = {}
        with metered(cost):
            turn: Turn = ray.get(self._actor.turn.remote(seconds))
        return turn | cost

    def close(self) -> None:
        ray.get(self._actor.close.remote())
        ray.kill(self._actor)


class Batches:
    """`obtain_samples` of a sampler."""

    def __init__(self, **options: Any) -> None:
        self.sampler = RaySampler(**options)
        self.sampler.initialize(RandomAgent(), seed=0)
        self.steps, self._itr = self.sampler.batch_T * self.sampler.batch_B, 0

    def batch(self) -> int:
        self.sampler.obtain_samples(self._itr)
        self._itr += 1
        return self.steps

    def turn(self, seconds: float) -> Turn:
        return metered_turn(self.batch, seconds)

    def close(self) -> None:
        self.sampler.shutdown()


class Pieces(Batches):
    """`pieces` of a sampler."""

    def turn(self, seconds: float) -> Turn:
        pieces = self.sampler.pieces(max_in_flight=2)
        next(pieces)  # from now on, an order always waits in the shard
        turn = metered_turn(partial(self._take, pieces), seconds)
        pieces.close()
        self.batch()  # the shard has done its last orders too
        return turn

    def _take(self, pieces: Iterator[Piece]) -> int:
        next(pieces)
        return self.steps


class EnvRunners:
    """RLlib."""

    def __init__(self, work: Work) -> None:
        from ray.rllib.algorithms.ppo import PPOConfig
        from ray.rllib.env.env_runner_group import EnvRunnerGroup
        from ray.tune import register_env

        register_env("ours", lambda _: work.env_fn())
        config = (
            PPOConfig()
            .environment(work.vectorized or "ours")
            .env_runners(
                num_env_runners=1,
                num_envs_per_env_runner=work.batch_B,
                rollout_fragment_length=work.batch_T,
                gym_env_vectorize_mode=gym.VectorizeMode.VECTOR_ENTRY_POINT if work.vectorized else "sync",
            )
        )
        self._group = EnvRunnerGroup(config=config, local_env_runner=False)

    def batch(self) -> int:
        from ray.rllib.execution.rollout_ops import synchronous_parallel_sample

        episodes = synchronous_parallel_sample(worker_set=self._group, random_actions=True, _uses_new_env_runners=True)
        return sum(map(len, episodes))

    def turn(self, seconds: float) -> Turn:
        return metered_turn(self.batch, seconds)

    def close(self) -> None:
        self._group.stop()


def contestants(part: str) -> dict[str, Callable[[], Contestant]]:
    """What takes turns in this part, by name; the first is the yardstick."""
    if part == "slow":
        seconds = 0.002
        options: dict[str, Any] = {
            "env_fn": SleepingEnv,
            "batch_T": 32,
            "n_workers": 1,
            "sampler_cls": SerialSampler,
            "max_decorrelation_steps": 0,
        }
        equal, slow = [{"seconds": seconds}], [{"seconds": 10 * seconds}]
        return {
            "3 shards": lambda: Batches(**options, n_shards=3, batch_B=3, env_kwargs=equal * 3),
            "4 shards": lambda: Batches(**options, n_shards=4, batch_B=4, env_kwargs=equal * 4),
            "4 shards, one slow, min_ready=3": lambda: Batches(
                **options, n_shards=4, batch_B=4, env_kwargs=equal * 3 + slow, min_ready=3
            ),
        }
    work = WORKS[part]
    one = {**work.options, "n_shards": 1}
    found: dict[str, Callable[[], Contestant]] = {
        INSIDE: lambda: Inside(work),
        ONE: lambda: Batches(**one),
        PIECES: lambda: Pieces(**one),
    }
    return {**found, RLLIB: lambda: EnvRunners(work)}


def measure(part: str, repeats: int, seconds: float) -> dict[str, list[Turn]]:
    """`repeats` turns of each contestant. Without RLlib, that contestant is left out."""
    running: dict[str, Contestant] = {}
    try:
        for name, make in contestants(part).items():
            try:
                running[name] = make()
            except ImportError as error:
                print(f"{name} takes no part: {error}", file=sys.stderr)
                continue
            running[name].turn(seconds)  # warm-up
        turns: dict[str, list[Turn]] = {name: [] for name in running}
        for _ in range(repeats):
            for name in random.sample(list(running), len(running)):
                turns[name].append(running[name].turn(seconds))
        return turns
    finally:
        for contestant in running.values():
            contestant.close()


def show(part: str, turns: dict[str, list[Turn]]) -> None:
    """Print the figures of a part as a table."""
    yardstick, unit = next(iter(turns)), "batches" if part == "slow" else "steps"
    others = [ONE, PIECES] if RLLIB in turns else []
    table = Table(title=part, caption=CAPTION)
    headings = ("", f"{unit}/s", "CPU µs a step", f"of {yardstick}")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    rates = {name: [turn[unit] / turn["wall"] for turn in found] for name, found in turns.items()}
    for name, found in turns.items():
        row = [name, cell(rates[name], "{:,.1f}" if part == "slow" else "{:,.0f}")]
        row.append(cell([turn["cpu"] / turn["steps"] * 1e6 for turn in found], "{:.1f}"))
        table.add_row(*row, cell(ratios(rates[name], rates[yardstick]), "{:.3f}"))
    Console(width=120).print(table)
    for name in others:
        print(f"{name}: {cell(ratios(rates[name], rates[RLLIB]), '{:.1f}')} times RLlib")


# ---- parameters and memory -------------------------------------------------------------------------


def puts(versions: int) -> list[dict[str, int]]:
    """Calls of `ray.put` while so many versions are published, with a batch after each, by number of shards."""
    found, put, n_calls = [], ray.put, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        return put(*args, **kwargs)

    for n_shards in (1, 2, 4):
        env = gym.make("CartPole-v1")
        agent = CategoricalPgAgent(partial(ActorCritic, env.observation_space, env.action_space))
        options = {"batch_T": 4, "batch_B": 4, "n_shards": n_shards, "n_workers": 1, "sampler_cls": SerialSampler}
        with RaySampler("CartPole-v1", **options) as sampler:
            sampler.initialize(agent, seed=0)
            ray.put, n_calls = counted, 0
            try:
                for itr in range(2 * versions):  # every second batch has nothing new
                    if itr % 2 == 0:
                        agent.sync_shared_memory()
                    sampler.obtain_samples(itr)
            finally:
                ray.put = put
            found.append({"shards": n_shards, "versions": versions, "puts": n_calls})
        print(f"{n_shards} shards, {versions} versions, {2 * versions} batches: {n_calls} calls of ray.put", flush=True)
    return found


def own_bytes() -> int:
    """Memory that only this process has, without Ray's object store."""
    return int(psutil.Process().memory_full_info().uss)


def memory(batches: int) -> dict[str, list[float]]:
    """MB of this process at eleven moments, of `obtain_samples` and of `pieces`."""
    found: dict[str, list[float]] = {}
    for kind in (ONE, PIECES):
        contestant = Batches(env_fn=WORKS["speed"].env_fn, batch_T=32, batch_B=32, n_shards=2, n_workers=1)
        pieces = contestant.sampler.pieces(max_in_flight=2)
        values = []
        for i in range(batches + 1):
            if i % max(1, batches // 10) == 0:
                values.append(own_bytes() / 2**20)
            if kind == ONE:
                contestant.batch()
            else:
                for _ in range(2):  # the pieces of two shards are a batch
                    next(pieces)
        pieces.close()
        contestant.close()
        found[kind] = values
        print(
            f"{kind}, MB after each tenth of {batches} batches:",
            " ".join(f"{value:.1f}" for value in values),
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; by default all")
    parser.add_argument("--simulate", type=int, metavar="N", help="the model of up to N shards, and the parts you name")
    parser.add_argument("--repeats", type=int, default=12, help="turns of each contestant")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn, at least")
    parser.add_argument("--batches", type=int, default=2000, help="of `memory`, and a hundredth of them in `puts`")
    parser.add_argument("--json", type=Path, help="write the machine and all figures to this file")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(unknown)}")
    for module in (environments, workloads):  # shards cannot import them
        cloudpickle.register_pickle_by_value(module)
        ray.cloudpickle.register_pickle_by_value(module)  # a copy, with which Ray pickles arguments of actors
    leave = connect(N_CPUS)
    results: dict[str, Any] = {}
    try:
        if args.simulate:
            results["model"] = simulate(args.simulate)
        for part in args.parts or (() if args.simulate else PARTS):
            if part == "puts":
                results[part] = puts(max(2, args.batches // 100))
            elif part == "memory":
                results[part] = memory(args.batches)
            else:
                results[part] = measure(part, args.repeats, args.seconds)
                show(part, results[part])
    finally:
        leave()
    if args.json:
        content = {**machine(), "load": os.getloadavg(), "results": results}
        args.json.write_text(json.dumps(content, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
