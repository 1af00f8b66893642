"""ShmVectorEnv against other vector environments: the same environments and random actions, recorded as `[T, B]`.

    python benchmarks/vector_env.py cartpole pixels sleeping

`cartpole`: 32 CartPole-v1.
`pixels`: 16 environments that return 84 x 84 x 4 bytes.
`sleeping`: 16 environments in 8 processes that sleep 1 ms in a step, and sometimes 10 ms. The contestants step all
environments together, or only the ready ones (`send` and `recv`), or without waiting for each other.

"bare" loops record nothing. Contestants take turns in one run. A ratio is computed for each turn.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from environments import PixelEnv, SleepingEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from turns import Figures, machine, show, take_turns
from workloads import ENV

from penstock.vector import ShmVectorEnv

SAME_STEP = AutoresetMode.SAME_STEP


class Recorder:
    """Steps a vector environment with random actions, and records the results."""

    def __init__(self, envs: Any, T: int, step: Callable[..., Any] | None = None) -> None:
        self.envs, self._step = envs, envs.step if step is None else step
        n = envs.num_envs
        space = getattr(envs, "single_observation_space", envs.observation_space)
        self.observation = np.zeros((T, n, *space.shape), space.dtype)
        self.reward, self.done = np.zeros((T, n), np.float32), np.zeros((T, n), np.bool_)
        self.actions = np.random.default_rng(0).integers(0, 2, (T, n))
        self.start()

    def start(self) -> None:
        self.envs.reset(seed=0)

    def batch(self) -> int:
        for t, action in enumerate(self.actions):
            self.observation[t], self.reward[t], terminated, truncated, _ = self._step(action)
            np.logical_or(terminated, truncated, out=self.done[t])
        return int(self.actions.size)

    def close(self) -> None:
        self.envs.close()


class StableBaselines(Recorder):
    """The same for Stable-Baselines3: `step` returns one flag for both kinds of end, and `reset` takes no seed."""

    def start(self) -> None:
        self.envs.reset()

    def batch(self) -> int:
        for t, action in enumerate(self.actions):
            self.observation[t], self.reward[t], self.done[t], _ = self.envs.step(action)
        return int(self.actions.size)


class FirstReady(Recorder):
    """Steps the environments that are ready, until each has made T steps. Row t holds step t of each environment."""

    def batch(self) -> int:
        T, n = self.actions.shape
        t = np.zeros(n, int)
        envs = self.envs
        envs.send(self.actions[0])
        left = n * T
        while left:
            observation, reward, terminated, truncated, infos = envs.recv()
            ids = infos["env_id"]
            rows = t[ids]
            self.observation[rows, ids], self.reward[rows, ids] = observation, reward
            self.done[rows, ids] = terminated | truncated
            t[ids] += 1
            left -= len(ids)
            more = ids[t[ids] < T]
            if len(more):
                envs.send(self.actions[t[more], more], more)
        return n * T


def _loop(pipe: Any, env_fn: Callable[[], Any], n: int, T: int) -> None:
    envs, actions = [env_fn() for _ in range(n)], np.random.default_rng(0).integers(0, 2, (T, n)).tolist()
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
    while pipe.recv():
        for row in actions:
            for env, action in zip(envs, row, strict=True):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
        pipe.send(True)


class Bare:
    """Processes that step equal parts of the environments and record nothing. They wait only for a batch's end."""

    def __init__(self, env_fn: Callable[[], Any], n_envs: int, n_processes: int, T: int) -> None:
        context = multiprocessing.get_context("forkserver")
        self._steps, self._pipes = n_envs * T, []
        for _ in range(n_processes):
            here, there = context.Pipe()
            context.Process(target=_loop, args=(there, env_fn, n_envs // n_processes, T), daemon=True).start()
            self._pipes.append(here)

    def batch(self) -> int:
        for pipe in self._pipes:
            pipe.send(True)
        for pipe in self._pipes:
            pipe.recv()
        return self._steps

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(False)


def peers(env_fn: Callable[[], Any], n_envs: int, T: int) -> dict[str, Any]:
    """All contestants, with the same environments."""
    fns = [env_fn] * n_envs
    found: dict[str, Any] = {
        "ShmVectorEnv, 2 workers": Recorder(ShmVectorEnv(fns, n_workers=2, autoreset_mode=SAME_STEP), T),
        "ShmVectorEnv, copy=False": Recorder(ShmVectorEnv(fns, n_workers=2, autoreset_mode=SAME_STEP, copy=False), T),
        "SyncVectorEnv": Recorder(SyncVectorEnv(fns, autoreset_mode=SAME_STEP), T),
        "AsyncVectorEnv": Recorder(AsyncVectorEnv(fns, autoreset_mode=SAME_STEP), T),
        "bare, one process": Bare(env_fn, n_envs, 1, T),
        "bare, two processes": Bare(env_fn, n_envs, 2, T),
    }
    try:
        from stable_baselines3.common.vec_env import SubprocVecEnv
    except ImportError:
        print("stable-baselines3 is not installed: left out")
    else:
        found["SubprocVecEnv"] = StableBaselines(SubprocVecEnv(fns, start_method="forkserver"), T)
    return found


def cartpole(repeats: int, seconds: float, n: int = 32, T: int = 128) -> Figures:
    """32 CartPole-v1, 2 workers."""
    return take_turns(peers(ENV, n, T), repeats, seconds)


def pixels(repeats: int, seconds: float, n: int = 16, T: int = 64) -> Figures:
    """16 environments that return 28 kB in a step, 2 workers."""
    return take_turns(peers(PixelEnv, n, T), repeats, seconds)


def sleeping(repeats: int, seconds: float, n: int = 16, T: int = 128) -> Figures:
    """16 environments in 8 processes; steps of 1 ms, and 5 % of 10 ms."""
    env_fn = partial(SleepingEnv, 0.001, 0.010, 0.05)
    contestants = {
        "lock-step": Recorder(ShmVectorEnv([env_fn] * n, in_series=2), T),
        "send and recv": FirstReady(ShmVectorEnv([env_fn] * n, in_series=2), T),
        f"bare, {n // 2} processes": Bare(env_fn, n, n // 2, T),
    }
    return take_turns(contestants, repeats, seconds)


MEASUREMENTS = {"cartpole": cartpole, "pixels": pixels, "sleeping": sleeping}
YARDSTICKS = {"cartpole": "SyncVectorEnv", "pixels": "SyncVectorEnv", "sleeping": "lock-step"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help=f"of {', '.join(MEASUREMENTS)}; all by default")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.4, help="minimum length of a turn")
    parser.add_argument("--n-envs", type=int, help="number of environments, even; each measurement has a default")
    parser.add_argument("--batch-T", type=int, help="time steps of a batch; each measurement has a default")
    parser.add_argument("--json", help="write machine and all figures to this file")
    args = parser.parse_args(arguments)
    if unknown := set(args.what) - set(MEASUREMENTS):
        parser.error(f"there is no measurement {', '.join(unknown)}")
    sizes = {name: n for name, n in (("n", args.n_envs), ("T", args.batch_T)) if n is not None}
    results = {}
    for name in args.what or MEASUREMENTS:
        results[name] = MEASUREMENTS[name](args.repeats, args.seconds, **sizes)
        show(name, results[name], YARDSTICKS[name])
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({**machine(), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
