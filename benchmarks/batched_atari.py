"""Pong in ALE's `AtariVectorEnv`, in both of its autoreset modes, beside single Pongs with Gymnasium's wrappers.

"whole games" is the mode "SameStep" with `BatchedEpisodicLife` and a `TrajInfo` for the scores of whole games. Samplers
with 2 workers and random actions take turns in one run. A row that only resets is not counted. `--frames` ends
episodes early, so that there are more resets.

Three vector environments in the mode "SameStep" take turns too: a `ShmVectorEnv` of single Pongs, one over
`AtariVectorEnv`, and "bare", an `AtariVectorEnv` in this process with 2 threads.

    python benchmarks/batched_atari.py --frames 2000

With `--envpool`, tasks of EnvPool take the place of Pong: a sampler that records them, with 2 workers, beside EnvPool's
own synchronous loop with 2 threads, which records nothing.

    python benchmarks/batched_atari.py --envpool CartPole-v1 Pong-v5 Ant-v4 --batch-B 16
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from ale_py.vector_env import AtariVectorEnv
from environments import pong
from turns import show, take_turns

from penstock import ParallelSampler, RandomAgent, TrajInfo
from penstock.envs import BatchedEnvPool, BatchedEpisodicLife
from penstock.vector import ShmVectorEnv


def with_lives(num_envs: int, make: Any) -> Any:
    return BatchedEpisodicLife(make(num_envs=num_envs))


class GameInfo(TrajInfo):
    """The record of one whole game."""

    def traj_done(self, terminated: bool, truncated: bool, env_info: dict[str, Any]) -> bool:
        return bool(env_info["game_over"])


class Sampling:
    """A sampler with random actions, as a contestant."""

    def __init__(
        self,
        env_fn: Any,
        batch_B: int,
        batch_T: int,
        traj_info_cls: type[TrajInfo] = TrajInfo,
        *,
        batched: bool = True,
    ) -> None:
        sizes = {"batch_T": batch_T, "batch_B": batch_B, "n_workers": 2, "max_decorrelation_steps": 0}
        kind: dict[str, Any] = {"batched": batched, "traj_info_cls": traj_info_cls}
        self.sampler = ParallelSampler(env_fn, record_final_obs=False, **sizes, **kind)
        self.sampler.initialize(RandomAgent(), seed=0)

    def batch(self) -> int:
        samples, _ = self.sampler.obtain_samples(0)
        return int(samples.env.valid.sum())

    def close(self) -> None:
        self.sampler.shutdown()


class Stepping:
    """A vector environment with random actions, as a contestant."""

    def __init__(self, envs: Any, batch_B: int, batch_T: int) -> None:
        space = getattr(envs, "single_action_space", envs.action_space)  # EnvPool's has the space of one row only
        space.seed(0)
        self._envs = envs
        self._actions = np.array([[space.sample() for _ in range(batch_B)] for _ in range(batch_T)])
        envs.reset()

    def batch(self) -> int:
        for row in self._actions:
            self._envs.step(row)
        return self._actions.shape[0] * self._actions.shape[1]

    def close(self) -> None:
        self._envs.close()


def compare_with_envpool(task: str, batch_B: int, batch_T: int, repeats: int, seconds: float) -> None:
    """The sampler beside EnvPool's own loop."""
    import envpool

    own, sizes = "EnvPool's own loop", (batch_B, batch_T)
    contestants: dict[str, Any] = {
        own: Stepping(envpool.make_gymnasium(task, num_envs=batch_B, num_threads=2), *sizes),
        "penstock": Sampling(partial(BatchedEnvPool, task), *sizes),
    }
    show(f"EnvPool, {task}, B = {batch_B}", take_turns(contestants, repeats, seconds), own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=108_000, help="the longest episode")
    parser.add_argument("--batch-B", type=int, default=8)
    parser.add_argument("--batch-T", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contestants beside `single`; default: all")
    parser.add_argument("--envpool", nargs="+", default=[], metavar="TASK", help="tasks of EnvPool, instead of Pong")
    args = parser.parse_args()
    for task in args.envpool:
        compare_with_envpool(task, args.batch_B, args.batch_T, args.repeats, args.seconds)
    if args.envpool:
        return
    pongs = partial(AtariVectorEnv, "pong", num_threads=1, max_num_frames_per_episode=args.frames)
    same, single = partial(pongs, autoreset_mode="SameStep"), partial(pong, args.frames)
    shm, games = partial(ShmVectorEnv, n_workers=2), partial(with_lives, make=same)
    makers: dict[str, Callable[[int, int], Any]] = {
        "single": partial(Sampling, single, batched=False),
        "SameStep": partial(Sampling, same),
        "NextStep": partial(Sampling, partial(pongs, autoreset_mode="NextStep")),
        "whole games": partial(Sampling, games, traj_info_cls=GameInfo),
        "ShmVectorEnv, single": lambda B, T: Stepping(shm([single] * B, autoreset_mode="SAME_STEP"), B, T),
        "ShmVectorEnv": lambda B, T: Stepping(shm(same, num_envs=B), B, T),
        "bare": lambda B, T: Stepping(AtariVectorEnv("pong", B, num_threads=2, autoreset_mode="SameStep"), B, T),
    }
    if unknown := set(args.only or ()) - makers.keys():
        parser.error(f"no contestant is called {', '.join(unknown)}; there are {', '.join(makers)}")
    names = [name for name in makers if name == "single" or not args.only or name in args.only]
    contestants = {name: makers[name](args.batch_B, args.batch_T) for name in names}
    figures = take_turns(contestants, args.repeats, args.seconds)
    show(f"Pong, B = {args.batch_B}, episodes of at most {args.frames:,} frames", figures, "single")


if __name__ == "__main__":
    main()
