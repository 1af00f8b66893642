"""Kills the process that starts its workers, says what the vector environments raise, and makes another one."""

import os
import signal
from functools import partial
from typing import Any

import psutil

from penstock import WorkerDiedError
from penstock.envs import CountingEnv
from penstock.vector import ShmVectorEnv


class Game(CountingEnv):
    def __init__(self, main: int) -> None:
        super().__init__()
        if os.getpid() != main:
            self.game = os.posix_spawnp("sleep", ["sleep", "600"], os.environ)

    def reset(self, **kwargs: Any) -> Any:
        observation, info = super().reset(**kwargs)
        return observation, {**info, "game": getattr(self, "game", 0)}


def vector_env() -> ShmVectorEnv:
    return ShmVectorEnv([partial(Game, os.getpid())] * 2)


with vector_env() as first, vector_env() as second:
    games = [int(game) for envs in (first, second) for game in envs.reset()[1]["game"]]
    workers = [*first.worker_pids, *second.worker_pids]
    print(*workers, *games, flush=True)
    os.kill(psutil.Process(workers[0]).ppid(), signal.SIGKILL)
    for envs in (first, second):
        try:
            while True:
                envs.step([0, 0])
        except WorkerDiedError as error:
            print(str(error).splitlines()[0], flush=True)
with vector_env() as third:
    third.reset()
    third.step([0, 0])
    print("next start", flush=True)
