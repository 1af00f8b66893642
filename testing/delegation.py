"""An agent that is another agent, for those that watch one or disturb it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from penstock.agents import Agent, AgentStep, SharedParameters
from penstock.errors import ConfigError

__all__ = ["DelegatingAgent"]

_Self = TypeVar("_Self", bound="DelegatingAgent")


class DelegatingAgent(Agent):
    """Leaves everything to `agent`; subclasses override what they are about.

    Give the sampler this object and call `sync_shared_memory` on it, not on the agent inside.
    """

    #: True in a worker's copies, False in the learner's object and in the trial before workers start.
    in_worker = False

    def __init__(self, agent: Agent) -> None:
        if not isinstance(agent, Agent):
            raise ConfigError(f"agent must be a penstock Agent, got {type(agent).__name__}")
        self.agent = agent
        self.recurrent = agent.recurrent

    # ---- life ------------------------------------------------------------------------------

    def initialize(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any], *, seed: int | None = None
    ) -> None:
        super().initialize(observation_space, action_space, seed=seed)
        self.agent.ensure_initialized(observation_space, action_space, seed)
        self.recurrent = self.agent.recurrent

    def seed_columns(self, rngs: Sequence[np.random.Generator]) -> None:
        self.agent.seed_columns(rngs)

    def reseed_columns(self, columns: npt.NDArray[np.intp], rngs: Sequence[np.random.Generator]) -> None:
        self.agent.reseed_columns(columns, rngs)

    def set_columns(self, env_ranks: Sequence[int], n_envs: int) -> None:
        super().set_columns(env_ranks, n_envs)
        self.agent.set_columns(env_ranks, n_envs)

    def reset(self) -> None:
        self.agent.reset()

    def reset_one(self, column: int) -> None:
        self.agent.reset_one(column)

    # ---- acting ----------------------------------------------------------------------------

    def step(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> AgentStep:
        return self.agent.step(observation, prev_action, prev_reward)

    def value(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> Any:
        return self.agent.value(observation, prev_action, prev_reward)

    def select(self, columns: npt.NDArray[np.intp] | None) -> None:
        super().select(columns)
        self.agent.select(columns)

    # ---- modes -----------------------------------------------------------------------------

    def train_mode(self, itr: int) -> None:
        self.agent.train_mode(itr)

    def sample_mode(self, itr: int) -> None:
        self.agent.sample_mode(itr)

    def eval_mode(self, itr: int) -> None:
        self.agent.eval_mode(itr)

    # ---- parameters ------------------------------------------------------------------------

    def read_parameters(self) -> Mapping[str, npt.NDArray[Any]]:
        return self.agent.read_parameters()

    def write_parameters(self, parameters: Mapping[str, npt.NDArray[Any]]) -> None:
        self.agent.write_parameters(parameters)

    def state_dict(self) -> dict[str, Any]:
        return self.agent.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.agent.load_state_dict(state)

    # ---- copies ----------------------------------------------------------------------------

    def attach(self, parameters: SharedParameters) -> None:
        super().attach(parameters)
        self.in_worker = True

    def worker_copy(self: _Self) -> _Self:
        twin = super().worker_copy()
        twin.agent = self.agent.worker_copy()
        return twin

    def server_copy(self: _Self) -> _Self:
        twin = super().server_copy()
        twin.agent = self.agent.server_copy()
        return twin

    def compile_model(self, options: Mapping[str, Any]) -> None:
        self.agent.compile_model(options)

    def page_locked(self, memory: npt.NDArray[np.uint8]) -> AbstractContextManager[None]:
        return self.agent.page_locked(memory)

    def column_copy(self: _Self, rngs: Sequence[np.random.Generator]) -> _Self:
        # Not super's, which would seed and reset the agent that the other copies have too.
        twin = copy.copy(self)
        twin._followed = self._followed
        twin.env_ranks = twin.n_envs = twin.selected = None
        twin.agent = self.agent.column_copy(rngs)
        return twin
