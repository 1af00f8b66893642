"""Environments of the main process start games. It waits to be killed, or ends when its input ends.

Every environment starts a game in its process group, and one in a new session. Its first reset and first step start
others. `kind`: what has the environments. `end`: how the program will end; "building" is in the first constructor.
"""

import json
import subprocess
import sys
import time
from typing import Any

from penstock import ParallelSampler, RandomAgent, SerialSampler
from penstock.envs import CountingEnv
from penstock.vector import ShmVectorEnv

given = json.loads(sys.argv[1])


def start(**how: Any) -> None:
    """A game. A Popen would warn that it was left."""
    command = ["/bin/sh", "-c", "sleep 600 & sleep 600"]
    game = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **how)
    game.returncode = 0
    with open(given["games"], "a") as file:
        file.write(f"{game.pid}\n")


class Game(CountingEnv):
    def __init__(self) -> None:
        super().__init__()
        start()
        start(start_new_session=True)
        self.has_reset = self.has_stepped = False
        if given["end"] == "building":
            print("building", flush=True)
            time.sleep(600)

    def reset(self, **kwargs: Any) -> Any:
        if not self.has_reset:
            start()
        self.has_reset = True
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        if not self.has_stepped:
            start()
        self.has_stepped = True
        return super().step(action)


def sampler(cls: Any, **how: Any) -> Any:
    return cls(Game, batch_T=5, batch_B=2, start_method=given["start_method"], **how)


def new_owner() -> Any:
    makers: dict[str, Any] = {
        "serial": lambda: sampler(SerialSampler),
        "parallel": lambda: sampler(ParallelSampler, n_workers=1),
        "vector": lambda: ShmVectorEnv([Game, Game], context=given["start_method"]),
    }
    return makers[given["kind"]]()


def work(envs: Any) -> None:
    if given["kind"] == "vector":
        envs.reset()
    else:
        envs.initialize(RandomAgent())
        envs.obtain_samples(0)


own = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
own.returncode = 0
if given["end"] == "building":
    print(own.pid, flush=True)
if given["end"] == "shutdown":
    with new_owner() as envs:
        work(envs)
        print(own.pid, flush=True)
        sys.stdin.read()
else:
    envs = new_owner()
    work(envs)
    print(own.pid, flush=True)
    time.sleep(600)
