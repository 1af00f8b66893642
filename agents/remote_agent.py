"""Central inference, the worker's side: an agent whose actions the inference server computes."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.agents.agent import Agent, AgentStep
from penstock.buffers.named import NamedArrays
from penstock.workers.control import URGENT


class Request(enum.IntEnum):
    """What a worker requests from the inference server."""

    STEP = 1
    VALUE = URGENT  # because a worker needs it in the middle of a step


class RemoteAgent(Agent):
    """Takes the agent's place in a worker when the agent itself runs in the inference server.

    `step` and `value` copy their inputs into the step buffer and wait for the reply. The results of `step` are views of
    the step buffer. The next step overwrites them. Where agents take turns, `step` is for the selected columns only.
    """

    _request: Callable[[int], None]

    def __init__(self, agent: Agent) -> None:
        """Keep what collectors use of `agent`."""
        self.recurrent, self.mask_key, self.joint = agent.recurrent, agent.mask_key, agent.joint
        self.initialize(agent.observation_space, agent.action_space)

    def connect(self, row: NamedArrays, request: Callable[[int], None]) -> None:
        """Use `row`, this worker's columns of the step buffer. Every column starts an episode.

        `request(kind)` sends a request and waits for the reply.
        """
        self._row, self._request = row, request
        # Looked up once, because a look-up by name takes as long as writing the field.
        self._inputs = row.observation, row.prev_action, row.prev_reward
        self._reset, self._asked, self._reply = row.reset, row.asked, AgentStep(row.action, row.agent_info)
        self.reset()

    def reset(self) -> None:
        if hasattr(self, "_request"):
            self._reset[...] = True

    def reset_one(self, column: int) -> None:
        self._reset[column] = True

    def column_state(self, column: int) -> dict[str, Any]:
        return {"reset": bool(self._reset[column])}

    def load_column_state(self, column: int, state: Mapping[str, Any]) -> None:
        self._reset[column] = state["reset"]

    def step(self, observation: object, prev_action: object, prev_reward: npt.NDArray[np.float32]) -> AgentStep:
        if self.selected is not None:
            return self._step_of(self.selected, (observation, prev_action, prev_reward))
        inputs = self._inputs
        inputs[0][...], inputs[1][...], inputs[2][...] = observation, prev_action, prev_reward
        self._request(Request.STEP)
        return self._reply

    def _step_of(self, columns: npt.NDArray[np.intp], inputs: Sequence[Any]) -> AgentStep:
        self._asked[...] = False
        self._asked[columns] = True
        for target, values in zip(self._inputs, inputs, strict=True):
            target[columns] = values
        self._request(Request.STEP)
        action, agent_info = self._reply
        return AgentStep(action[columns], agent_info[columns])

    def value(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> Any:
        inputs = self._inputs
        n, at_once = len(prev_reward), len(self._reset)
        values = np.empty(n, np.float32)
        for first in range(0, n, at_once):  # there may be more rows than columns: send them in parts
            part = slice(first, min(first + at_once, n))
            filled = slice(0, part.stop - first)
            inputs[0][filled], inputs[1][filled] = observation[part], prev_action[part]
            inputs[2][filled] = prev_reward[part]
            self._request(Request.VALUE)
            values[part] = self._row.value[filled]
        return values
