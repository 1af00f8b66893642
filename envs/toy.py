"""Toy environments with known results, for tests, benchmarks and first trials of a sampler."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces


class CountingEnv(gym.Env[Any, Any]):
    """Counts its steps: the observation is (episode, step in the episode), the reward `reward_scale * step`.

    An episode ends after `length` steps, by termination or, with `truncate=True`, by truncation. Nothing is
    random: every recorded cell can be predicted. It can write its observations in place (`step_into`).
    """

    def __init__(
        self, length: int = 5, truncate: bool = False, reward_scale: float = 1.0, dtype: Any = np.float32
    ) -> None:
        self.observation_space = spaces.Box(0, 2**20, (2,), dtype)
        self.action_space = spaces.Discrete(3)
        self.length, self.truncate, self.reward_scale = length, truncate, reward_scale
        self.episode, self.count = -1, 0

    def observe(self) -> Any:
        """The observation now, `[2]`. A subclass that changes it sets `step_into = None`."""
        return np.array([self.episode, self.count], self.observation_space.dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode += 1
        self.count = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        result = self._advance()
        return self.observe(), *result

    def step_into(self, out: Any, action: Any) -> tuple[float, bool, bool, dict[str, Any]]:
        """As `step`, but write the observation into `out` `[2]`. Returns reward, terminated, truncated, info."""
        result = self._advance()
        out[0], out[1] = self.episode, self.count
        return result

    def _advance(self) -> tuple[float, bool, bool, dict[str, Any]]:
        self.count += 1
        over = self.count >= self.length
        reward = self.reward_scale * self.count
        return reward, over and not self.truncate, over and self.truncate, {"count": self.count}


class NestedEnv(gym.Env[Any, Any]):
    """A Dict observation with a Tuple inside, and a Dict action. Observations contain the last action."""

    def __init__(self, length: int = 7) -> None:
        self.observation_space = spaces.Dict(
            {
                "position": spaces.Box(-1, 1, (3,), np.float64),
                "camera": spaces.Box(0, 255, (4, 4, 1), np.uint8),
                "goal": spaces.Tuple((spaces.Discrete(4, start=1), spaces.MultiBinary(3))),
            }
        )
        self.action_space = spaces.Dict(
            {"move": spaces.Box(-1, 1, (3,), np.float32), "mode": spaces.MultiDiscrete([2, 3])}
        )
        self.length = length
        self.count = 0

    def observe(self, move: npt.NDArray[Any], mode: Sequence[int]) -> Any:
        """The observation after the action with these parts: `move` `[3]` and `mode` `[2]`."""
        return {
            "position": np.asarray(move, np.float64),
            "camera": np.full((4, 4, 1), self.count % 256, np.uint8),
            "goal": (1 + self.count % 4, np.array([mode[0], mode[1] % 2, 1], np.int8)),
        }

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self.observe(self.np_random.uniform(-1, 1, 3), (0, 0)), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        observation = self.observe(action["move"], action["mode"])
        return observation, float(np.sum(action["move"])), self.count >= self.length, False, {}


class SlowEnv(CountingEnv):
    """A `CountingEnv` that sleeps for `seconds` in every step, like an environment that waits for a game."""

    def __init__(self, seconds: float = 0.001, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seconds = seconds

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self.seconds)
        return super().step(action)


class ScriptedGame:
    """A PettingZoo `ParallelEnv` of `k` agents "a0", "a1", ... with known results, which needs no PettingZoo.

    Agents die, are cut off, join, come back and get late rewards, as `script` says: one dict for each step, with the
    event of each agent: "die", "cut", "join", or "late" (a reward of 0.5 for an agent that is not there). All agents
    of `start` are there at first. The game is over after the last dict, or when nobody is left. Without a script, each
    episode draws its own from its seed.

    An observation is (agent's number + 1, step, agent's own steps, random number), the reward `step + action`. `ledger`
    is the sum of all rewards that the environment has returned. With `mask`, infos have an `action_mask`.
    """

    metadata: dict[str, Any] = {"name": "scripted_game"}  # noqa: RUF012
    render_mode = None

    def __init__(
        self,
        k: int = 3,
        script: Sequence[dict[str, str]] | None = None,
        start: Sequence[str] | None = None,
        mask: bool = False,
    ) -> None:
        self.possible_agents = [f"a{i}" for i in range(k)]
        self.agents: list[str] = []
        self.script, self.start, self.mask = script, start, mask
        self.state_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.np_random = np.random.default_rng(0)
        self.ledger = 0.0

    def observation_space(self, agent: str) -> gym.Space[Any]:
        """Four numbers."""
        return spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def action_space(self, agent: str) -> gym.Space[Any]:
        """Three actions, which only the reward shows."""
        return spaces.Discrete(3)

    def state(self) -> npt.NDArray[Any]:
        """The step, and how many agents are there."""
        return np.array([self.t, len(self.agents)], np.float32)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Begin a game; with a seed, the draws of all later games begin again."""
        if seed is not None:
            self.np_random = np.random.default_rng(seed)
        self.t, self._events, start = 0, self.script, self.start
        if self._events is None:
            rng, everyone = self.np_random, self.possible_agents
            drawn = [agent for agent in everyone if rng.random() < 0.7] or everyone[:1]
            kinds, p = ["die", "join", "late", "cut", ""], [0.08, 0.1, 0.03, 0.04, 0.75]
            rows = rng.choice(kinds, (int(rng.integers(3, 25)), len(everyone)), p=p).tolist()
            self._events = [dict(zip(everyone, row, strict=True)) for row in rows]
            start = drawn if start is None else start
        self.agents = [agent for agent in self.possible_agents if start is None or agent in start]
        self._own = dict.fromkeys(self.agents, 0)
        return self.observe(), self._infos()

    def observe(self) -> dict[str, Any]:
        """The observations now, each `[4]`, of the agents that act and of those whose last step this was."""
        return {
            agent: np.array([int(agent[1:]) + 1, self.t, count, self.np_random.random()], np.float32)
            for agent, count in self._own.items()
        }

    def _infos(self) -> dict[str, Any]:
        return {agent: {"action_mask": np.ones(3, np.int8)} if self.mask else {} for agent in self._own}

    def step(self, actions: dict[str, Any]) -> tuple[Any, Any, Any, Any, Any]:
        """One step of all agents. Raises `ValueError` unless there is one action for each agent that is there."""
        if set(actions) != set(self.agents):
            raise ValueError(f"actions for {sorted(actions)}, but {sorted(self.agents)} act")
        assert self._events is not None
        event_of, acted = self._events[self.t].get, self.agents
        self.t += 1
        is_over = self.t == len(self._events)
        absent = [agent for agent in self.possible_agents if agent not in acted]
        rewards = {agent: float(self.t + actions[agent]) for agent in acted}
        rewards |= {agent: 0.5 for agent in absent if event_of(agent) == "late"}
        terminated = {agent: event_of(agent) == "die" for agent in acted}
        truncated = {agent: not terminated[agent] and (is_over or event_of(agent) == "cut") for agent in acted}
        self._own = {agent: self._own[agent] + 1 for agent in acted}
        self._own |= {agent: 0 for agent in absent if event_of(agent) == "join" and not is_over}
        observations, infos = self.observe(), self._infos()
        stay = {agent for agent in self._own if not (terminated.get(agent) or truncated.get(agent))}
        self.agents = [agent for agent in self.possible_agents if agent in stay]
        self._own = {agent: self._own[agent] for agent in self.agents}
        self.ledger += sum(rewards.values())
        return observations, rewards, terminated, truncated, infos

    def render(self) -> None:
        """Nothing is shown."""

    def close(self) -> None:
        """There is nothing to close."""
