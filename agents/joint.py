"""Joint policies: an agent that acts for all its seats of an environment together, as the samplers use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.agents.agent import Agent, AgentRuntime, AgentStep
from penstock.agents.shared_parameters import SharedParameters
from penstock.buffers.named import as_named, map_leaves
from penstock.errors import SpaceError


class JointRuntime(AgentRuntime):
    """The samplers' side of a `JointSeats`: that of its agent, for whole environments."""

    agent: JointSeats

    def attach(self, parameters: SharedParameters) -> None:
        self.agent.inner.runtime.attach(parameters)

    def pull_shared_memory(self, version: int = 0) -> int:
        return self.agent.inner.runtime.pull_shared_memory(version)

    def column_copy(self, rngs: Sequence[np.random.Generator]) -> Agent:
        k = self.agent.k
        return JointSeats(self.agent.inner.runtime.column_copy(rngs[::k]), k)

    def set_columns(self, env_ranks: Sequence[int], n_envs: int) -> None:
        super().set_columns(env_ranks, n_envs)
        self.agent.inner.runtime.set_columns([int(rank) for rank in env_ranks[:: self.agent.k]], n_envs)


class JointSeats(Agent):
    """Columns of seats for a `joint` agent, which gets and returns arrays `[environments, k, ...]`.

    An environment's streams are those of its first seat. Its state is reset when all its seats join at once: when its
    game begins.
    """

    runtime_cls = JointRuntime

    def __init__(self, inner: Agent, k: int) -> None:
        self.inner, self.k = inner, k
        self.recurrent, self.mask_key = inner.recurrent, inner.mask_key
        self.observation_space, self.action_space = inner.observation_space, inner.action_space
        self._joined: set[int] = set()

    def _divided(self, rows: Any) -> Any:
        return map_leaves(lambda leaf: leaf.reshape(len(leaf) // self.k, self.k, *leaf.shape[1:]), rows)

    def _joint(self, rows: Any, name: str) -> Any:
        def joined(leaf: Any) -> Any:
            array = np.asarray(leaf)
            if array.ndim < 2 or array.shape[1] != self.k:
                raise SpaceError(
                    f"{type(self.inner).__name__} is joint, so its {name} must have shape [environments, {self.k}, "
                    f"...], got {list(array.shape)}"
                )
            return array.reshape(-1, *array.shape[2:])

        return map_leaves(joined, as_named(rows))

    def step(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> AgentStep:
        for env in {column // self.k for column in self._joined}:
            if all(env * self.k + i in self._joined for i in range(self.k)):
                self.inner.reset_one(env)
        self._joined.clear()
        step = self.inner.step(*map(self._divided, (observation, prev_action, prev_reward)))
        return AgentStep(self._joint(step.action, "actions"), self._joint(step.agent_info, "agent_info"))

    def value(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> Any:
        return self._joint(self.inner.value(*map(self._divided, (observation, prev_action, prev_reward))), "values")

    def seed_columns(self, rngs: Sequence[np.random.Generator]) -> None:
        self.inner.seed_columns(rngs[:: self.k])

    def reseed_columns(self, columns: npt.NDArray[np.intp], rngs: Sequence[np.random.Generator]) -> None:
        self.inner.reseed_columns(columns[:: self.k] // self.k, rngs[:: self.k])

    def select(self, columns: npt.NDArray[np.intp] | None) -> None:
        self.inner.select(None if columns is None else columns[:: self.k] // self.k)

    def reset(self) -> None:
        self._joined.clear()
        self.inner.reset()

    def reset_one(self, column: int) -> None:
        self._joined.add(column)

    def sample_mode(self, itr: int) -> None:
        self.inner.sample_mode(itr)

    def eval_mode(self, itr: int) -> None:
        self.inner.eval_mode(itr)

    def read_parameters(self) -> Mapping[str, npt.NDArray[Any]]:
        return self.inner.read_parameters()

    def write_parameters(self, parameters: Mapping[str, npt.NDArray[Any]]) -> None:
        self.inner.write_parameters(parameters)
