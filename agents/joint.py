"""Joint policies: an agent that acts for all its seats of an environment together, as the samplers use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.agents.agent import Agent, AgentRuntime, AgentStep, as_agent_step
from penstock.agents.delegation import DelegatingAgent, DelegatingRuntime
from penstock.buffers.named import as_named, map_leaves
from penstock.errors import SpaceError


class JointRuntime(DelegatingRuntime):
    """The samplers' side of a `JointSeats`: that of its agent, for whole environments."""

    agent: JointSeats

    def column_copy(self, rngs: Sequence[np.random.Generator]) -> JointSeats:
        copied = super().column_copy(rngs[:: self.agent.k])
        assert isinstance(copied, JointSeats)
        copied._joined = set()
        return copied

    def set_columns(self, env_ranks: Sequence[int], n_envs: int) -> None:
        AgentRuntime.set_columns(self, env_ranks, n_envs)  # the base would give the inner agent a rank for each seat
        self.agent.agent.runtime.set_columns([int(rank) for rank in env_ranks[:: self.agent.k]], n_envs)

    def inference_difference(self, make_inputs: Callable[[], Sequence[Any]]) -> float | None:
        return None  # not measured: the inputs are rows of single seats, and the agent needs whole environments


class JointSeats(DelegatingAgent):
    """Columns of seats for a `joint` agent, which gets and returns arrays `[environments, k, ...]`.

    An environment's streams are those of its first seat. Its state is reset when all its seats join at once: when its
    game begins.
    """

    runtime_cls = JointRuntime

    def __init__(self, agent: Agent, k: int) -> None:
        super().__init__(agent)
        self.k, self.joint = k, False
        self.observation_space, self.action_space = agent.observation_space, agent.action_space
        self._joined: set[int] = set()

    def _divided(self, rows: Any) -> Any:
        return map_leaves(lambda leaf: leaf.reshape(len(leaf) // self.k, self.k, *leaf.shape[1:]), rows)

    def _joint(self, rows: Any, name: str) -> Any:
        def joined(leaf: Any) -> Any:
            array = np.asarray(leaf)
            if array.ndim < 2 or array.shape[1] != self.k:
                raise SpaceError(
                    f"{type(self.agent).__name__} is joint, so its {name} must have shape [environments, {self.k}, "
                    f"...], got {list(array.shape)}"
                )
            return array.reshape(-1, *array.shape[2:])

        return map_leaves(joined, as_named(rows))

    def step(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> AgentStep:
        for env in {column // self.k for column in self._joined}:
            if all(env * self.k + i in self._joined for i in range(self.k)):
                self.agent.reset_one(env)
        self._joined.clear()
        step = as_agent_step(self.agent.step(*map(self._divided, (observation, prev_action, prev_reward))), self.agent)
        return AgentStep(self._joint(step.action, "actions"), self._joint(step.agent_info, "agent_info"))

    def value(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> Any:
        return self._joint(self.agent.value(*map(self._divided, (observation, prev_action, prev_reward))), "values")

    def seed_columns(self, rngs: Sequence[np.random.Generator]) -> None:
        self.agent.seed_columns(rngs[:: self.k])

    def reseed_columns(self, columns: npt.NDArray[np.intp], rngs: Sequence[np.random.Generator]) -> None:
        self.agent.reseed_columns(columns[:: self.k] // self.k, rngs[:: self.k])

    def select(self, columns: npt.NDArray[np.intp] | None) -> None:
        self.agent.select(None if columns is None else columns[:: self.k] // self.k)

    def reset(self) -> None:
        self._joined.clear()
        self.agent.reset()

    def reset_one(self, column: int) -> None:
        self._joined.add(column)

    def column_state(self, column: int) -> dict[str, Any]:
        return {"agent": self.agent.column_state(column // self.k), "joined": column in self._joined}

    def load_column_state(self, column: int, state: Mapping[str, Any]) -> None:
        self.agent.load_column_state(column // self.k, state["agent"])
        if state["joined"]:
            self._joined.add(column)
        else:
            self._joined.discard(column)
