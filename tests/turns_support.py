"""What the tests of games in turns share: a random game, and a plain loop that says what a batch must be."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium import spaces

from penstock import Agent, AgentStep, NamedArrays
from tests.seats_support import Book

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here


class TurnGame:
    """A random game, as an `AECEnv`. Agents move in any order, also twice in a row. After each move, some agents get a
    reward, also those that have not moved yet; sometimes one dies or is cut off.

    An observation is (agent's number + 1, move, the agent's own moves, random number).
    """

    metadata: dict[str, Any] = {"name": "turn_game"}  # noqa: RUF012
    render_mode = None

    def __init__(self, k: int = 3, mask: bool = False, ends: bool = True) -> None:
        self.possible_agents = [f"a{i}" for i in range(k)]
        self.agents: list[str] = []
        self._mask, self._has_ends, self._rng, self.ledger = mask, ends, np.random.default_rng(0), 0.0

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def action_space(self, agent: str) -> gym.Space[Any]:
        return spaces.Discrete(3)

    def agent_iter(self) -> Iterator[str]:
        while self.agents:
            yield self.agent_selection

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self.t, self._most = 0, int(self._rng.integers(1, 25))
        self._own = dict.fromkeys(self.agents, 0)
        self._rewards = dict.fromkeys(self.agents, 0.0)
        self._terminated, self._truncated = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self._choose()

    def _choose(self) -> None:
        ended = [agent for agent in self.agents if self._terminated[agent] or self._truncated[agent]]
        if self.agents:
            self.agent_selection = ended[0] if ended else self.agents[self._rng.integers(len(self.agents))]
        self._draw = np.float32(self._rng.random())

    def last(self, observe: bool = True) -> Any:
        agent = self.agent_selection
        info = {"action_mask": np.array([1, 1, self.t % 2], np.int8)} if self._mask else {}
        seen = np.array([int(agent[1:]) + 1, self.t, self._own[agent], self._draw], np.float32)
        return seen, self._rewards[agent], self._terminated[agent], self._truncated[agent], info

    def step(self, action: Any) -> None:
        agent, rng = self.agent_selection, self._rng
        if self._terminated[agent] or self._truncated[agent]:
            assert action is None
            self.agents.remove(agent)
            self._choose()
            return
        assert action in (0, 1, 2)
        assert not self._mask or action < 2 or self.t % 2
        self.t, self._own[agent], self._rewards[agent] = self.t + 1, self._own[agent] + 1, 0.0
        for other in self.agents:
            if rng.random() < 0.4:
                reward = float(rng.integers(-3, 4)) + action
                self._rewards[other] += reward
                self.ledger += reward
        is_over = self.t >= self._most
        for other in self.agents:
            if is_over or (self._has_ends and rng.random() < 0.06):
                (self._terminated if rng.random() < 0.6 else self._truncated)[other] = True
        self._choose()

    def close(self) -> None:
        """There is nothing to close."""


class Scripted(Agent):
    """Plays given actions, one list for each column."""

    def __init__(self, actions: Sequence[Sequence[int]]) -> None:
        self._actions = actions

    def reset(self) -> None:
        self._at = [0] * len(self._actions)

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        columns = range(len(prev_reward)) if self.selected is None else self.selected.tolist()
        found = []
        for column in columns:
            found.append(self._actions[column][self._at[column] % len(self._actions[column])])
            self._at[column] += 1
        return AgentStep(np.array(found))


class Valuing(Book):
    """A `Book` that reports its value, as a recurrent agent must."""

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        value = self.value(observation, prev_action, prev_reward)
        action, info = super().step(observation, prev_action, prev_reward)
        return AgentStep(action, NamedArrays(**dict(info.items()), value=value))
