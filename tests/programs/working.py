"""Samples and evaluates until it is killed, with two workers whose environments have started a process each."""

import json
import os
import sys
import time
from typing import Any

from penstock import ParallelSampler, RandomAgent
from penstock.envs import CountingEnv
from penstock.testing import Fault, faulty_env

given = json.loads(sys.argv[1])


class Game(CountingEnv):
    def __init__(self, main: int) -> None:
        super().__init__()
        if os.getpid() != main:
            self.game = os.posix_spawnp("sleep", ["sleep", "600"], os.environ)  # a Popen would warn that it was left

    def step(self, action: Any) -> Any:
        time.sleep(0.001)
        return super().step(action)


def say(*words: object) -> None:
    print(*words, flush=True)


stuck = faulty_env(Game, Fault("hold the gil", at=60)) if given["stuck"] else Game
sizes: dict[str, Any] = {"batch_T": 20, "batch_B": 2, "n_workers": 2, "eval_n_envs": 2, "eval_max_steps": 40}
how = {"start_method": given["start_method"], "max_decorrelation_steps": 0}
sampler = ParallelSampler([Game, stuck], env_kwargs={"main": os.getpid()}, **sizes, **how)
sampler.initialize(RandomAgent())
say(*sampler.worker_pids)
for itr in range(1000000):
    sampler.obtain_samples(itr)
    if itr % 3 == 0:
        sampler.evaluate_agent(itr)
    say(itr)
