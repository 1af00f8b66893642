"""Environments of the benchmarks. Imports no torch and no penstock: workers import this file."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class SleepingEnv(gym.Env[Any, Any]):
    """A step sleeps for `seconds`, and with probability `rare` for `long`."""

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, seconds: float, long: float = 0.0, rare: float = 0.0) -> None:
        self._times, self._rare = (seconds, long), rare
        self._observation = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._observation, {}

    def step(self, action: Any) -> Any:
        is_long = self._rare > 0 and self.np_random.random() < self._rare
        seconds = self._times[is_long]
        if seconds:
            time.sleep(seconds)
        return self._observation, 0.0, False, False, {}


class PixelEnv(gym.Env[Any, Any]):
    """Draws a frame of noise in four equal channels, which takes about as long as a frame of a simple game. Episodes
    have 500 steps.

    Bytes from `np_random.integers` took 21 to 26 µs, depending on where the allocator had put the last frames. This
    takes equally long everywhere.
    """

    observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = spaces.Discrete(6)

    def _frame(self) -> Any:
        frame = np.empty((84, 84, 4), np.uint8)
        frame[...] = (self.np_random.random((84, 84), np.float32) * 256)[..., np.newaxis]
        return frame

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._age = 0
        return self._frame(), {}

    def step(self, action: Any) -> Any:
        self._age += 1
        return self._frame(), 1.0, False, self._age >= 500, {}


def pong(frames: int = 108_000) -> gym.Env[Any, Any]:
    """Pong as most scripts build it, with episodes of at most `frames` frames. Needs ale-py."""
    import ale_py

    gym.register_envs(ale_py)
    env = gym.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0, max_num_frames_per_episode=frames)
    env = gym.wrappers.TransformReward(gym.wrappers.AtariPreprocessing(env), np.sign)
    return gym.wrappers.FrameStackObservation(env, 4)
