"""Central inference, the worker's side: an agent that asks the inference server for every action."""

from __future__ import annotations

import enum
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from penstock.agents.base import Agent, AgentStep
from penstock.agents.runtime import AgentRuntime
from penstock.agents.shared_parameters import SharedParameters
from penstock.buffers.named import NamedArrays

__all__ = ["Port", "Question", "RemoteAgent"]


class Question(enum.IntEnum):
    """What a worker asks of the inference server."""

    STEP = 1
    VALUE = 2


class Port(Protocol):
    """A worker's connection to the inference server."""

    row: NamedArrays  #: its columns of the step buffer

    def ask(self, question: Question) -> None:
        """Ask about what `row` holds; return when `row` holds the answer."""


class _RemoteRuntime(AgentRuntime):
    def attach(self, parameters: SharedParameters) -> None:
        """Nothing: the inference server has the parameters."""


class RemoteAgent(Agent):
    """Stands for an agent that acts elsewhere, so collectors need not know where that is.

    `step` and `value` copy their inputs into the step buffer and wait. What it returns are views of the step
    buffer: collectors record them before the next step.
    """

    runtime_cls = _RemoteRuntime
    _port: Port

    def __init__(self, agent: Agent) -> None:
        """Stand for `agent`, of which nothing is kept but what collectors ask about."""
        self.recurrent = agent.recurrent
        self.initialize(agent.observation_space, agent.action_space)

    def initialize(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any], *, seed: int | None = None
    ) -> None:
        super().initialize(observation_space, action_space, seed=seed)

    def connect(self, port: Port) -> None:
        """Ask through `port` from now on. Every column begins anew."""
        self._port = port
        # Fields looked up once: by name they cost as much as writing into them.
        row = port.row
        self._inputs = row.observation, row.prev_action, row.prev_reward
        self._reset, self._answer = row.reset, AgentStep(row.action, row.agent_info)
        self.reset()

    def reset(self) -> None:
        if hasattr(self, "_port"):
            self._reset[...] = True

    def reset_one(self, column: int) -> None:
        self._reset[column] = True

    def step(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> AgentStep:
        into = self._inputs
        into[0][...], into[1][...], into[2][...] = observation, prev_action, prev_reward
        self._port.ask(Question.STEP)
        return self._answer

    def value(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> Any:
        into = self._inputs
        n, at_once = len(prev_reward), len(self._reset)
        values = np.empty(n, np.float32)
        for first in range(0, n, at_once):  # any number of rows may be asked about, as many as there are columns fit
            part = slice(first, min(first + at_once, n))
            filled = slice(0, part.stop - first)
            into[0][filled], into[1][filled], into[2][filled] = observation[part], prev_action[part], prev_reward[part]
            self._port.ask(Question.VALUE)
            values[part] = self._port.row.value[filled]
        return values
