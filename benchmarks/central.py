"""Central inference, in five measurements. Contestants take turns in one run. A ratio is computed for each turn.

    python benchmarks/central.py vector uneven deadline alternating sync

`vector`: the 64-64 MLP acts for all CartPole-v1 in one process, and the same fields are recorded. The contestants
differ in the processes that step the environments.
`uneven`: environments that sleep for 1 ms in a step, and sometimes for 10 ms.
`deadline`: the same with short batches and the MLP, and with batches that overlap.
`alternating`: a policy that takes as long as the environments, on another CPU than theirs.
`sync`: the time of a step of environments that do nothing. For comparison: two processes that wake each other by
semaphores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from environments import SleepingEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from turns import Figures, machine, show, take_turns
from workloads import ENV, ActorCritic

from penstock import (
    AgentStep,
    AlternatingSampler,
    AsyncSampler,
    CategoricalPgAgent,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    Sampler,
    SerialSampler,
)
from penstock.workers.affinity import usable_cpus


def be_busy(seconds: float) -> None:
    """Use the CPU for `seconds`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


class BusyEnv(SleepingEnv):
    """A step uses a CPU for `seconds`."""

    def step(self, action: Any) -> Any:
        be_busy(self._times[0])
        return self._observation, 0.0, False, False, {}


class BusyAgent(RandomAgent):
    """A step uses a CPU for `seconds` for each environment."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        be_busy(self._seconds * len(prev_reward))
        return super().step(observation, prev_action, prev_reward)


# ---- contestants ---------------------------------------------------------------------------------


class Sampling:
    """A sampler that collects one batch after another."""

    def __init__(self, sampler: Sampler, agent: Any, **kwargs: Any) -> None:
        self._sampler, self._itr = sampler, 0
        sampler.initialize(agent, seed=0, **kwargs)
        self._steps = sampler.batch_T * sampler.batch_B

    def batch(self) -> int:
        """Collect one batch; returns its environment steps."""
        self._sampler.obtain_samples(self._itr)
        self._itr += 1
        return self._steps

    def close(self) -> None:
        self._sampler.shutdown()


class Recording:
    """A loop over time as in training scripts: the policy acts for a vector environment, numpy arrays record."""

    def __init__(self, n_envs: int, batch_T: int) -> None:
        self._T, shape = batch_T, (batch_T, n_envs)
        self.arrays = {
            "observation": np.zeros((*shape, 4), np.float32),
            "action": np.zeros(shape, np.int64),
            "reward": np.zeros(shape, np.float32),
            "terminated": np.zeros(shape, np.bool_),
            "truncated": np.zeros(shape, np.bool_),
            "log_prob": np.zeros(shape, np.float32),
            "value": np.zeros(shape, np.float32),
        }
        self._previous = np.zeros(n_envs, np.int64), np.zeros(n_envs, np.float32)
        self._agent = CategoricalPgAgent(ActorCritic)
        self._agent.initialize(ENV().observation_space, ENV().action_space, seed=0)
        self._agent.seed_columns([np.random.default_rng(b) for b in range(n_envs)])
        self._agent.sample_mode(0)
        self._observation: Any = None

    def step_envs(self, action: Any) -> tuple[Any, Any, Any, Any]:
        """Step all environments: observation, reward, terminated, truncated."""
        raise NotImplementedError

    def batch(self) -> int:
        """Collect one batch; returns its environment steps."""
        arrays = self.arrays
        for t in range(self._T):
            arrays["observation"][t] = self._observation
            action, info = self._agent.step(self._observation, *self._previous)
            arrays["action"][t], arrays["log_prob"][t], arrays["value"][t] = action, info.log_prob, info.value
            step = self.step_envs(action)
            self._observation, arrays["reward"][t], arrays["terminated"][t], arrays["truncated"][t] = step
        return int(arrays["action"].size)

    def close(self) -> None:
        """Close the environments."""


class Gymnasium(Recording):
    """Gymnasium's vector environments."""

    def __init__(self, make: Callable[..., Any], n_envs: int, batch_T: int) -> None:
        super().__init__(n_envs, batch_T)
        self._envs = make([ENV] * n_envs, autoreset_mode=AutoresetMode.SAME_STEP)
        self._observation, _ = self._envs.reset(seed=0)

    def step_envs(self, action: Any) -> tuple[Any, Any, Any, Any]:
        step: tuple[Any, Any, Any, Any] = self._envs.step(action)[:4]
        return step

    def close(self) -> None:
        self._envs.close()


class StableBaselines(Recording):
    """Stable-Baselines3's SubprocVecEnv, one process per environment."""

    def __init__(self, n_envs: int, batch_T: int) -> None:
        from stable_baselines3.common.vec_env import SubprocVecEnv

        super().__init__(n_envs, batch_T)
        self._envs = SubprocVecEnv([ENV] * n_envs, start_method="forkserver")
        self._observation = self._envs.reset()

    def step_envs(self, action: Any) -> tuple[Any, Any, Any, Any]:
        observation, reward, done, infos = self._envs.step(action)
        truncated = np.array([info["TimeLimit.truncated"] for info in infos])
        return observation, reward, done & ~truncated, truncated

    def close(self) -> None:
        self._envs.close()


# ---- measurements --------------------------------------------------------------------------------


def vector(repeats: int, seconds: float, n_envs: int = 32, batch_T: int = 128, n_workers: int = 2) -> Figures:
    """Steps per second on CartPole-v1, with the same policy and the same recorded fields."""
    torch.set_num_threads(1)  # more threads here would slow down the environments' processes
    size = {"batch_T": batch_T, "batch_B": n_envs}
    agent = partial(CategoricalPgAgent, ActorCritic)
    contestants: dict[str, Any] = {
        "GpuSampler": Sampling(GpuSampler(ENV, n_workers=n_workers, **size), agent()),
        "GpuSampler, min_ready=0.5": Sampling(GpuSampler(ENV, n_workers=n_workers, min_ready=0.5, **size), agent()),
        "AlternatingSampler": Sampling(AlternatingSampler(ENV, n_workers=n_workers, **size), agent()),
        "ParallelSampler": Sampling(ParallelSampler(ENV, n_workers=n_workers, **size), agent()),
        "SerialSampler": Sampling(SerialSampler(ENV, **size), agent()),
        "SyncVectorEnv": Gymnasium(SyncVectorEnv, n_envs, batch_T),
        "AsyncVectorEnv": Gymnasium(partial(AsyncVectorEnv, shared_memory=True), n_envs, batch_T),
    }
    try:
        contestants["SubprocVecEnv"] = StableBaselines(n_envs, batch_T)
    except ImportError:
        print("stable-baselines3 is not installed: left out")
    return take_turns(contestants, repeats, seconds)


def uneven(repeats: int, seconds: float, batch_T: int = 1024, n_workers: int = 8) -> Figures:
    """Two environments in each worker; steps of 1 ms, and 5 % of 10 ms. The bound is one step per worker in the mean
    step time, as measured here."""
    size: dict[str, Any] = {"batch_T": batch_T, "batch_B": 2 * n_workers, "n_workers": n_workers}
    size["max_decorrelation_steps"] = 0
    env = partial(SleepingEnv, 0.001, 0.010, 0.05)
    independent = ParallelSampler(env, **size)
    contestants = {
        "lock-step": Sampling(GpuSampler(env, **size), RandomAgent()),
        "min_ready=1": Sampling(GpuSampler(env, min_ready=1, **size), RandomAgent()),
        "min_ready=4": Sampling(GpuSampler(env, min_ready=4, **size), RandomAgent()),
        "bound": Sampling(independent, RandomAgent()),
    }
    figures = take_turns(contestants, repeats, seconds)
    workers = independent.stats().workers
    mean = sum(worker.stepping for worker in workers) / sum(worker.steps for worker in workers)
    figures["bound"] = [len(workers) / mean] * repeats
    return figures


class AsyncSampling(Sampling):
    """An `AsyncSampler`. A turn starts it without batches, and waits until the workers have ended their last one."""

    def batch(self) -> int:
        """Collect 32 batches. Then collect what the workers are still working on. Returns the steps of all."""
        sampler: Any = self._sampler
        n_steps = 0
        if sampler.state.name == "PAUSED":
            sampler.resume()
        else:
            sampler.start()
        for _ in range(32):
            n_steps += super().batch()
        sampler.pause()
        for _ in range(2):  # the slots that are not in the user's hands
            n_steps += super().batch()
        return n_steps


def deadline(repeats: int, seconds: float, batch_T: int = 32) -> Figures:
    """8 environments in 8 workers, as in `uneven`. Two upper bounds: `bound`, one step per worker in the mean step
    time, as measured here; and `ParallelSampler`, which waits for the slowest worker at the end of each batch."""
    torch.set_num_threads(1)
    env = partial(SleepingEnv, 0.001, 0.010, 0.05)
    agent = partial(CategoricalPgAgent, ActorCritic)
    size: dict[str, Any] = {"batch_T": batch_T, "batch_B": 8, "n_workers": 8, "max_decorrelation_steps": 0}
    independent = ParallelSampler(env, **size)

    def async_sampling(**kwargs: Any) -> AsyncSampling:
        return AsyncSampling(AsyncSampler(env, **size, **kwargs), agent())

    contestants = {
        "lock-step": Sampling(GpuSampler(env, **size), agent()),
        "min_ready=0.5": Sampling(GpuSampler(env, min_ready=0.5, **size), agent()),
        "max_wait=0.1 ms": Sampling(GpuSampler(env, max_wait=1e-4, **size), agent()),
        'server="process", max_wait=0.1 ms': Sampling(
            GpuSampler(env, max_wait=1e-4, server="process", **size), agent()
        ),
        'AsyncSampler(server="process")': async_sampling(server="process"),
        'AsyncSampler(server="process", max_wait=0.1 ms)': async_sampling(server="process", max_wait=1e-4),
        "AsyncSampler": async_sampling(),
        "ParallelSampler": Sampling(independent, agent()),
    }
    figures = take_turns(contestants, repeats, seconds)
    workers = independent.stats().workers
    mean = sum(worker.stepping for worker in workers) / sum(worker.steps for worker in workers)
    return {**figures, "bound": [len(workers) / mean] * repeats}


def alternating(repeats: int, seconds: float, batch_T: int = 64) -> Figures:
    """16 environments that need 50 µs a step on one CPU, and a policy that needs 50 µs for each on another CPU."""
    cpu = usable_cpus()[0]
    env, agent = partial(BusyEnv, 50e-6), partial(BusyAgent, 50e-6)

    def sampling(cls: Callable[..., Sampler], n_workers: int, **kwargs: Any) -> Sampling:
        size = {"batch_T": batch_T, "batch_B": 16, "n_workers": n_workers, "max_decorrelation_steps": 0}
        return Sampling(cls(env, **size, **kwargs), agent(), affinity=[cpu] * n_workers)

    contestants = {
        "GpuSampler": sampling(GpuSampler, 1),
        "AlternatingSampler": sampling(AlternatingSampler, 2),
        "without overlap": sampling(AlternatingSampler, 2, overlap=False),
    }
    return take_turns(contestants, repeats, seconds)


def _pong(here: Any, there: Any, n: int) -> None:
    for _ in range(n):
        here.acquire()
        there.release()


def semaphore_round_trip(n: int) -> float:
    """µs in which a process wakes another by a semaphore, and the other wakes it in turn."""
    context = multiprocessing.get_context("spawn")
    ping, pong = context.Semaphore(0), context.Semaphore(0)
    process = context.Process(target=_pong, args=(ping, pong, n + 1), daemon=True)
    process.start()
    ping.release()
    pong.acquire()
    began = time.monotonic()
    for _ in range(n):
        ping.release()
        pong.acquire()
    took = time.monotonic() - began
    process.join()
    return took / n * 1e6


def sync(repeats: int, seconds: float, batch_T: int = 512) -> Figures:
    """µs per time step without environment and policy, for 1 and 2 workers with one environment each."""
    env = partial(SleepingEnv, 0.0)

    def gpu(n_workers: int, **kwargs: Any) -> Sampling:
        size = {"batch_T": batch_T, "batch_B": n_workers, "n_workers": n_workers, "max_decorrelation_steps": 0}
        return Sampling(GpuSampler(env, **size, **kwargs), RandomAgent())

    rates = take_turns({"1 worker": gpu(1), "2 workers": gpu(2)}, repeats, seconds)
    figures = {name: [1e6 * (1 + i) / rate for rate in rates[name]] for i, name in enumerate(rates)}
    figures["one more worker"] = [b - a for a, b in zip(figures["1 worker"], figures["2 workers"], strict=True)]
    n = max(1, round(40_000 * seconds))
    return {**figures, "semaphores, there and back": [semaphore_round_trip(n) for _ in range(repeats)]}


MEASUREMENTS = {"vector": vector, "uneven": uneven, "deadline": deadline, "alternating": alternating, "sync": sync}
#: In measurements of steps per second: ratios are to the figures of this contestant.
YARDSTICKS = {"vector": "GpuSampler", "uneven": "lock-step", "deadline": "lock-step", "alternating": "GpuSampler"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help=f"of {', '.join(MEASUREMENTS)}; all by default")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.5, help="minimum length of a turn")
    parser.add_argument("--batch-T", type=int, help="time steps of a batch; each measurement has a default")
    parser.add_argument("--n-envs", type=int, default=32, help="environments, in `vector`")
    parser.add_argument("--n-workers", type=int, default=8, help="worker processes, in `uneven`")
    parser.add_argument("--json", help="write machine and all figures to this file")
    args = parser.parse_args(arguments)
    if unknown := set(args.what) - set(MEASUREMENTS):
        parser.error(f"there is no measurement {', '.join(unknown)}")
    results = {}
    for name in args.what or MEASUREMENTS:
        sizes = {} if args.batch_T is None else {"batch_T": args.batch_T}
        if name == "vector":
            sizes["n_envs"] = args.n_envs
        if name == "uneven":
            sizes["n_workers"] = args.n_workers
        results[name] = MEASUREMENTS[name](args.repeats, args.seconds, **sizes)
        show(name, results[name], YARDSTICKS.get(name))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({**machine(), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
