"""Does it pay to act on a GPU? Contestants take turns in one run, and ratios are taken turn by turn. Needs a GPU.

    python benchmarks/gpu.py trip copies mlp nature impala pong

`trip`: µs of one step of an agent for 16, 64 and 256 environments, without environments: on one CPU core (the
convolutional networks: for 16 only), on the GPU, there from page-locked memory, and compiled as a CUDA graph.
`mlp`, `nature`, `impala`, `pong`: steps per second of samplers. CartPole-v1 with the 64-64 MLP; frames of 84 x 84 x 4
bytes that take no time, with two convolutional networks; and Pong (needs the extra `atari`), with the smaller of them.
"bound" is the number of environments divided by the time of a trip: what the policy alone could do.
`copies`: GB per second of `samples.to("cuda")`, beside torch's copy from page-locked memory.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from central import AsyncSampling, Sampling
from environments import pong
from policies import ImpalaCnn, NatureCnn
from turns import Figures, cell, machine, show, take_turns
from workloads import ENV, ActorCritic, Pixels

from penstock import AlternatingSampler, AsyncSampler, CategoricalPgAgent, GpuSampler, ParallelSampler
from penstock.buffers.samples import NamedArrays
from penstock.buffers.shared import ArraySpec, NamedMemory
from penstock.workers.affinity import usable_cpus


class FramesFirst(NatureCnn):
    """For observations [4, 84, 84]."""

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(observation.permute(0, 2, 3, 1))


POLICIES: dict[str, tuple[Any, Any]] = {
    "mlp": (ENV, ActorCritic),
    "nature": (Pixels, NatureCnn),
    "impala": (Pixels, ImpalaCnn),
    "pong": (pong, FramesFirst),
}
GRAPH = {"mode": "reduce-overhead"}


class Trips:
    """An agent acts for `n` environments again and again, with inputs in the memory of an inference server."""

    def __init__(self, policy: str, n: int, device: str | None, locked: bool = False, graph: bool = False) -> None:
        env_fn, model = POLICIES[policy]
        env = env_fn()
        learner = CategoricalPgAgent(model, device=device)
        learner.initialize(env.observation_space, env.action_space, seed=0)
        self._agent = learner.runtime.server_copy()
        if graph:
            self._agent.runtime.compile_model(GRAPH)
        space = env.observation_space
        spec = ArraySpec((n, *space.shape), space.dtype)
        self._memory = NamedMemory(NamedArrays(observation=spec), shared=True, purpose="a benchmark")
        self._memory.arrays.observation[...] = np.stack([space.sample() for _ in range(n)])
        self._lock = ExitStack()
        if locked:
            self._lock.enter_context(self._agent.runtime.page_locked(self._memory.whole))
        self._previous = np.zeros(n, np.int64), np.zeros(n, np.float32)
        self._agent.seed_columns([np.random.default_rng(b) for b in range(n)])
        self._agent.sample_mode(0)
        self.batch()  # a graph is recorded at the third step

    def batch(self) -> int:
        """Ten steps of the agent. Returns their number."""
        for _ in range(10):
            self._agent.step(self._memory.arrays.observation, *self._previous)
        return 10

    def close(self) -> None:
        self._lock.close()
        self._memory.close()


def trip(repeats: int, seconds: float) -> dict[str, Figures]:
    """µs of a step of the agent, by policy and number of environments."""
    torch.set_num_threads(1)
    found: dict[str, Figures] = {}
    for policy in ("mlp", "nature", "impala"):
        for n in (16, 64, 256):
            contestants: dict[str, Callable[[], Trips]] = {
                "GPU": partial(Trips, policy, n, "cuda", locked=True),
                "GPU, memory not page-locked": partial(Trips, policy, n, "cuda"),
                "GPU, as a graph": partial(Trips, policy, n, "cuda", locked=True, graph=True),
                "CPU": partial(Trips, policy, n, None),
            }
            if policy != "mlp" and n > 16:
                del contestants["CPU"]  # a step takes up to a second
            rates = take_turns({name: make() for name, make in contestants.items()}, repeats, seconds)
            found[f"{policy}, {n} environments"] = {
                name: [1e6 / rate for rate in values] for name, values in rates.items()
            }
    return found


def samplers(policy: str, repeats: int, seconds: float, n_envs: int, batch_T: int) -> Figures:
    """Steps per second of samplers that act on the CPUs or on the GPU, with one worker for each CPU except one,
    rounded down to an even number."""
    env, model = POLICIES[policy]
    n_workers = max(2, (len(usable_cpus()) - 1) // 2 * 2)  # halves need an even number
    size: dict[str, Any] = {"batch_T": batch_T, "batch_B": n_envs // n_workers * n_workers, "n_workers": n_workers}

    def agent(device: str | None = "cuda") -> Any:
        return CategoricalPgAgent(model, device=device)

    contestants = {
        "ParallelSampler, CPUs": Sampling(ParallelSampler(env, **size), agent(None)),
        "GpuSampler": Sampling(GpuSampler(env, **size), agent()),
        "GpuSampler, min_ready=0.5": Sampling(GpuSampler(env, min_ready=0.5, **size), agent()),
        "GpuSampler, as a graph": Sampling(GpuSampler(env, compile_model=GRAPH, **size), agent()),
        "AlternatingSampler": Sampling(AlternatingSampler(env, **size), agent()),
        "AsyncSampler, server process": AsyncSampling(AsyncSampler(env, server="process", **size), agent()),
    }
    figures = take_turns(contestants, repeats, seconds)
    bound = take_turns({"": Trips(policy, size["batch_B"], "cuda", locked=True)}, repeats, seconds / 2)[""]
    return {**figures, "bound": [rate * size["batch_B"] for rate in bound]}


class Copies:
    """Copies a batch to the GPU."""

    def __init__(self, copy: Callable[[], Any], n_bytes: int, close: Callable[[], None]) -> None:
        self._copy, self._n_bytes, self.close = copy, n_bytes, close

    def batch(self) -> int:
        """Returns the number of bytes."""
        self._copy()
        torch.cuda.synchronize()
        return self._n_bytes


def copies(repeats: int, seconds: float) -> Figures:
    """GB per second for a batch of frames, 128 steps of 64 environments: 231 MB of observations, and as much of
    `final_obs`."""
    learner = CategoricalPgAgent(NatureCnn, device="cuda")
    sampler = ParallelSampler(Pixels, batch_T=128, batch_B=64, n_workers=2)
    sampler.initialize(learner, seed=0)
    gigabyte = NamedMemory(NamedArrays(a=ArraySpec((10**9,), np.dtype(np.uint8))), shared=True, purpose="a benchmark")
    gigabyte.arrays.a.fill(1)
    began = time.monotonic()
    with learner.runtime.page_locked(gigabyte.whole):
        print(f"to page-lock 1 GB: {time.monotonic() - began:.3f} s")
    gigabyte.close()
    samples, _ = sampler.obtain_samples(0)
    frames = samples.env.observation
    n_bytes = frames.numel()
    locked = torch.empty(frames.shape, dtype=frames.dtype, pin_memory=True).copy_(frames)
    pageable = frames.clone()
    contestants = {
        'samples.to("cuda")': Copies(lambda: samples.to("cuda"), 2 * n_bytes, sampler.shutdown),
        "observations alone": Copies(lambda: frames.to("cuda"), n_bytes, lambda: None),
        "torch, page-locked": Copies(lambda: locked.to("cuda"), n_bytes, lambda: None),
        "torch, not page-locked": Copies(lambda: pageable.to("cuda"), n_bytes, lambda: None),
    }
    return {name: [rate / 1e9 for rate in rates] for name, rates in take_turns(contestants, repeats, seconds).items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="of trip, copies, mlp, nature, impala, pong; all by default")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.4, help="minimum length of a turn")
    parser.add_argument("--n-envs", type=int, default=128)
    parser.add_argument("--batch-T", type=int, default=16)
    parser.add_argument("--json", help="write machine and all figures to this file")
    args = parser.parse_args(arguments)
    if unknown := set(args.what) - {"trip", "copies", *POLICIES}:
        parser.error(f"there is no measurement {', '.join(unknown)}")
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU that torch can use: torch.cuda.is_available() is False")
    print(torch.cuda.get_device_name(0), machine())
    results: dict[str, Any] = {}
    for what in args.what or ["trip", "copies", *POLICIES]:
        began = time.monotonic()
        if what == "trip":
            results[what] = trip(args.repeats, args.seconds)
            for name, figures in results[what].items():
                show(name, figures, None)
        elif what == "copies":
            results[what] = copies(args.repeats, args.seconds)
            for name, values in results[what].items():
                print(f"{name}: {cell(values, '{:.1f}')} GB per second")
        else:
            results[what] = samplers(what, args.repeats, args.seconds, args.n_envs, args.batch_T)
            show(what, results[what], "ParallelSampler, CPUs")
        print(f"{what}: {time.monotonic() - began:.0f} s", flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"gpu": torch.cuda.get_device_name(0), **machine(), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
