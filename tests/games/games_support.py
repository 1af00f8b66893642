"""What the tests of games share: the faulty server, environments that play it, and what is left of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from penstock.games import GameProcess

from ..support import PROGRAMS

SERVER = str(PROGRAMS / "faulty_game.py")
COMMAND = [sys.executable, "-I", "-S", SERVER, "{port}"]
#: Short limits, for faults that are found when time is up.
SHORT: dict[str, Any] = {"reply_timeout": 1.0, "stop_timeout": 0.2}


def game(*arguments: str, **options: Any) -> GameProcess:
    return GameProcess([*COMMAND, *arguments], **{**SHORT, **options})


def play(connection: Any, n: int) -> list[int]:
    """What the game has counted in `n` requests."""
    return [json.loads(connection.request(b"[%d]\n" % k))["n"] for k in range(n)]


def processes(mark: str = SERVER) -> Iterator[int]:
    """The processes of all games with this text in their command, or in the variables that they were started with."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with suppress(OSError):
                files = [Path(f"/proc/{entry}/{name}").read_bytes() for name in ("cmdline", "environ")]
                if any(mark.encode() in text for text in files):
                    yield int(entry)


class Played(gym.Env[Any, Any]):
    """An environment on a game that counts. Observation: the count and a number of the seed. Episodes have 7 steps."""

    def __init__(self, mark: str = "", **options: Any) -> None:
        self.observation_space, self.action_space = Box(-np.inf, np.inf, (2,), np.float64), Discrete(5)
        self.game = game(environ={"MARK": mark}, **options)
        self.connection: Any = None
        self.fault = ""  #: strikes in the next step

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if self.game.end_episode() or self.connection is None:
            self.connection = self.game.connect()
        self.t, self.number = 0, self.np_random.random()
        return self.ask(), {}

    def ask(self) -> Any:
        asked = {"fault": self.fault} if self.fault else self.t
        reply = json.loads(self.connection.request(json.dumps(asked).encode() + b"\n"))
        return np.array([reply["got"], self.number])

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.ask(), self.t + self.number, self.t == 7, False, {}

    def close(self) -> None:
        self.game.close()
