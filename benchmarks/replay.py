"""Replays: penstock against cpprb, Stable-Baselines3, tianshou and torchrl, as far as they are installed.

Contestants take turns in one run, in random order. A figure is the CPU time of one call in microseconds. penstock
sums 3 rewards (n = 3); the others return single steps. `bare` is the same copy without a replay: for `append` one
`numpy.copyto` of each array that is kept, for `pixels` two `numpy.take`s of the same bytes.

    python benchmarks/replay.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import gymnasium as gym
import numpy as np
from rich.console import Console
from rich.table import Table
from turns import CAPTION, Figures, cell, machine, ratios

from penstock import NamedArrays, Samples
from penstock.buffers import AgentSamples, EnvSamples
from penstock.buffers.samples import BatchStatus, with_status
from penstock.learning import Frames, Prioritized, Replay

N_INPUTS, N_ACTIONS, B, BATCH = 17, 6, 32, 256
Call = Callable[[], Any]


def make_samples(observation: Any, T: int) -> Samples:
    """A batch `[T, B]` without ends of episodes."""
    flags, reward = np.zeros((T, B), np.bool_), np.ones((T, B), np.float32)
    action = np.zeros((T, B, N_ACTIONS), np.float32)
    env = EnvSamples(
        observation=observation,
        reward=reward,
        prev_reward=reward,
        terminated=flags,
        truncated=flags,
        done=flags,
        prev_done=flags,
        valid=~flags,
    )
    samples = Samples(env=env, agent=AgentSamples(action=action, prev_action=action, agent_info=NamedArrays()))
    return with_status(samples, BatchStatus(0, None))  # as a sampler does, whose batches have the same arrays


def vectors(T: int) -> Samples:
    rng = np.random.default_rng(0)
    return make_samples(rng.random((T, B, N_INPUTS), np.float32), T)


def filled(replay: Replay, samples: Samples) -> Replay:
    """The replay, filled until its first batch is overwritten: the begin of those episodes is unknown."""
    batches = as_batches(samples)
    while replay.n_steps < replay.capacity + samples.env.reward.size:
        replay.append(next(batches))
    return replay


def as_batches(samples: Samples) -> Iterator[Samples]:
    """The same samples for ever, each time as another batch than the one before."""
    return itertools.cycle([with_status(samples, BatchStatus(number, None)) for number in range(2)])


def vector_calls(capacity: int) -> dict[str, dict[str, Call]]:
    """By measurement, the contestants."""
    long, short = vectors(128), vectors(1)
    uniform = filled(Replay(capacity, 3, seed=0), long)
    prioritized = filled(Replay(capacity, 3, prioritized=Prioritized(), seed=0), long)
    priority = np.random.default_rng(1).random(BATCH) + 0.1
    long_batches, short_batches = as_batches(long), as_batches(short)
    calls: dict[str, dict[str, Call]] = {
        "sample": {"penstock, n = 3": lambda: uniform.sample(BATCH)},
        "prioritized": {"penstock, n = 3": lambda: prioritized.update(prioritized.sample(BATCH).index, priority)},
        "append [128, 32]": {
            "penstock": lambda: uniform.append(next(long_batches)),
            "bare": bare_append(capacity, long),
        },
        "append [1, 32]": {
            "penstock": lambda: uniform.append(next(short_batches)),
            "bare": bare_append(capacity, short),
        },
    }
    for name, peer in PEERS.items():
        if find_spec(name):
            for what, call in peer(capacity, long, priority).items():
                calls[what][name] = call
    return calls


def bare_append(capacity: int, samples: Samples) -> Call:
    """Only copies of the arrays that a replay keeps, each time to the next rows."""
    T = len(samples.env.reward)
    version = np.zeros((T, B), np.int32)
    parts = [samples.env.observation, samples.agent.action, samples.env.reward, samples.env.valid, version]
    n_rows = capacity // B
    rings = [np.ones((n_rows, *part.shape[1:]), part.dtype) for part in parts]  # written, so that the memory is there
    row = [0]

    def call() -> None:
        start = row[0]
        for ring, part in zip(rings, parts, strict=True):
            np.copyto(ring[start : start + T], part)
        row[0] = start + T if start + 2 * T <= n_rows else 0

    return call


def cpprb_calls(capacity: int, samples: Samples, priority: Any) -> dict[str, Call]:
    import cpprb

    fields = {
        "obs": {"shape": N_INPUTS},
        "act": {"shape": N_ACTIONS},
        "rew": {},
        "next_obs": {"shape": N_INPUTS},
        "done": {},
    }
    rows = {
        "obs": samples.env.observation.reshape(-1, N_INPUTS),
        "act": samples.agent.action.reshape(-1, N_ACTIONS),
        "rew": samples.env.reward.reshape(-1),
        "next_obs": samples.env.observation.reshape(-1, N_INPUTS),
        "done": samples.env.done.reshape(-1),
    }
    uniform, ranked = cpprb.ReplayBuffer(capacity, fields), cpprb.PrioritizedReplayBuffer(capacity, fields)
    for _ in range(capacity // len(rows["rew"])):
        uniform.add(**rows)
        ranked.add(**rows)

    def prioritized() -> None:
        ranked.update_priorities(ranked.sample(BATCH, beta=0.4)["indexes"], priority)

    return {
        "sample": lambda: uniform.sample(BATCH),
        "prioritized": prioritized,
        "append [128, 32]": lambda: uniform.add(**rows),
    }


def sb3_calls(capacity: int, samples: Samples, priority: Any) -> dict[str, Call]:
    from stable_baselines3.common.buffers import ReplayBuffer

    spaces = (gym.spaces.Box(-1, 1, (n,), np.float32) for n in (N_INPUTS, N_ACTIONS))
    buffer = ReplayBuffer(capacity, *spaces, device="cpu", n_envs=B)
    env, action = samples.env, samples.agent.action
    infos: list[dict[str, Any]] = [{} for _ in range(B)]

    def add(t: int) -> None:
        buffer.add(env.observation[t], env.observation[t], action[t], env.reward[t], env.done[t], infos)

    for step in range(capacity // B):
        add(step % 128)
    return {
        "sample": lambda: buffer.sample(BATCH),
        "append [128, 32]": lambda: [add(t) for t in range(128)],
        "append [1, 32]": lambda: add(0),
    }


def tianshou_calls(capacity: int, samples: Samples, priority: Any) -> dict[str, Call]:
    from tianshou.data import Batch, PrioritizedReplayBuffer, ReplayBuffer

    uniform, ranked = ReplayBuffer(capacity), PrioritizedReplayBuffer(capacity, alpha=0.6, beta=0.4)
    env = samples.env
    fields = {"obs": env.observation, "act": samples.agent.action, "rew": env.reward, "obs_next": env.observation}
    fields |= dict.fromkeys(("terminated", "truncated", "done"), env.done)
    rows = np.arange(capacity) % env.reward.size
    for buffer in (uniform, ranked):  # step by step, a million would take minutes
        buffer.set_batch(Batch({name: field.reshape(-1, *field.shape[2:])[rows] for name, field in fields.items()}))
        buffer._size = capacity
    ranked.init_weight(np.arange(capacity))

    def prioritized() -> None:
        ranked.update_weight(ranked.sample(BATCH)[1], priority)

    return {"sample": lambda: uniform.sample(BATCH), "prioritized": prioritized}


def torchrl_calls(capacity: int, samples: Samples, priority: Any) -> dict[str, Call]:
    """Uniform draws. Its tree of priorities is compiled for one version of torch, and cannot be loaded by others."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    env = samples.env
    fields = {"observation": env.observation, "action": samples.agent.action, "reward": env.reward, "done": env.done}
    fields["next_observation"] = env.observation
    size = env.reward.size
    flat = {name: torch.from_numpy(field.reshape(size, *field.shape[2:])) for name, field in fields.items()}
    rows = TensorDict(flat, [size])
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=BATCH)
    for _ in range(-(-capacity // size)):
        buffer.extend(rows)
    return {"sample": buffer.sample, "append [128, 32]": lambda: buffer.extend(rows)}


PEERS = {
    "cpprb": cpprb_calls,
    "stable_baselines3": sb3_calls,
    "tianshou": tianshou_calls,
    "torchrl": torchrl_calls,
}


def pixel_calls(capacity: int) -> dict[str, dict[str, Call]]:
    """Stacks of four pictures of 84 x 84, drawn into memory that is used again."""
    T, n = 16, 4
    pictures = np.random.default_rng(0).integers(0, 256, (T, B, 84, 84), np.uint8)
    # The batch continues itself, so that it can be appended again and again.
    stacks = np.stack([pictures[(np.arange(T) + i) % T] for i in range(1 - n, 1)], 2)
    replay = filled(Replay(capacity, 3, frames=Frames(n), seed=0), make_samples(stacks, T))
    kept = [replay.sample(BATCH)]
    frames = np.ones((capacity, 84, 84), np.uint8)  # written once, so that the memory is there
    rng = np.random.default_rng(1)
    out = [np.empty((BATCH, n, 84, 84), np.uint8) for _ in range(2)]

    def sample() -> None:
        kept[0] = replay.sample(BATCH, out=kept[0])

    def bare() -> None:
        first = rng.integers(0, capacity - 8 * B, BATCH)[:, None] + B * np.arange(n)
        for k, into in enumerate(out):
            frames.take(first + 3 * B * k, 0, into, mode="clip")

    return {"pixels": {"penstock, n = 3": sample, "bare": bare}}


def measure(calls: dict[str, Call], repeats: int, seconds: float) -> Figures:
    """CPU microseconds of one call, `repeats` times each."""
    figures: Figures = {name: [] for name in calls}
    counts = {}
    for name, call in calls.items():
        for _ in range(3):  # the first calls take longer
            call()
        began = time.thread_time()
        call()
        call()
        counts[name] = max(1, int(2 * seconds / max(time.thread_time() - began, 1e-6)))
    for repeat in range(repeats):
        for name in np.random.default_rng(repeat).permutation(list(calls)):
            began = time.thread_time()
            for _ in range(counts[name]):
                calls[name]()
            figures[name].append((time.thread_time() - began) / counts[name] * 1e6)
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capacity", type=int, default=1_000_000)
    parser.add_argument("--pictures", type=int, default=60_000, help="capacity of the replay of pictures")
    parser.add_argument("--seconds", type=float, default=0.1, help="length of one turn")
    parser.add_argument("--repeats", type=int, default=15, help="turns of each contestant")
    parser.add_argument("--json", help="write settings, machine and all figures to this file")
    args = parser.parse_args(arguments)

    results: dict[str, Figures] = {}
    for calls in (vector_calls(args.capacity), pixel_calls(args.pictures)):
        for what, contestants in calls.items():
            results[what] = measure(contestants, args.repeats, args.seconds)
    table = Table(title=f"replays: samples of {BATCH}, B={B}", caption=CAPTION)
    for heading in ("", "contestant", "CPU µs", "of penstock"):
        table.add_column(heading, justify="right" if "µ" in heading or "of" in heading else "left")
    for what, figures in results.items():
        own = next(iter(figures.values()))
        for name, values in figures.items():
            table.add_row(what, name, cell(values, "{:,.1f}"), cell(ratios(values, own), "{:.2f}"))
    Console(width=120).print(table)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({**machine(), "settings": vars(args), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
