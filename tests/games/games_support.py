"""What the tests of games share: the faulty server, environments that play it, and what is left of it."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import psutil
from gymnasium.spaces import Box, Discrete

from penstock import AlternatingSampler, AsyncSampler, GpuSampler, ParallelSampler, RandomAgent, SerialSampler
from penstock.envs.seeding import Purpose
from penstock.games import GameProcess

from ..support import PROGRAMS, collect, sampler_of, without_infos

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here

SAMPLERS = (SerialSampler, ParallelSampler, GpuSampler, AlternatingSampler, AsyncSampler)

SERVER = str(PROGRAMS / "faulty_game.py")
COMMAND = [sys.executable, "-I", "-S", SERVER, "{port}"]
#: Marks the games of this process: others may run tests too.
OWN = f"GAMES_OF_TESTS={os.getpid()}."
os.environ.update([OWN.split("=")])
#: Short limits, for faults that are found when time is up.
SHORT: dict[str, Any] = {"reply_timeout": 1.0, "stop_timeout": 0.2}


def game(*arguments: str, **options: Any) -> GameProcess:
    return GameProcess([*COMMAND, *arguments], **{**SHORT, **options})


def play(connection: Any, n: int) -> list[int]:
    """What the game has counted in `n` requests."""
    return [json.loads(connection.request(b"[%d]\n" % k))["n"] for k in range(n)]


def processes(mark: str = SERVER) -> Iterator[int]:
    """The processes of all games with this text in their command, or in the variables that they were started with."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or is another user's
            variables = [f"{name}={value}" for name, value in process.environ().items()]
            is_own = process.pid != os.getpid() and any(OWN in text for text in variables)
            if is_own and any(mark in text for text in (*variables, "\0".join(process.cmdline()))):
                yield process.pid


class Played(gym.Env[Any, Any]):
    """An environment on a game that counts. Observation: the time step, and a number of the seed. An episode has 7
    steps.

    `faults`: by env_rank, the step of this environment in which the fault of this name strikes. Each strikes once,
    since it leaves a file in `folder`.
    """

    def __init__(
        self, folder: str, faults: dict[int, tuple[int, str]] | None = None, context: Any = None, **options: Any
    ) -> None:
        self.observation_space, self.action_space = Box(-np.inf, np.inf, (2,), np.float64), Discrete(5)
        is_train = context is not None and context.purpose is Purpose.TRAIN
        self.at, self.fault = (faults or {}).get(context.env_rank, (-1, "")) if is_train else (-1, "")
        self.marker = Path(folder, f"struck-{context.env_rank if context else 0}")
        self.game = game(environ={"MARK": folder}, **options)
        self.connection: Any = None
        self.n_steps = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if self.connection is None or self.game.end_episode():
            self.connection = self.game.connect()
        self.t, self.number = 0, self.np_random.random()
        return self.ask(self.t), {}

    def ask(self, asked: Any) -> Any:
        json.loads(self.connection.request(json.dumps(asked).encode() + b"\n"))
        return np.array([self.t, self.number])

    def step(self, action: Any) -> Any:
        self.t, self.n_steps, asked = self.t + 1, self.n_steps + 1, self.t
        if self.n_steps == self.at and not self.marker.exists():
            self.marker.touch()
            asked = {"fault": self.fault}
        return self.ask(asked), self.t + self.number, self.t == 7, False, {}

    def close(self) -> None:
        self.game.close()


@functools.cache
def undisturbed_games(collector_cls: Any) -> list[Any]:
    """5 batches of 6 columns without faults. Every sampler gives these; a test compares the columns that it has."""
    options: dict[str, Any] = {"batch_B": 6, "on_game_failure": "renew", "collector_cls": collector_cls}
    with sampler_of(SerialSampler, partial(Played, ""), **options) as sampler:
        sampler.initialize(RandomAgent(), seed=7)
        return without_infos(collect(sampler, 5))
