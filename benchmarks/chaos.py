"""Chaos: random workers are killed, stopped and crashed at random moments.

    python benchmarks/chaos.py --seconds 600

Signals arrive as a Poisson process, two seconds apart on average. Random samplers run one after another: all start
methods, raise and restart, both ways to send trajectories. Three things must never happen: a wait without end, an
error that does not name the killed worker, a wrong cell in a batch. The environments count their steps, so that every
cell can be checked. At the first violation, the program prints one line and exits with code 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock import ParallelSampler, RandomAgent, Sampler, SamplerBrokenError, SerialSampler, TrajInfo
from penstock.envs import CountingEnv

LENGTH = 7  # steps of an episode
HANG_SECONDS = 60.0  # far more than any call here takes

# Reads lines "pid pid ...", the present workers. Sends one of them a signal at random moments, and prints it.
KILLER = """
import os, random, select, signal, sys, time
rng, mean = random.Random(int(sys.argv[1])), float(sys.argv[2])
pids, line, due = [], b"", time.monotonic() + rng.expovariate(1 / mean)
while True:
    ready, _, _ = select.select([0], [], [], max(0, due - time.monotonic()))
    if ready:
        data = os.read(0, 65536)
        if not data:
            break
        *whole, line = (line + data).split(b"\\n")
        if whole:
            pids = [int(pid) for pid in whole[-1].split()]
    if time.monotonic() >= due:
        due = time.monotonic() + rng.expovariate(1 / mean)
        if pids:
            pid, sig = rng.choice(pids), rng.choice(["SIGKILL"] * 6 + ["SIGSTOP", "SIGSEGV", "SIGTERM"])
            try:
                os.kill(pid, getattr(signal, sig))
            except ProcessLookupError:
                continue
            print(time.monotonic(), pid, sig, flush=True)
"""


class OwnTrajInfo(TrajInfo):
    """Its trajectories go through a pipe. `TrajInfo` uses shared memory."""


class Killer:
    """The process that sends the signals. It cannot be a thread, since `fork` refuses a process with threads."""

    def __init__(self, seed: int, mean_seconds: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", KILLER, str(seed), str(mean_seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self.victims: dict[int, tuple[float, str]] = {}

    def aim(self, pids: list[int]) -> None:
        """Send the pids of the present workers."""
        assert self._process.stdin is not None
        self._process.stdin.write((" ".join(map(str, pids)) + "\n").encode())
        self._process.stdin.flush()

    def read(self) -> None:
        """Read which signals the process has sent."""
        assert self._process.stdout is not None
        for line in self._process.stdout.read().splitlines() if self._has_more() else ():
            when, pid, sig = line.split()
            self.victims[int(pid)] = float(when), sig.decode()

    def _has_more(self) -> bool:
        assert self._process.stdout is not None
        return bool(self._process.stdout.peek())  # type: ignore[attr-defined]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


class Violation(AssertionError):
    """Something happened that must never happen."""


def demand(condition: Any, violation: str) -> None:
    if not np.all(condition):
        raise Violation(violation)


def check_batch(samples: Any, infos: list[TrajInfo], where: str) -> None:
    """Compare every cell of a batch of CountingEnvs with the value that follows from the observation before it."""
    env = samples.env
    episode, count = env.observation[..., 0], env.observation[..., 1]
    demand(env.reward == count + 1, f"{where}: a reward is not its step's number")
    demand(env.done == (count + 1 == LENGTH), f"{where}: a done is wrong")
    demand(env.terminated == env.done, f"{where}: terminated and done differ")
    demand(~env.truncated, f"{where}: a truncated is wrong")
    follows = np.where(env.done[:-1], 0, count[:-1] + 1) == count[1:]
    same = np.where(env.done[:-1], episode[:-1] + 1, episode[:-1]) == episode[1:]
    demand(follows & same, f"{where}: an observation does not follow from the one before")
    demand(env.final_obs[env.done][:, 1] == LENGTH, f"{where}: a final observation is wrong")
    demand(env.final_obs[~env.done] == 0, f"{where}: a final observation where no episode ends")
    demand((samples.agent.action >= 0) & (samples.agent.action < 3), f"{where}: an action outside its space")
    demand(len(infos) == env.done.sum(), f"{where}: {len(infos)} trajectories for {env.done.sum()} dones")
    demand([info.Length <= LENGTH for info in infos], f"{where}: a trajectory is too long")


def random_sampler(rng: random.Random) -> Sampler:
    settings: dict[str, Any] = {
        "env_fn": CountingEnv,
        "env_kwargs": {"length": LENGTH},
        "batch_T": rng.choice([2, 20, 300]),
        "batch_B": rng.randint(1, 12),
        "max_decorrelation_steps": rng.choice([0, 20]),
        "traj_info_cls": rng.choice([TrajInfo, OwnTrajInfo]),
        "eval_n_envs": rng.choice([0, 3]),
        "eval_max_steps": 600,
    }
    if rng.random() < 0.1:
        return SerialSampler(**settings)
    return ParallelSampler(
        n_workers=rng.randint(1, 4),
        start_method=rng.choice(["fork", "forkserver", "forkserver", "spawn"]),
        step_timeout=1.0,
        on_worker_failure=rng.choice(["raise", "restart", "restart"]),
        max_restarts=rng.choice([3, 1000]),
        **settings,
    )


def run(
    sampler: Sampler, killer: Killer, rng: random.Random, is_over: Callable[[int], bool], tally: Counter[str]
) -> float | None:
    """Sample a random number of batches, or until `is_over(restarts)`, or an error. Returns the seconds from kill to
    error, if any."""
    try:
        with sampler:
            sampler.initialize(RandomAgent(), seed=rng.randrange(1000))
            for itr in range(rng.randint(10, 3000)):
                faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
                killer.aim(sampler.worker_pids)
                samples, infos = sampler.obtain_samples(itr)
                check_batch(samples.numpy(), infos, f"{sampler!r}, itr={itr}")
                tally["batches"] += 1
                tally["trajectories"] += len(infos)
                if sampler.config.eval_n_envs and rng.random() < 0.1:
                    demand([i.Length == LENGTH for i in sampler.evaluate_agent(itr)], "an evaluation episode is wrong")
                    tally["evaluations"] += 1
                if is_over(sampler.stats().restarts):
                    break
            killer.aim([])
            stats = sampler.stats()
            tally["restarts"] += stats.restarts
            tally["lost trajectories"] += stats.lost_trajectories
    except SamplerBrokenError as error:
        raised = time.monotonic()
        killer.aim([])
        killer.read()
        tally[type(error).__name__] += 1
        named = [pid for pid in killer.victims if f"(pid {pid}," in str(error)]
        demand(named, f"an error that names no killed worker: {error}")
        tally["restarts"] += sampler.stats().restarts
        return raised - max(killer.victims[pid][0] for pid in named)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--restarts", type=int, default=0, help="go on until so many workers were restarted")
    parser.add_argument("--mean", type=float, default=2.0, help="mean seconds between signals")
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    seed = random.randrange(10**6) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    logging.getLogger("penstock").setLevel(logging.ERROR)  # every restart is logged
    rng, tally, latencies = random.Random(seed), Counter[str](), []
    killer = Killer(seed, args.mean)
    until = time.monotonic() + args.seconds

    def is_over(restarts: int = 0) -> bool:
        return time.monotonic() > until and tally["restarts"] + restarts >= args.restarts

    try:
        while not is_over():
            tally["samplers"] += 1
            latency = run(random_sampler(rng), killer, rng, is_over, tally)
            if latency is not None:
                latencies.append(latency)
    except Violation as violation:
        print(f"VIOLATION: {violation}", file=sys.stderr)
        sys.exit(1)
    finally:
        faulthandler.cancel_dump_traceback_later()
        killer.read()
        killer.close()
    signals = Counter(sig for _, sig in killer.victims.values())
    print(", ".join(f"{n:,} {what}" for what, n in sorted(tally.items())))
    print(f"{len(killer.victims)} signals: {dict(signals)}")
    if latencies:
        print(f"kill to error: median {statistics.median(latencies):.3f} s, at most {max(latencies):.3f} s")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
