"""Agents around another agent. One passes every call on: the base of agents that log calls or inject faults. Joint
policies act for all their seats of an environment together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.agents.agent import Agent, AgentRuntime, AgentStep, Space, as_agent, as_agent_step
from penstock.agents.shared_parameters import SharedParameters
from penstock.buffers.named import as_named, map_leaves
from penstock.errors import SpaceError


class DelegatingRuntime(AgentRuntime):
    """Passes what samplers do with a `DelegatingAgent` on to its inner agent."""

    agent: DelegatingAgent

    def attach(self, parameters: SharedParameters) -> None:
        super().attach(parameters)
        self.agent.in_worker = True

    def worker_copy(self) -> DelegatingAgent:
        copied = self.agent.copy_for_worker()
        copied.agent = self.agent.agent.runtime.worker_copy()
        return copied

    def server_copy(self) -> DelegatingAgent:
        copied = self.agent.copy_for_worker()
        copied.agent = self.agent.agent.runtime.server_copy()
        return copied

    def column_copy(self, rngs: Sequence[np.random.Generator]) -> DelegatingAgent:
        # Not the base method: it would seed and reset the inner agent, which all copies share at that moment.
        copied = self._copy_without_columns()
        assert isinstance(copied, DelegatingAgent)
        copied.agent = self.agent.agent.runtime.column_copy(rngs)
        return copied

    def set_columns(self, env_ranks: Sequence[int], n_envs: int, *, in_turns: bool = False) -> None:
        super().set_columns(env_ranks, n_envs, in_turns=in_turns)
        self.agent.agent.runtime.set_columns(env_ranks, n_envs, in_turns=in_turns)

    def inference_difference(self, make_inputs: Callable[[], Sequence[Any]]) -> float | None:
        return self.agent.agent.runtime.inference_difference(make_inputs)

    def compile_model(self, options: Mapping[str, Any]) -> None:
        self.agent.agent.runtime.compile_model(options)

    def page_locked(self, memory: npt.NDArray[np.uint8]) -> AbstractContextManager[None]:
        return self.agent.agent.runtime.page_locked(memory)


def _passed(name: str) -> Any:
    """Make a method that calls the inner agent's method `name`."""

    @wraps(getattr(Agent, name))
    def method(self: DelegatingAgent, *args: object, **kwargs: object) -> Any:
        return getattr(self.agent, name)(*args, **kwargs)

    return method


class DelegatingAgent(Agent):
    """Passes every call to `agent`. Subclasses override the methods that they change.

    Give this object to the sampler, and call `sync_shared_memory` on it, not on the inner agent.
    """

    runtime_cls = DelegatingRuntime

    #: True in the copies of a worker. False in the learner's agent, and in the trial step before workers start.
    in_worker = False

    def __init__(self, agent: Agent) -> None:
        self.agent = as_agent("agent", agent)
        self.recurrent, self.mask_key, self.joint = agent.recurrent, agent.mask_key, agent.joint

    def initialize(self, observation_space: Space, action_space: Space, *, seed: int | None = None) -> None:
        super().initialize(observation_space, action_space, seed=seed)
        self.agent.runtime.ensure_initialized(observation_space, action_space, seed)
        self.recurrent = self.agent.recurrent

    def step(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> AgentStep:
        return self.agent.step(observation, prev_action, prev_reward)

    if not TYPE_CHECKING:  # type checkers know these from `Agent`
        seed_columns, reseed_columns = _passed("seed_columns"), _passed("reseed_columns")
        reset, reset_one, value = _passed("reset"), _passed("reset_one"), _passed("value")
        train_mode, sample_mode, eval_mode = _passed("train_mode"), _passed("sample_mode"), _passed("eval_mode")
        _set_greedy = _passed("_set_greedy")
        read_parameters, write_parameters = _passed("read_parameters"), _passed("write_parameters")
        _trained_parameters, _parameters_to_send = _passed("_trained_parameters"), _passed("_parameters_to_send")
        state_dict = _passed("state_dict")

    def select(self, columns: npt.NDArray[np.intp] | None) -> None:
        super().select(columns)
        self.agent.select(columns)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.agent.load_state_dict(state)
        self._publish_if_shared()


class JointRuntime(DelegatingRuntime):
    """The samplers' side of a `JointSeats`: that of its agent, for whole environments."""

    agent: JointSeats

    def column_copy(self, rngs: Sequence[np.random.Generator]) -> DelegatingAgent:
        return super().column_copy(rngs[:: self.agent.k])

    def set_columns(self, env_ranks: Sequence[int], n_envs: int, *, in_turns: bool = False) -> None:
        AgentRuntime.set_columns(self, env_ranks, n_envs)  # the base would give the inner agent a rank for each seat
        self.agent.agent.runtime.set_columns([int(rank) for rank in env_ranks[:: self.agent.k]], n_envs)

    def inference_difference(self, make_inputs: Callable[[], Sequence[Any]]) -> float | None:
        return None  # not measured: the inputs are rows of single seats, and the agent needs whole environments


class JointSeats(DelegatingAgent):
    """Columns of seats for a `joint` agent, which gets and returns arrays `[environments, k, ...]`.

    The random streams of an environment are those of its first seat, and the state is reset with that seat. When a game
    begins, workers reset all seats, also those of absent agents. When an agent joins later, they reset none.
    """

    runtime_cls = JointRuntime

    def __init__(self, agent: Agent, k: int) -> None:
        super().__init__(agent)
        self.k, self.joint = k, False
        self.observation_space, self.action_space = agent.observation_space, agent.action_space

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

    def reset_one(self, column: int) -> None:
        if column % self.k == 0:
            self.agent.reset_one(column // self.k)

    def column_state(self, column: int) -> dict[str, Any]:
        return self.agent.column_state(column // self.k)

    def load_column_state(self, column: int, state: Mapping[str, Any]) -> None:
        self.agent.load_column_state(column // self.k, state)
