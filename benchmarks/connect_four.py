"""Connect four, whose players take turns: how fast penstock, TorchRL and RLlib record it, beside the game alone.

    python benchmarks/connect_four.py rates --repeats 15 --json FILE
    python benchmarks/connect_four.py record              # what it saves to record one policy of five

All contestants play 8 games in 2 processes, with random legal moves, and take turns in one run. Bare loops play the
games and record nothing: they show what the game alone takes. Speeds count moves. Peers that are not installed are
named.

"record" plays with a small network and four past selves in one process.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from seats import BARE, Bare, RLlib, Work, compare
from turns import cell, machine


def connect_four() -> Any:
    from pettingzoo.classic import connect_four_v3

    return connect_four_v3.env()


WORKS = {"connect_four": Work("connect four", connect_four, k=2, T=64)}


def bare_process(work: Work, n_envs: int, pipe: Any) -> None:
    """Play `n_envs` games for as many seconds as a message says, as PettingZoo's documents do, and record nothing."""
    envs = [work.make_env() for _ in range(n_envs)]
    for i, env in enumerate(envs):
        env.reset(seed=i)
    noise = np.random.default_rng(0).random(4096).tolist()
    at = 0
    while True:
        seconds, moves, began = pipe.recv(), 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            for env in envs:
                observation, _, terminated, truncated, _ = env.last()
                while terminated or truncated:
                    env.step(None)
                    if not env.agents:
                        env.reset()
                    observation, _, terminated, truncated, _ = env.last()
                legal = observation["action_mask"].nonzero()[0]
                at = (at + 1) % 4096
                env.step(int(legal[int(noise[at] * len(legal))]))
            moves += n_envs
        pipe.send((moves, time.perf_counter() - began))


class Sampling:
    """A sampler of penstock."""

    def __init__(self, work: Work) -> None:
        import penstock

        self._sampler = penstock.ParallelSampler(
            work.make_env, batch_T=work.T, batch_B=work.n_envs, n_workers=work.n_workers, max_decorrelation_steps=0
        )
        self._sampler.initialize(penstock.RandomAgent(mask_key="observation.action_mask"), seed=0)
        self._itr, self.close = 0, self._sampler.shutdown

    def advance(self) -> int:
        self._itr += 1
        samples, _ = self._sampler.obtain_samples(self._itr)
        return int(samples.env.valid.sum())


class TorchRL:
    """TorchRL's `ParallelEnv` of two processes, each with half of the games, and its collector."""

    def __init__(self, work: Work) -> None:
        import torch
        from torchrl import collectors
        from torchrl.envs import ParallelEnv, PettingZooWrapper, SerialEnv

        def legal(data: Any) -> Any:
            for player in ("player_0", "player_1"):
                mask = data[player, "action_mask"]
                drawn = torch.multinomial(mask.flatten(0, -2).float(), 1)
                data[player, "action"] = drawn.view(mask.shape[:-1])
            return data

        n = work.n_envs // work.n_workers
        env = ParallelEnv(
            work.n_workers, lambda: SerialEnv(n, lambda: PettingZooWrapper(work.make_env(), use_mask=True))
        )
        cls = getattr(collectors, "Collector", None) or collectors.SyncDataCollector
        frames = work.T * work.n_envs
        self._collector = cls(env, legal, frames_per_batch=frames, total_frames=-1, trust_policy=True)
        self._batches, self.close = iter(self._collector), self._collector.shutdown

    def advance(self) -> int:
        return int(next(self._batches).numel())


def rllib(work: Work) -> RLlib:
    """Two of RLlib's multi-agent env runners. Its own random actions would be illegal ones too, and end games early: so
    the "action space" of a player draws from the legal ones. It records the boards only, as its network wants them."""
    from gymnasium import spaces
    from ray.rllib.env.wrappers.pettingzoo_env import PettingZooEnv

    class Legal(PettingZooEnv):  # type: ignore[misc]
        def __init__(self, env: Any) -> None:
            super().__init__(env)
            self.observation_spaces = dict.fromkeys(self.possible_agents, spaces.Box(0, 1, (84,), np.int8))
            self.observation_space = spaces.Dict(self.observation_spaces)

        def get_action_space(self, agent_id: Any) -> Any:
            return SimpleNamespace(sample=self._draw)

        def _draw(self) -> int:
            legal = self._mask.nonzero()[0]
            return int(legal[np.random.randint(len(legal))])

        def reset(self, **kwargs: Any) -> Any:
            return self._noted(super().reset(**kwargs))

        def step(self, action: Any) -> Any:
            return self._noted(super().step(action))

        def _noted(self, result: Any) -> Any:
            for agent_id, observation in result[0].items():
                self._mask = observation["action_mask"]
                result[0][agent_id] = observation["observation"].reshape(84)
            return result

    return RLlib(work, Legal)


CONTESTANTS: dict[str, tuple[Callable[[Work], Any]]] = {
    BARE: (lambda work: Bare(work, bare_process),),
    "penstock ParallelSampler": (Sampling,),
    "TorchRL ParallelEnv": (TorchRL,),
    "RLlib multi-agent env runners": (rllib,),
}


def record(args: argparse.Namespace) -> dict[str, Any]:
    """The memory of the batch, and the CPU time of a move, if all policies are recorded and if only one is."""
    from penstock import CategoricalPgAgent, SerialSampler

    def model(observation_space: Any, action_space: Any) -> Any:
        from torch import nn

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Sequential(nn.Flatten(), nn.Linear(6 * 7 * 2, 64), nn.ReLU())
                self.policy, self.critic = nn.Linear(64, 7), nn.Linear(64, 1)

            def forward(self, observation: Any) -> Any:
                features = self.body(observation.observation.float())
                return self.policy(features), self.critic(features).squeeze(-1)

        return Model()

    def seat(agent_id: str, game: int, rng: np.random.Generator) -> str:
        return "main" if agent_id == f"player_{game % 2}" else f"past_{rng.integers(4)}"

    samplers, cpu = {}, dict[str, list[float]]()
    for name, recorded in (("all", None), ("main", ["main"])):
        sampler = samplers[name] = SerialSampler(connect_four, batch_T=64, batch_B=args.batch_B)
        names = ("main", "past_0", "past_1", "past_2", "past_3")
        agents = {own: CategoricalPgAgent(model, mask_key="observation.action_mask") for own in names}
        sampler.initialize(agents, policy_of=seat, record=recorded, seed=0, bootstrap_value=True)
        cpu[name] = []
    for itr in range(args.repeats):
        for name, sampler in samplers.items():
            before, began = sampler.stats().workers[0].steps, time.process_time()
            sampler.obtain_samples(itr)
            moves = sampler.stats().workers[0].steps - before
            cpu[name].append((time.process_time() - began) / moves * 1e6)
    result: dict[str, Any] = {"work": "record"}
    for name, sampler in samplers.items():
        nbytes = sum(leaf.nbytes for _, leaf in sampler.samples_np.leaves())
        result[name] = {"batch_bytes": nbytes, "cpu_us": cpu[name]}
        print(f"recorded: {name}: the batch has {nbytes / 1e6:.2f} MB; CPU {cell(cpu[name], '{:.1f}')} µs a move")
        sampler.shutdown()
    ratio = [one / other for one, other in zip(cpu["main"], cpu["all"], strict=True)]
    print(f"CPU of main, beside all: {cell(ratio, '{:.3f}')}")
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", help="of rates, record; both by default")
    parser.add_argument("--repeats", type=int, default=15, help="rounds")
    parser.add_argument("--seconds", type=float, default=0.5, help="least length of a turn")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds to start, and for one turn")
    parser.add_argument("--calm", type=float, default=0.0, help="longest wait before a turn until other programs rest")
    parser.add_argument("--batch-B", type=int, default=16, help="games of `record`")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args(arguments)
    (name,) = WORKS
    how = (name, args, WORKS[name].title, list(CONTESTANTS), __file__, "moves")
    known: dict[str, Callable[[], dict[str, Any]]] = {"rates": lambda: compare(*how), "record": lambda: record(args)}
    if unknown := set(args.works) - set(known):
        parser.error(f"there is no work {', '.join(sorted(unknown))}")
    results = [known[own]() for own in args.works or known]
    if args.json:
        args.json.write_text(json.dumps({**machine(), "results": results}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        from peer_process import serve

        serve(sys.argv[2], sys.argv[3], "--whole-batches" in sys.argv, "connect_four")
    else:
        main()
