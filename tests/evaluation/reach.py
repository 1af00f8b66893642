"""What the tests of evaluations share: an environment with instructions, policies for it, and a serial loop."""

from __future__ import annotations

import os
import string
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium import spaces

from penstock.envs import ColumnStreams, Purpose

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here

WORDS = ["red", "green", "blue", "white", "black", "pink", "grey", "gold", "cyan", "lime", "navy", "teal"]
ANGLES = {f"reach the {word} block": 2 * np.pi * i / len(WORDS) for i, word in enumerate(WORDS)}
TASKS = {"kitchen": {"radius": 0.9}, "desk": {"radius": 1.0}, "shelf": {"radius": 1.1}, "floor": {"radius": 1.2}}
CHUNK, LIMIT = 7, 40


class Reach(gym.Env[Any, Any]):
    """A hand must reach the block that the instruction of the episode names. In a quarter of the episodes it slips.

    `fault(number, t)` is called at each step; the number is that of the episode, as its seed gives it.
    """

    def __init__(self, radius: float = 1.0, fault: Callable[[int, int], object] | None = None) -> None:
        self.observation_space = spaces.Dict(
            image=spaces.Box(0, 255, (4, 4, 3), np.uint8),
            hand=spaces.Box(-9, 9, (3,), np.float32),
            instruction=spaces.Text(40, charset=string.ascii_lowercase + " "),
        )
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        self.radius, self.fault = radius, fault

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        rng, self.options = self.np_random, options or {}
        self.instruction = f"reach the {WORDS[rng.integers(len(WORDS))]} block"
        angle = ANGLES[self.instruction]
        self.target = self.radius * np.array([np.cos(angle), np.sin(angle)])
        self.hand, self.t = rng.uniform(-0.1, 0.1, 2), 0
        self.speed = self.options.get("speed", 0.1 if rng.random() < 0.74 else 0.01)
        self.image = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        self.number = int(rng.integers(10**6))
        return self._observation(), {"slips": self.speed < 0.1}

    def step(self, action: Any) -> Any:
        if self.fault is not None:
            self.fault(self.number, self.t)
        self.t += 1
        self.hand = self.hand + self.speed * np.asarray(action, np.float64) + 0.003 * self.np_random.standard_normal(2)
        gap = float(np.linalg.norm(self.hand - self.target))
        return self._observation(), -gap, gap < 0.1, self.t == LIMIT, {"is_success": gap < 0.1, "gap": gap}

    def _observation(self) -> Any:
        hand = np.array([*self.hand, self.radius], np.float32)
        return {"image": self.image, "hand": hand, "instruction": self.instruction}


def direction(hand: Any, instruction: str, noise: Any) -> Any:
    """The action of one environment."""
    angle = ANGLES[instruction]
    gap = hand[2] * np.array([np.cos(angle), np.sin(angle)]) - hand[:2]
    return (np.clip(gap / 0.1 / CHUNK, -1, 1) + 0.05 * noise).clip(-1, 1).astype(np.float32)


def vla(observation: Any, rngs: Any) -> Any:
    """Chunks `[n, CHUNK, 2]` for n environments, each with its own instruction and noise."""
    assert isinstance(observation["instruction"], list)
    chunks = []
    for hand, text, rng in zip(observation["hand"], observation["instruction"], rngs, strict=True):
        chunks.append([direction(hand, text, noise) for noise in rng.standard_normal((CHUNK, 2))])
    return np.array(chunks)


def weaker(observation: Any, rngs: Any) -> Any:
    """Does nothing in 60 % of its chunks."""
    return np.where([[[rng.random() < 0.6]] for rng in rngs], 0, vla(observation, rngs))


class Moody(Exception):
    """Of a policy."""


def moody(observation: Any, rngs: Any) -> Any:
    raise Moody("I will not")


class Played(NamedTuple):
    """One episode, as a plain loop plays it."""

    task: str
    episode: int
    length: int
    total: float
    is_success: bool
    actions: bytes


def serial(
    episodes: Sequence[int],
    tasks: Mapping[str, Mapping[str, Any]] = TASKS,
    policy: Callable[..., Any] = vla,
    seed: int = 0,
    options: Callable[[str, int], Any] = lambda task, k: None,
) -> list[Played]:
    """The oracle: one environment, one loop, nothing of penstock but the seeds."""
    found = []
    for name, kwargs in tasks.items():
        env = Reach(**kwargs)
        for k in episodes:
            own = ColumnStreams(seed, (zlib.crc32(name.encode()),))
            (env_seed,), (rng,) = own.env_seeds(Purpose.EVAL, k), own.rngs(Purpose.EVAL_ACTION, k)
            observation, info = env.reset(seed=env_seed, options=options(name, k))
            queue, trace, total, is_over = deque[Any](), [], 0.0, False
            while not is_over:
                if not queue:
                    queue.extend(policy(as_batch(observation), [rng])[0])
                trace.append(queue.popleft())
                observation, reward, terminated, truncated, info = env.step(trace[-1])
                total, is_over = total + reward, terminated or truncated
            found.append(Played(name, k, len(trace), total, bool(info["is_success"]), np.array(trace).tobytes()))
    return found


def as_batch(observation: Any) -> Any:
    return {key: [value] if key == "instruction" else np.asarray(value)[None] for key, value in observation.items()}


def played(results: Any, policy: str = "policy") -> list[Played]:
    """The results in the same form. An episode that failed has no length."""
    return [
        Played(r.task, r.episode, r.length, r.metrics["return"], bool(r.metrics["success"]), r.played()[0][0].tobytes())
        for r in results.episodes
        if r.policy == policy and not r.failed
    ]


class Guilty:
    """`act()` at step 5 of the episodes whose number is 3 in twenty; with a folder only the first time."""

    def __init__(self, act: Callable[[], object], folder: Path | None) -> None:
        self.act, self.folder = act, folder

    def __call__(self, number: int, t: int) -> None:
        if number % 20 != 3 or t != 5:
            return
        if self.folder is not None:
            try:
                os.close(os.open(self.folder / str(number), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
        self.act()


def hang() -> None:
    time.sleep(1e6)
