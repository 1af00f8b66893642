"""Environments for tests of `EnvProcess`. They run under Gymnasium and under gym 0.21 to 0.26, with Python 3.7 too."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import random
import signal
import stat
import string
import subprocess
import sys
import time
from typing import Any, ClassVar

import numpy as np

gym: Any = importlib.import_module("gymnasium" if importlib.util.find_spec("gymnasium") else "gym")
S: Any = gym.spaces


class Numbers(gym.Env):  # type: ignore[misc]
    """A pure function of seed and actions. An episode has `length` steps."""

    def __init__(self, length: int = 7, shape: Any = (4,)) -> None:
        self.observation_space, self.action_space = S.Box(-9, 9, tuple(shape), np.float32), S.Discrete(5)
        self.length, self.shape, self.rng = length, tuple(shape), np.random.RandomState(0)

    def look(self) -> Any:
        return self.rng.uniform(-9, 9, self.shape).astype(np.float32)

    def info(self) -> dict[str, Any]:
        return {"k": self.k, "x": np.float32(self.k / 3)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.rng = np.random.RandomState(seed)
        self.k = 0
        return self.look(), self.info()

    def step(self, action: Any) -> Any:
        self.k += 1
        reward = float(self.rng.standard_normal() + int(action))
        return self.look(), reward, self.k >= self.length, False, self.info()

    def double(self, n: Any, add: int = 0) -> Any:
        return 2 * n + add


class Scene(Numbers):
    """Observations of several parts, one of them an image; infos of many types."""

    def __init__(self, length: int = 17, shape: Any = (84, 84, 4)) -> None:
        super().__init__(length, shape)
        parts = {"image": S.Box(0, 255, tuple(shape), np.uint8), "n": S.Discrete(1000)}
        self.observation_space = S.Dict({**parts, "state": S.Box(-9, 9, (3,), np.float64)})

    def look(self) -> Any:
        image = self.rng.randint(0, 256, self.shape).astype(np.uint8)
        return {"image": image, "n": int(self.k), "state": self.rng.uniform(-9, 9, 3)}

    def info(self) -> dict[str, Any]:
        more = {"pos": np.arange(3) * self.k, "nested": {"y": 0.1 * self.k}, "pair": (self.k, "a")}
        return {**super().info(), **more, "word": f"step {self.k}"}


class OldScene(Scene):
    """The same with the interface of gym 0.21."""

    def seed(self, seed: int | None = None) -> None:
        self.rng = np.random.RandomState(seed)

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()[0]

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or truncated, info


class Words(Numbers):
    """Text, Tuple and what else a space can be; infos with all that has a type."""

    def __init__(self) -> None:
        super().__init__(5)
        several = S.Tuple((S.Discrete(3), S.Box(0, 1, (2,), np.float32), S.MultiBinary((2, 3))))
        words = S.Text(20, charset=string.printable + "\u00e9\u4e2d", min_length=0)
        parts = {"t": words, "m": S.MultiBinary(3), "d": S.MultiDiscrete([3, 4], start=[1, 0]), "two": several}
        self.observation_space = S.Dict(parts)
        self.action_space = S.Tuple((S.Discrete(3, start=1), S.Text(9), S.MultiDiscrete(np.array([[2, 3], [4, 5]]))))

    def look(self) -> Any:
        two = self.k % 3, np.array([0.5, 0.25], np.float32), np.eye(2, 3, dtype=np.int8)
        return {"t": f"\u00e9 {self.k} \u4e2d", "m": np.array([1, 0, 1], np.int8), "d": np.array([2, 1]), "two": two}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        observation, _ = super().reset(seed=seed)
        return observation, {"options": options}

    def step(self, action: Any) -> Any:
        assert isinstance(action, tuple)
        assert isinstance(action[1], str)
        observation, _, ended, _, _ = super().step(action[0])
        numbers = {"c": 1j * np.ones(2), "one": 2j, "big": 10**30, "nan": float("nan"), "none": None, "yes": True}
        arrays = {
            "texts": np.array(["a", "bcd"]),
            "bits": np.array([b"x"]),
            "empty": np.zeros((0, 3)),
            "0": np.array(3),
        }
        others: dict[Any, Any] = {
            3: "three",
            (1, 2): [1, (2.5, -0.0)],
            "bytes": b"\0x",
            "object": object(),
            "word": np.str_("w"),
        }
        return observation, np.float32(0.1), np.bool_(ended), False, {**numbers, **arrays, **others}


class Global(Numbers):
    """Draws from the global generators."""

    def look(self) -> Any:
        return np.array([np.random.rand(), random.random(), 0, 0], np.float32)


class Counted(Numbers):
    """Observation: the time step, and the sum of the actions before it. The reward of a step has both numbers."""

    def __init__(self) -> None:
        super().__init__(shape=(2,))
        self.observation_space, self.total = S.Box(-99, 99, (2,), np.float32), 0

    def look(self) -> Any:
        return np.array([self.k, self.total], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.total = 0
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        self.total += int(action)
        observation, _, *others = super().step(action)
        return (observation, 10.0 * self.k + int(action), *others)


class Leak(Numbers):
    """Keeps 1 MB of each episode."""

    kept: ClassVar[list[Any]] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.kept.append(np.ones(1 << 17))
        observation, info = super().reset(seed=seed)
        return observation, {**info, "pid": os.getpid()}


def _sockets() -> list[int]:
    files = [fd for fd in range(3, 30) if os.path.exists(f"/dev/fd/{fd}")]
    return [fd for fd in files if stat.S_ISSOCK(os.fstat(fd).st_mode)]


class Faulty(Numbers):
    """Fails in its third step, or where `how` says."""

    def __init__(self, how: str = "", length: int = 7) -> None:
        super().__init__(length)
        self.how = how
        if how == "start":
            raise RuntimeError("no licence")
        if how == "slow start":
            time.sleep(1000)

    def step(self, action: Any) -> Any:
        if self.k == 2 and hasattr(self, "do_" + self.how):
            result = getattr(self, "do_" + self.how)()
            if result is not None:
                return result
        return super().step(action)

    def render(self) -> Any:
        if self.how == "render":
            raise RuntimeError("no screen")
        return np.full((2, 2, 3), self.k, np.uint8)

    def close(self) -> None:
        if self.how == "close":
            time.sleep(1000)

    def do_raise(self) -> None:
        {"found": 1}["missing"]

    def do_exit(self) -> None:
        os._exit(3)

    def do_sysexit(self) -> None:
        sys.exit("the simulator gives up")

    def do_kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def do_segv(self) -> None:
        ctypes.string_at(0)

    def do_hang(self) -> None:
        while True:
            time.sleep(1)

    def do_stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def do_prints(self) -> None:
        for _ in range(200):
            print("x" * 100_000)

    def do_stdin(self) -> None:
        assert sys.stdin.read() == ""

    def do_junk(self) -> None:
        for fd in _sockets():
            os.write(fd, b"junk" * 9)

    def do_closes(self) -> None:
        for fd in _sockets():
            os.close(fd)

    def do_fork_exit(self) -> None:
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(4)

    def do_fork_back(self) -> None:
        os.fork()

    def do_spawn(self) -> None:
        subprocess.Popen(["sleep", "1000"], start_new_session=True)

    def do_five(self) -> Any:
        return np.zeros(5, np.float32), 0.0, False, False, {}

    def do_three(self) -> Any:
        return 1, 2, 3

    def do_four(self) -> Any:
        return np.zeros(4, np.float32), 0.0, False, {}


class NoSpace(Numbers):
    """Has a space that cannot be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = S.Dict({"list": S.Sequence(S.Discrete(3))})


class Dying(Numbers):
    """That of rank 0 kills itself in one step of twelve."""

    def __init__(self, rank: int) -> None:
        super().__init__(9)
        self.rank = rank

    def step(self, action: Any) -> Any:
        if self.rank == 0 and self.rng.randint(12) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def super_mario() -> Any:
    """A game of the year 1985, whose package needs a gym of 2021 and numpy 1: small grey pictures, seven actions."""
    movements = importlib.import_module("gym_super_mario_bros.actions").SIMPLE_MOVEMENT
    game = importlib.import_module("gym_super_mario_bros").make("SuperMarioBros-v0")

    class Small(gym.ObservationWrapper):  # type: ignore[misc]
        def __init__(self, env: Any) -> None:
            super().__init__(env)
            self.observation_space = S.Box(0, 255, (30, 32), np.uint8)

        def observation(self, observation: Any) -> Any:
            return observation[::8, ::8].mean(-1).astype(np.uint8)

    return Small(importlib.import_module("nes_py.wrappers").JoypadSpace(game, movements))


class _Simulator:
    """What an environment may have as `self.env`: it is no wrapper around it."""

    def reset(self) -> None:
        self.n = 0


class WithSimulator(gym.Env):  # type: ignore[misc]
    """Its simulator is no environment. It draws from a generator of its own, and leaves `np_random` to wrappers."""

    observation_space = S.Box(-1e9, 1e9, (2,), np.float64)
    action_space = S.Discrete(2)

    def __init__(self) -> None:
        self.env = _Simulator()

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.env.reset()
        if seed is not None:
            self.rng = np.random.RandomState(seed)
        return np.array([-1 if seed is None else seed, self.rng.standard_normal()]), {"seed": seed}

    def step(self, action: Any) -> Any:
        self.env.n += 1
        return np.array([self.env.n, self.rng.standard_normal()]), 1.0, self.env.n == 4, False, {}


class Objects(WithSimulator):
    """Observes what cannot be sent."""

    def step(self, action: Any) -> Any:
        return {"place": [np.zeros(2), _Simulator()]}, 1.0, False, False, {}


class Leaving(WithSimulator):
    """Starts a program without any variables, in the group of this process."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.program = subprocess.Popen(["sleep", "100"], env={"PATH": os.environ["PATH"]})
        return super().reset(seed=seed)[0], {"pid": self.program.pid}
