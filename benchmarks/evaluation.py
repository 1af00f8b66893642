"""Evaluations: `penstock.evaluate` beside the loops that others write, in turns.

    python benchmarks/evaluation.py                # all five tables
    python benchmarks/evaluation.py --only robot   # cartpole, folder, robot, training, results

- *cartpole*: a network of 64-64 that balances the pole plays CartPole. Steps per second and CPU time of a step, of all
  processes together, without the start: two evaluations of different length are subtracted.
- *folder*: what a folder costs: 120 episodes, with the start, without one and in a new one; and the second half in a
  folder that has the first, with the check that it is of the same policy.
- *robot*: steps of 10 ms, 16 environments in 16 processes; a chunk of 7 actions takes the policy 20 ms, whatever the
  batch. The bound is a loop in which no environment ever waits: 16 * 7 / (7 * 10 ms + 20 ms) steps per second.
  `min_ready` says for how many environments that wait the policy acts.
- *training*: the speed of an `AsyncSampler` while `start_evaluation` runs beside it, as a share of the speed without.
  It needs a CPU that nothing else uses.
- *results*: what an episode of 100 steps takes in memory, and the CPU time of the figures of 26,000 episodes.
"""

from __future__ import annotations

import argparse
import copy
import pickle
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from clocks import cpu_clocks, processes, used
from environments import SleepingEnv
from torch import nn
from turns import cell

from penstock import AsyncSampler, CategoricalPgAgent, EvalResults, evaluate, start_evaluation
from penstock.evaluation import EpisodeResult
from penstock.evaluation.proof import Trace

CHUNK, STEP_SECONDS, ACT_SECONDS, N_ENVS = 7, 0.01, 0.02, 16


class Balances(nn.Module):
    """64-64, and balances the pole, so that episodes are long."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
        self.body, self.rule = nn.Sequential(*layers), nn.Linear(4, 2)
        with torch.no_grad():
            self.rule.weight[:] = torch.tensor([[0.0, 0.0, -1.0, -0.5], [0.02, 0.05, 1.0, 0.5]])
            self.rule.bias[:] = 0

    def forward(self, x: Any) -> Any:
        return 20 * self.rule(x) + 0.001 * self.body(x), x[:, 0]


class Meter:
    """The CPU seconds of this process and its descendants, also of those that end meanwhile."""

    def __enter__(self) -> Meter:
        self._before = self._last = cpu_clocks(processes())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        self.began = time.perf_counter()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            self._last = {**self._last, **cpu_clocks(processes())}

    def __exit__(self, *_: object) -> None:
        self.wall = time.perf_counter() - self.began
        self._stop.set()
        self._thread.join()
        self.cpu = used(self._before, {**self._last, **cpu_clocks(processes())})


def of_evaluation(agent: Any, **options: Any) -> tuple[float, float]:
    """Steps per second, and CPU microseconds of a step."""
    found = []
    for n in (20, 220):
        with Meter() as meter:
            results = evaluate(agent, partial(gym.make, "CartPole-v1"), episodes=n, n_workers=2, **options)
        found.append((sum(r.length for r in results.episodes), meter.wall, meter.cpu))
    steps, wall, cpu = (late - early for early, late in zip(*found, strict=True))
    return steps / wall, 1e6 * cpu / steps


def of_loop(model: Any, make_envs: Callable[[], Any], seconds: float = 4.0) -> tuple[float, float]:
    """The same of a loop over a vector environment of 16."""
    envs = make_envs()
    observation, _ = envs.reset(seed=0)
    steps = 0
    with Meter() as meter:
        while time.perf_counter() - meter.began < seconds:
            with torch.inference_mode():
                action = model(torch.from_numpy(observation))[0].argmax(1).numpy()
            observation, *_ = envs.step(action)
            steps += 16
    envs.close()
    return steps / meter.wall, 1e6 * meter.cpu / steps


def cartpole(rounds: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    agent = CategoricalPgAgent(Balances, greedy_eval=True, inference="numpy")
    envs = [partial(gym.make, "CartPole-v1")] * 16
    contestants: dict[str, Callable[[], tuple[float, float]]] = {
        "evaluate, 64 environments": lambda: of_evaluation(agent, batch_B=64),
        "evaluate, 16 environments": lambda: of_evaluation(agent, batch_B=16),
        'evaluate, act_in="workers"': lambda: of_evaluation(agent, batch_B=4, act_in="workers"),
        "AsyncVectorEnv loop": lambda: of_loop(Balances(), lambda: gym.vector.AsyncVectorEnv(envs)),
        "SyncVectorEnv loop": lambda: of_loop(Balances(), lambda: gym.vector.SyncVectorEnv(envs)),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, measure in contestants.items():
            found[name].append(measure())
    print("| CartPole, 2 workers | steps/s | CPU µs a step |\n| --- | --- | --- |")
    for name, pairs in found.items():
        speeds, cpu = zip(*pairs, strict=True)
        print(f"| {name} | {cell(speeds, '{:,.0f}')} | {cell(cpu, '{:.1f}')} |")


def of_folder(agent: Any, folder: str | None, n_kept: int, n: int = 120) -> tuple[float, float, float]:
    """Episodes per second, and CPU microseconds of a step, of `n` episodes, of which the folder has some already; and
    the CPU seconds."""
    play = partial(evaluate, agent, partial(gym.make, "CartPole-v1"), n_workers=2, batch_B=16, folder=folder)
    if n_kept:
        play(episodes=n_kept)
    with Meter() as meter:
        results = play(episodes=n)
    played = results.episodes[n_kept:] or results.episodes
    return len(played) / meter.wall, 1e6 * meter.cpu / sum(r.length for r in played), meter.cpu


def folder(rounds: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    agent = CategoricalPgAgent(Balances, greedy_eval=True, inference="numpy")
    found: dict[str, list[tuple[float, float]]] = {}
    shares = []
    for _ in range(rounds):
        with TemporaryDirectory() as new, TemporaryDirectory() as half:
            *row, whole = of_folder(agent, None, 0)
            found.setdefault("no folder", []).append((row[0], row[1]))
            found.setdefault("a new folder", []).append(of_folder(agent, new, 0)[:2])
            found.setdefault("the second half, in a folder that has the first", []).append(
                of_folder(agent, half, 60)[:2]
            )
            shares.append(100 * of_folder(agent, new, 120)[2] / whole)  # nothing but the proof is played
    print("| 120 episodes of CartPole, with their start | episodes/s | CPU µs a step |\n| --- | --- | --- |")
    for name, pairs in found.items():
        speeds, cpu = zip(*pairs, strict=True)
        print(f"| {name} | {cell(speeds, '{:,.1f}')} | {cell(cpu, '{:.1f}')} |")
    print(f"\nThe proof, one episode, is {cell(shares, '{:.0f}')} % of the CPU time.")


def acts_slowly(observation: Any) -> Any:
    time.sleep(ACT_SECONDS)
    return np.zeros((len(observation), CHUNK), np.int64)


def of_robots(min_ready: float) -> float:
    """Steps per second."""
    found, make = [], partial(SleepingEnv, STEP_SECONDS)
    for n in (32, 96):
        began = time.perf_counter()
        options = {"batch_B": N_ENVS, "n_workers": N_ENVS, "max_steps": 70, "min_ready": min_ready}
        results = evaluate(acts_slowly, make, episodes=n, **options)
        found.append((sum(r.length for r in results.episodes), time.perf_counter() - began))
    (steps, wall), (more, longer) = found
    return (more - steps) / (longer - wall)


def of_lockstep() -> float:
    """Steps per second of a loop over Gymnasium's AsyncVectorEnv, which asks for a chunk of all at once."""
    envs = gym.vector.AsyncVectorEnv([partial(SleepingEnv, STEP_SECONDS)] * N_ENVS)
    observation, _ = envs.reset(seed=0)
    began = time.perf_counter()
    for t in range(280):
        if t % CHUNK == 0:
            chunk = acts_slowly(observation)
        observation, *_ = envs.step(chunk[:, t % CHUNK])
    speed = 280 * N_ENVS / (time.perf_counter() - began)
    envs.close()
    return speed


def robot(rounds: int) -> None:
    bound = N_ENVS * CHUNK / (CHUNK * STEP_SECONDS + ACT_SECONDS)
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for share in (0.25, 0.5, 0.75, 1.0 * N_ENVS):
            name = "all" if share == N_ENVS else f"{share:.0%}"
            found.setdefault(f"evaluate, min_ready {name}", []).append(of_robots(share) / bound)
        found.setdefault("AsyncVectorEnv loop, in lock-step", []).append(of_lockstep() / bound)
    print(f"| 16 robots, chunks | share of {bound:,.0f} steps/s |\n| --- | --- |")
    for name, shares in found.items():
        print(f"| {name} | {cell(shares, '{:.2f}')} |")


def training(rounds: int) -> None:
    torch.set_num_threads(1)
    agent = CategoricalPgAgent(Balances, inference="numpy")
    alone, beside = [], []
    with AsyncSampler("CartPole-v1", batch_T=32, batch_B=8, n_workers=1, lag=1) as sampler:
        sampler.initialize(agent, seed=0)
        sampler.start()
        itr = 0

        def speed(until: Callable[[], bool]) -> float:
            nonlocal itr
            began, first = time.perf_counter(), itr
            while not until():
                sampler.obtain_samples(itr)
                itr += 1
            return (itr - first) / (time.perf_counter() - began)

        for _ in range(rounds):
            end = time.perf_counter() + 3
            alone.append(speed(lambda end=end: time.perf_counter() > end))  # type: ignore[misc]
            with start_evaluation(agent, "CartPole-v1", episodes=60, n_workers=1) as running:
                beside.append(speed(lambda running=running: running.is_done))  # type: ignore[misc]
    shares = [with_it / without for with_it, without in zip(beside, alone, strict=True)]
    print("| training beside an evaluation | share of its speed alone |\n| --- | --- |")
    print(f"| AsyncSampler | {cell(shares, '{:.2f}')} |")


def results(rounds: int) -> None:
    rng = np.random.default_rng(0)
    policies, tasks = [f"policy {i}" for i in range(4)], [f"task {i}" for i in range(130)]
    episodes = [
        EpisodeResult(policy, task, k, k, 100, metrics={"return": rng.normal(), "success": bool(rng.random() < 0.7)})
        for policy in policies
        for task in tasks
        for k in range(50)
    ]
    print("| an episode of 100 steps | bytes in memory |\n| --- | --- |")
    for name, trace in (
        ("with a folder", Path("episodes/0.npz")),
        ("without", Trace([np.zeros(100, np.int64)], np.zeros(100), np.zeros((101, 2), np.uint32), np.zeros(101))),
    ):
        content = pickle.dumps([replace(result, trace=copy.deepcopy(trace)) for result in episodes[:1000]])
        tracemalloc.start()
        kept = pickle.loads(content)
        print(f"| {name} | {tracemalloc.get_traced_memory()[0] / len(kept):,.0f} |")
        tracemalloc.stop()
    print("| 4 policies, 130 tasks, 50 episodes | CPU ms |\n| --- | --- |")
    for name, call in (("print", str), ("metrics", EvalResults.metrics), ("plot", EvalResults.plot)):
        found = []
        for _ in range(rounds):
            fresh = EvalResults(episodes, policies, tasks)  # its arrays are not built yet
            began = time.process_time()
            call(fresh)
            found.append(1e3 * (time.process_time() - began))
        print(f"| {name} | {cell(found, '{:,.0f}')} |")


TABLES = {"cartpole": cartpole, "folder": folder, "robot": robot, "training": training, "results": results}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TABLES, action="append", help="one table; may be given again")
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    arguments = parser.parse_args()
    for table in arguments.only or TABLES:
        TABLES[table](arguments.repeats)
