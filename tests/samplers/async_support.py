"""What the tests of asynchronous sampling share: an agent that learns, delays, and a serial loop."""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np

from penstock import Agent, AgentStep, AsyncSampler, NamedArrays, SerialSampler

from ..support import until

# Workers cannot import what lies here: it travels by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

T, B = 6, 6


class TabularAgent(Agent):
    """Noisy actions from a weight per input. Each column is computed alone, so no batch shape changes a bit."""

    def __init__(self) -> None:
        self.weights = np.array([0.02, -0.1])

    def seed_columns(self, rngs: Any) -> None:
        self._rngs = list(rngs)

    def reseed_columns(self, columns: Any, rngs: Any) -> None:
        for column, rng in zip(columns, rngs, strict=True):
            self._rngs[column] = rng

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        selected = range(len(self._rngs)) if self.selected is None else self.selected
        noise = np.array([self._rngs[b].random() for b in selected])
        score = np.array([sum(float(w * x) for w, x in zip(self.weights, row, strict=True)) for row in observation])
        return AgentStep((score + noise > 0.5).astype(np.int64), {"score": score})

    def read_parameters(self) -> Any:
        return {"weights": self.weights}

    def write_parameters(self, parameters: Any) -> None:
        self.weights = parameters["weights"].copy()

    def train(self, samples: Any) -> None:
        """A deterministic function of the batch."""
        env = samples.env
        step = np.tanh(np.asarray(env.observation, np.float64).mean((0, 1)) + float(np.asarray(env.reward).mean()))
        self.weights = self.weights + 0.01 * step


class Delayed(gym.Wrapper[Any, Any, Any, Any]):
    """Sleeps now and then, at times that no seed determines."""

    def __init__(self, env: gym.Env[Any, Any], seconds: float) -> None:
        super().__init__(env)
        self._random, self._seconds = random.SystemRandom(), seconds

    def step(self, action: Any) -> Any:
        if self._random.random() < 0.03:
            time.sleep(self._random.random() * self._seconds)
        return super().step(action)

    def reset(self, **kwargs: Any) -> Any:
        if self._random.random() < 0.1:
            time.sleep(self._random.random() * self._seconds)
        return super().reset(**kwargs)


def batch_of(samples: Any) -> dict[str, bytes]:
    return {name: np.asarray(leaf).tobytes() for name, leaf in samples.leaves()}


Found = list[tuple[dict[str, bytes], list[dict[str, Any]]]]


def sample(
    sampler: AsyncSampler, agent: Any, n: int, between: Callable[[int], object] = lambda itr: None, **kwargs: Any
) -> Found:
    """`n` batches of an asynchronous sampler, with training on each."""
    sampler.initialize(agent, seed=7, **kwargs)
    sampler.start()
    found: Found = []
    for itr in range(n):
        samples, infos = sampler.obtain_samples(itr)
        found.append((batch_of(samples), list(map(vars, infos))))
        between(itr)
        agent.train(samples)
        agent.sync_shared_memory()
    return found


def one_batch_late(env_fn: Any, agent: Any, n: int, **kwargs: Any) -> Found:
    """The same with a serial loop: batch k + 1 is collected before it trains on batch k."""
    found: Found = []
    with SerialSampler(env_fn, batch_T=T, batch_B=B, **kwargs) as sampler:
        sampler.initialize(agent, seed=7, bootstrap_value=False)
        before: NamedArrays | None = None
        for itr in range(n):
            samples, infos = sampler.obtain_samples(itr)
            found.append((batch_of(samples), list(map(vars, infos))))
            if before is not None:
                agent.train(before)
                agent.sync_shared_memory()
            before = samples.copy()
    return found


def check_streams(batches: list[Any]) -> None:
    """Row 0 of each batch continues the batch before. The environment is a `CountingEnv`."""
    for before, after in itertools.pairwise(batches):
        done = np.asarray(before.env.done)[-1]
        episode, count = np.asarray(before.env.observation)[-1].T
        next_episode, next_count = np.asarray(after.env.observation)[0].T
        assert (next_episode == episode + done).all()
        assert (next_count == np.where(done, 0, count + 1)).all()
        for name in ("action", "reward", "done"):
            part = "agent" if name == "action" else "env"
            now, then = getattr(after[part], f"prev_{name}"), getattr(before[part], name)
            assert (np.asarray(now)[0] == np.asarray(then)[-1]).all(), name


def until_idle(sampler: Any) -> None:
    """All workers have collected what they may."""
    until(lambda: not sampler.run.memory.control.pending(sampler.n_workers))
