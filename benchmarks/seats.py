"""Several agents in one environment: what a step of an agent costs, and how fast other libraries are.

    python benchmarks/seats.py cost                       # CPU time of an agent step, beyond the game and the policy
    python benchmarks/seats.py plies                      # the same for a decision in a game in turns
    python benchmarks/seats.py still spread --json FILE   # penstock and its peers take turns in one run

"still" is a game of three agents that takes no time, "spread" is simple_spread of mpe2. All contestants step 8 games
in 2 processes with random actions, and record batches of 128 time steps, except the bare loops, which record nothing.
Each is a process tree, which is stopped while others have their turn. Speeds count steps of agents. Peers that are not
installed are named: SuperSuit, TorchRL, RLlib.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from turns import cell

try:
    from pettingzoo import ParallelEnv
except ImportError:
    ParallelEnv = object  # "cost" needs none


class Still(ParallelEnv):  # type: ignore[misc, unused-ignore]
    """A game that takes no time: it returns the same dicts in each step. After `length` steps, all agents are cut off;
    with `away`, the last agent is not there."""

    metadata = {"name": "still", "render_modes": []}  # noqa: RUF012
    render_mode = None

    def __init__(self, k: int = 3, away: int = 0, length: int = 25) -> None:
        self.possible_agents = [f"agent_{i}" for i in range(k)]
        self._there, self._length, self._t = self.possible_agents[: k - away], length, 0
        self.agents: list[str] = []
        self._spaces = spaces.Box(-1, 1, (18,), np.float32), spaces.Discrete(5)
        no, yes = dict.fromkeys(self._there, False), dict.fromkeys(self._there, True)
        self._seen = {agent: np.ones(18, np.float32) for agent in self._there}
        self._infos: dict[str, Any] = {agent: {} for agent in self._there}
        rewards = dict.fromkeys(self._there, 1.0)
        self._step, self._last = (rewards, no, no, self._infos), (rewards, no, yes, self._infos)

    def observation_space(self, agent: str) -> Any:
        return self._spaces[0]

    def action_space(self, agent: str) -> Any:
        return self._spaces[1]

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self._t, self.agents = 0, self._there
        return self._seen, self._infos

    def step(self, actions: Any) -> Any:
        self._t += 1
        if self._t < self._length:
            return self._seen, *self._step
        self.agents = []
        return self._seen, *self._last

    def close(self) -> None:
        """There is nothing to close."""


class StillTurns:
    """A game of two players in turns (an `AECEnv`) that takes no time: it returns the same objects in each move, with
    the observations of connect four. After `length` moves it is over."""

    metadata = {"name": "still_turns", "render_modes": []}  # noqa: RUF012
    render_mode = None

    def __init__(self, length: int = 30) -> None:
        self.possible_agents = ["player_0", "player_1"]
        self.agents: list[str] = []
        own = {"observation": spaces.Box(0, 1, (6, 7, 2), np.int8), "action_mask": spaces.Box(0, 1, (7,), np.int8)}
        self._spaces = spaces.Dict(own), spaces.Discrete(7)
        seen: dict[str, Any] = {"observation": np.ones((6, 7, 2), np.int8), "action_mask": np.ones(7, np.int8)}
        self._on, self._over = (seen, 0.0, False, False, {}), (seen, 1.0, True, False, {})
        self._length = length

    def observation_space(self, agent: str) -> Any:
        return self._spaces[0]

    def action_space(self, agent: str) -> Any:
        return self._spaces[1]

    def agent_iter(self) -> Any:
        while self.agents:
            yield self.agent_selection

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents, self._t, self.agent_selection = list(self.possible_agents), 0, "player_0"

    def last(self, observe: bool = True) -> Any:
        return self._on if self._t < self._length else self._over

    def step(self, action: Any) -> None:
        if self._t >= self._length:
            self.agents.remove(self.agent_selection)
            self.agent_selection = self.agents[0] if self.agents else ""
            return
        self._t += 1
        self.agent_selection = self.possible_agents[self._t % 2]

    def close(self) -> None:
        """There is nothing to close."""


def spread() -> Any:
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env(max_cycles=25)


@dataclass(frozen=True)
class Work:
    """What the contestants sample."""

    title: str
    make_env: Callable[[], Any]
    k: int = 3
    n_envs: int = 8
    T: int = 128
    n_workers: int = 2
    rows: int = 16


WORKS = {"still": Work("a game of 3 agents that takes no time", Still), "spread": Work("simple_spread", spread)}

# ---- contestants -----------------------------------------------------------------------------------


def bare_process(work: Work, n_envs: int, pipe: Any) -> None:
    """Step `n_envs` games for as many seconds as a message says, and record nothing."""
    envs = [work.make_env() for _ in range(n_envs)]
    for i, env in enumerate(envs):
        env.reset(seed=i)
    table = np.random.default_rng(0).integers(0, 5, (4096, work.k)).tolist()
    row = 0
    while True:
        seconds, steps, began = pipe.recv(), 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            for env in envs:
                row = (row + 1) % 4096
                env.step(dict(zip(env.agents, table[row], strict=True)))
                if not env.agents:
                    env.reset()
            steps += n_envs * work.k
        pipe.send((steps, time.perf_counter() - began))


class Bare:
    """Bare loops in each process. "In step" is the speed of the slowest, times their number."""

    def __init__(self, work: Work, loop: Callable[..., None] = bare_process) -> None:
        context, self._pipes, self._processes = multiprocessing.get_context("fork"), [], []
        for games in np.array_split(range(work.n_envs), work.n_workers):
            here, there = context.Pipe()
            process = context.Process(target=loop, args=(work, len(games), there), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def turn(self, seconds: float) -> dict[str, float]:
        for pipe in self._pipes:
            pipe.send(seconds)
        parts = [pipe.recv() for pipe in self._pipes]
        slowest = min(steps / took for steps, took in parts) * len(parts)
        return {"steps": sum(steps for steps, _ in parts), "rate": slowest}

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


class Sampling:
    """A sampler of penstock."""

    def __init__(self, work: Work) -> None:
        import penstock

        self._work, self._itr = work, 0
        self._sampler = penstock.ParallelSampler(
            work.make_env, batch_T=work.T, batch_B=work.n_envs, n_workers=work.n_workers, max_decorrelation_steps=0
        )
        self._sampler.initialize(penstock.RandomAgent(), seed=0)
        self.close = self._sampler.shutdown

    def advance(self) -> int:
        self._itr += 1
        samples, _ = self._sampler.obtain_samples(self._itr)
        return int(samples.env.valid.numel())


class Loop:
    """A loop over a vector environment whose rows are agents, as in training scripts."""

    def __init__(self, work: Work, env: Any) -> None:
        n = work.n_envs * work.k
        self._env, self._work, self._t, self._n = env, work, 0, n
        self._actions = np.random.default_rng(0).integers(0, 5, (4096, n))
        self._observations = np.zeros((work.T, n, 18), np.float32)
        self._rewards, self._dones = np.zeros((2, work.T, n), np.float32)
        self._recorded = np.zeros((work.T, n), np.int64)
        self._observation, self.close = env.reset(seed=0)[0], env.close

    def advance(self) -> int:
        for _ in range(self._work.rows):
            t, actions = self._t % self._work.T, self._actions[self._t % 4096]
            self._observations[t], self._recorded[t] = self._observation, actions
            self._observation, self._rewards[t], terminated, truncated, _ = self._env.step(actions)
            self._dones[t] = np.logical_or(terminated, truncated)
            self._t += 1
        return self._work.rows * self._n


def shm(work: Work) -> Loop:
    from penstock.vector import ShmVectorEnv

    return Loop(work, ShmVectorEnv([work.make_env] * work.n_envs, n_workers=work.n_workers))


def supersuit(work: Work) -> Loop:
    from supersuit import concat_vec_envs_v1, pettingzoo_env_to_vec_env_v1

    vec_env = pettingzoo_env_to_vec_env_v1(work.make_env())
    return Loop(work, concat_vec_envs_v1(vec_env, work.n_envs, num_cpus=work.n_workers, base_class="gymnasium"))


class TorchRL:
    """TorchRL's `ParallelEnv` of two processes, each with half of the games, and its collector."""

    def __init__(self, work: Work) -> None:
        from torchrl import collectors
        from torchrl.envs import ParallelEnv as InProcesses
        from torchrl.envs import PettingZooWrapper, SerialEnv

        n = work.n_envs // work.n_workers
        env = InProcesses(work.n_workers, lambda: SerialEnv(n, lambda: PettingZooWrapper(work.make_env())))
        cls = getattr(collectors, "Collector", None) or collectors.SyncDataCollector
        frames = work.T * work.n_envs
        self._k, self._collector = work.k, cls(env, None, frames_per_batch=frames, total_frames=-1)
        self._batches, self.close = iter(self._collector), self._collector.shutdown

    def advance(self) -> int:
        return int(next(self._batches).numel()) * self._k


class RLlib:
    """Two of RLlib's multi-agent env runners, which act at random."""

    def __init__(self, work: Work, wrapper: Callable[[Any], Any] | None = None) -> None:
        import ray
        from ray.rllib.algorithms.ppo import PPOConfig
        from ray.rllib.core.rl_module.rl_module import RLModuleSpec
        from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
        from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
        from ray.tune.registry import register_env

        ray.init("local", num_cpus=work.n_workers, logging_level="ERROR", include_dashboard=False)
        wrapper = wrapper or ParallelPettingZooEnv
        register_env("game", lambda _: wrapper(work.make_env()))
        config = (
            PPOConfig()
            .environment("game")
            .env_runners(num_env_runners=work.n_workers, num_envs_per_env_runner=1, rollout_fragment_length=work.T)
            .multi_agent(policies={"shared"}, policy_mapping_fn=lambda *_, **__: "shared")
            .rl_module(rl_module_spec=RLModuleSpec())
        )
        remote = ray.remote(num_cpus=1)(MultiAgentEnvRunner)
        self._runners = [remote.remote(config=config, worker_index=i + 1) for i in range(work.n_workers)]
        self._work, self._ray, self.close = work, ray, ray.shutdown

    def advance(self) -> int:
        n = self._work.T * self._work.n_envs // self._work.n_workers
        found = self._ray.get([runner.sample.remote(num_timesteps=n, random_actions=True) for runner in self._runners])
        return sum(episode.agent_steps() for episodes in found for episode in episodes)


BARE = "bare loops in step"
CONTESTANTS: dict[str, tuple[Callable[[Work], Any], Sequence[str]]] = {
    BARE: (Bare, ("still", "spread")),
    "penstock ParallelSampler": (Sampling, ("still", "spread")),
    "penstock ShmVectorEnv": (shm, ("still", "spread")),
    "SuperSuit concat_vec_envs": (supersuit, ("still", "spread")),
    "TorchRL ParallelEnv": (TorchRL, ("still", "spread")),
    "RLlib multi-agent env runners": (RLlib, ("still", "spread")),
}

# ---- measuring -------------------------------------------------------------------------------------


def compare(
    work: str,
    args: argparse.Namespace,
    title: str = "",
    names: Sequence[str] = (),
    script: str = __file__,
    unit: str = "steps of agents",
) -> dict[str, Any]:
    """Rounds of turns of all contestants, and a table."""
    from peer_process import Contestant, await_calm

    names, title = names or list(CONTESTANTS), title or WORKS[work].title
    contestants = [Contestant(work, name, args.limit, False, script=script) for name in names]
    rounds: list[dict[str, Any]] = []
    try:
        for repeat in range(args.repeats):
            rounds.append({})
            for i in np.random.default_rng(repeat).permutation(len(contestants)):
                contestant = contestants[i]
                if contestant.missing is None:
                    await_calm(args.calm)
                    if turn := contestant.turn(seconds=args.seconds, pause=0.0, kind="sleep"):
                        rounds[-1][contestant.name] = turn
        missing = {contestant.name: contestant.missing for contestant in contestants if contestant.missing}
    finally:
        for contestant in contestants:
            if contestant.missing is None:
                contestant.close()
    print(f"{title}: {unit} per second; median (middle half) of {len(rounds)} rounds")
    for name in names:
        turns = [one[name] for one in rounds if name in one]
        if not turns:
            print(f"  {name}: {missing.get(name)}")
            continue
        of_bare = [one[name]["rate"] / one[BARE]["rate"] for one in rounds if name in one and BARE in one]
        rates, cpu = ([turn[key] for turn in turns] for key in ("rate", "cpu_us"))
        print(f"  {name}: {cell(rates, '{:,.0f}')}; of bare {cell(of_bare, '{:.3f}')}; CPU {cell(cpu, '{:.2f}')} µs")
    return {"work": work, "rounds": rounds, "missing": missing}


def cost(args: argparse.Namespace) -> dict[str, Any]:
    """CPU time of an agent step in a `SerialSampler`, beyond `env.step` and without a policy."""
    from penstock import Agent, SerialSampler
    from penstock.agents import AgentStep

    class Fixed(Agent):
        def seed_columns(self, rngs: Any) -> None:
            self._step = AgentStep(np.zeros(len(rngs), np.int64))

        def step(self, *_: Any) -> AgentStep:
            return self._step

    rows, T = {}, 200
    print("ns of CPU time for each agent step, beyond the game; the least of the rounds")
    for k, n, away in ((k, n, away) for k in (3, 20) for n in (1, 4, 16) for away in (0, 1)):
        options, env = {"k": k, "away": away, "length": 10**9}, Still(k, away, 10**9)
        env.reset()
        given = dict.fromkeys(env.agents, 0)
        with SerialSampler(Still, env_kwargs=options, batch_T=T, batch_B=n, max_decorrelation_steps=0) as sampler:
            sampler.initialize(Fixed(), seed=0)
            own, bare = [], []
            for itr in range(args.repeats):
                began = time.process_time()
                sampler.obtain_samples(itr)
                between = time.process_time()
                for _ in range(T * n):
                    env.step(given)
                own.append(between - began)
                bare.append(time.process_time() - between)
        name = f"k={k}, {n} games, {'one away' if away else 'all there'}"
        rows[name] = (min(own) - min(bare)) / (T * n * (k - away)) * 1e9
        print(f"  {name}: {rows[name]:,.0f}")
    return {"work": "cost", "ns": rows}


def plies(args: argparse.Namespace) -> dict[str, Any]:
    """CPU time of a decision in a game in turns, in a `SerialSampler`, beyond the game and without a policy."""
    from penstock import Agent, SerialSampler
    from penstock.agents import AgentStep

    class Fixed(Agent):
        def seed_columns(self, rngs: Any) -> None:
            self._steps = [AgentStep(np.zeros(n, np.int64)) for n in range(len(rngs) + 1)]

        def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
            return self._steps[len(prev_reward)]

    rows, T = {}, 200
    print("µs of CPU time for each decision in a game of two players, beyond the game; the least of the rounds")
    for n in (1, 4, 16):
        env = StillTurns()
        with SerialSampler(StillTurns, batch_T=T, batch_B=n, max_decorrelation_steps=0) as sampler:
            sampler.initialize(Fixed(), seed=0)
            own, bare = [], []
            for itr in range(args.repeats):
                began = time.process_time()
                samples, _ = sampler.obtain_samples(itr)
                between, n_plies = time.process_time(), int(samples.env.valid.sum())
                own.append((between - began) / n_plies)
                between = time.process_time()
                for _ in range(n_plies):
                    while not env.agents or env.last()[2]:
                        if env.agents:
                            env.step(None)
                        else:
                            env.reset()
                    env.step(0)
                bare.append((time.process_time() - between) / n_plies)
        name = f"{n} games" if n > 1 else "1 game"
        rows[name] = (min(own) - min(bare)) * 1e6
        print(f"  {name}: {rows[name]:.2f} (the game alone {min(bare) * 1e6:.2f})")
    return {"work": "plies", "us": rows}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", help="of cost, plies, still, spread; all by default")
    parser.add_argument("--repeats", type=int, default=15, help="rounds")
    parser.add_argument("--seconds", type=float, default=0.5, help="least length of a turn")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds to start, and for one turn")
    parser.add_argument("--calm", type=float, default=0.0, help="longest wait before a turn until other programs rest")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args(arguments)
    known: dict[str, Callable[[argparse.Namespace], Any]] = {"cost": cost, "plies": plies}
    known |= {name: partial(compare, name) for name in WORKS}
    if unknown := set(args.works) - set(known):
        parser.error(f"there is no work {', '.join(sorted(unknown))}")
    results = [known[name](args) for name in args.works or known]
    if args.json:
        from turns import machine

        args.json.write_text(json.dumps({**machine(), "results": results}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        from peer_process import serve

        serve(sys.argv[2], sys.argv[3], "--whole-batches" in sys.argv, "seats")
    else:
        main()
