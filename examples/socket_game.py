"""Sample environments that play a game through a socket, with one game server per environment.

    python examples/socket_game.py

Every environment starts a server (socket_game_server.py) on a leased port. Between two batches the example kills one.
This environment is built again, with a new server, and its episode is cut. The other columns do not change.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from penstock import ParallelSampler, RandomAgent
from penstock.games import GameProcess

SERVER = Path(__file__).resolve().with_name("socket_game_server.py")


class SocketGame(gym.Env[Any, Any]):
    """A ball falls, and a paddle must catch it. Actions: left, stay, right. Reward: 1 for a catch."""

    def __init__(self) -> None:
        self.observation_space = Box(0, 10, (3,), np.float32)  # ball's x, ball's y, paddle's x
        self.action_space = Discrete(3)
        self.game = GameProcess([sys.executable, "-I", SERVER, "{port}"])
        self.connection: Any = None

    @property
    def server_pid(self) -> int:
        return self.game.pid

    def _request(self, **request: int) -> tuple[Any, dict[str, Any]]:
        state = json.loads(self.connection.request(json.dumps(request).encode() + b"\n"))
        return np.array([*state["ball"], state["paddle"]], np.float32), state

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self.connection is None:  # here, so that the games of a worker start side by side
            self.connection = self.game.connect()
        return self._request(reset=int(self.np_random.integers(2**31)))[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, state = self._request(move=int(action) - 1)
        return observation, state["reward"], state["over"], False, {}

    def close(self) -> None:
        self.game.close()


if __name__ == "__main__":
    with ParallelSampler(SocketGame, batch_T=32, batch_B=8, n_workers=4, on_game_failure="renew") as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for itr in range(2):
            _, infos = sampler.obtain_samples(itr)
            print(f"{len(infos)} balls fell, {sum(info.Return for info in infos):.0f} were caught")
            if itr == 0:
                os.kill(sampler.get_attr("server_pid")[0], signal.SIGKILL)
        print(f"{sampler.stats().renewals} game was renewed")
