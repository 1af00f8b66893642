"""What the benchmarks sample: environments, observation spaces and a policy. Imports no penstock, so that `compare.py`
can use it with any version."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

ENV = partial(gym.make, "CartPole-v1")


class ActorCritic(nn.Module):
    """The 64-64 MLP of the field's CartPole examples, or a larger one."""

    def __init__(self, observation_space: gym.Space[Any], action_space: spaces.Discrete, hidden: int = 64) -> None:
        super().__init__()
        (n_inputs,) = observation_space.shape or (1,)
        self.body = nn.Sequential(nn.Linear(n_inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.policy = nn.Linear(hidden, int(action_space.n))
        self.value = nn.Linear(hidden, 1)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.body(observation)
        return self.policy(features), self.value(features).squeeze(-1)


class Acting:
    """An agent of CartPole-v1 alone: it acts on the same row of observations, again and again."""

    def __init__(self, agent: Any, batch_B: int) -> None:
        env, rng = ENV(), np.random.default_rng(0)
        agent.initialize(env.observation_space, env.action_space, seed=0)
        rngs = [np.random.default_rng(b) for b in range(batch_B)]
        self._agent = agent.runtime.worker_copy().runtime.column_copy(rngs)
        self._agent.sample_mode(0)
        observation = rng.normal(size=(batch_B, 4)).astype(np.float32)
        self._row = observation, np.zeros(batch_B, np.int64), np.zeros(batch_B, np.float32)

    def batch(self) -> int:
        """Act 128 times; returns the number of rows."""
        for _ in range(128):
            self._agent.step(*self._row)
        return 128

    def close(self) -> None:
        """It has no resources."""


# ---- observation spaces of the same number of bytes ----------------------------------------------

_SHAPES = {"camera": (8, 8), "position": (3,), "velocity": (3,), "goal": (2,)}


def _box(shape: tuple[int, ...]) -> spaces.Box:
    return spaces.Box(-1, 1, shape, np.float32)


def flat_space() -> spaces.Box:
    """One leaf."""
    return _box((sum(int(np.prod(shape)) for shape in _SHAPES.values()),))


def nested_space() -> spaces.Dict:
    """Four leaves on two levels."""
    leaf = {name: _box(shape) for name, shape in _SHAPES.items()}
    body = spaces.Dict({"position": leaf["position"], "velocity": leaf["velocity"]})
    return spaces.Dict({"camera": leaf["camera"], "body": body, "goal": leaf["goal"]})


def deep_space() -> spaces.Dict:
    """Sixteen leaves on three levels."""
    total = int(np.prod(flat_space().shape))
    sizes = iter([total // 16 + (i < total % 16) for i in range(16)])

    def level(depth: int) -> Any:
        if depth == 0:
            return _box((next(sizes),))
        fan = 4 if depth == 1 else 2
        return spaces.Dict({f"part_{i}": level(depth - 1) for i in range(fan)})

    return spaces.Dict(level(3).spaces)


class Returning(gym.Wrapper[Any, Any, Any, Any]):
    """A CartPole that returns elements of another space as its observations. They are sampled once, at the start."""

    def __init__(self, make_space: Callable[[], spaces.Space[Any]]) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.observation_space = make_space()
        self.observation_space.seed(0)
        self._next = cycle([self.observation_space.sample() for _ in range(8)]).__next__

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        return self._next(), self.env.reset(**kwargs)[1]

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        _, reward, terminated, truncated, info = self.env.step(action)
        return self._next(), reward, terminated, truncated, info


class Telling(gym.Wrapper[Any, Any, Any, Any]):
    """Puts a number and an array into each info."""

    def __init__(self, env_id: str = "CartPole-v1") -> None:
        super().__init__(gym.make(env_id))
        self._forces = np.zeros(3, np.float32)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return observation, reward, terminated, truncated, {"cost": 0.5, "forces": self._forces}


class Pixels(gym.Env[Any, Any]):
    """A stack of four frames of 84x84 pixels. A step changes one row of one frame, and copies the stack.

    It can write the stack where the samples record it (`step_into`), which a penstock without that protocol ignores.
    """

    def __init__(self, length: int = 100) -> None:
        self.observation_space, self.action_space = spaces.Box(0, 255, (84, 84, 4), np.uint8), spaces.Discrete(2)
        self._length, self._count = length, 0
        self._stack = np.zeros((84, 84, 4), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._count = 0
        return self._stack.copy(), {}

    def _advance(self) -> tuple[float, bool, bool, dict[str, Any]]:
        self._count += 1
        self._stack[self._count % 84, :, self._count % 4] = self._count % 256
        return 1.0, self._count == self._length, False, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        result = self._advance()
        return self._stack.copy(), *result

    def step_into(self, out: Any, action: Any) -> tuple[float, bool, bool, dict[str, Any]]:
        result = self._advance()
        out[...] = self._stack
        return result


class HeldPixels(Pixels):
    """Returns its own array in each step, without a copy."""

    step_into = None  # type: ignore[assignment]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._stack, *self._advance()
