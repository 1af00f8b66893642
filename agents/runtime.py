"""What samplers do with an agent: initialize it once, copy it for workers, and give the copies new parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.agents.shared_parameters import SharedParameters
from penstock.errors import ConfigError, SpaceError

if TYPE_CHECKING:
    from penstock.agents.base import Agent, Space


class AgentRuntime:
    """The samplers' side of `agent`. An agent names its class in `runtime_cls` and makes it in `agent.runtime`.

    All state is kept on the agent. A stored runtime object would form a reference cycle with its agent, and the
    memory of both would then wait for the garbage collector.
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    # ---- the learner's agent ---------------------------------------------------------------

    def ensure_initialized(self, observation_space: Space, action_space: Space, seed: int | None) -> None:
        """Initialize the agent, unless an earlier sampler has done so. Raise `SpaceError` if it was initialized for
        other spaces."""
        agent = self.agent
        if "observation_space" not in vars(agent):
            try:
                agent.initialize(observation_space, action_space, seed=seed)
            except BaseException:  # the agent is as before: it may be initialized again
                vars(agent).pop("observation_space", None)
                raise
        elif (agent.observation_space, agent.action_space) != (observation_space, action_space):
            raise SpaceError(
                f"the agent was initialized for {agent.observation_space} and {agent.action_space}, the environment "
                f"has {observation_space} and {action_space}: make a new agent"
            )

    def share_memory(self, *, shared: bool) -> SharedParameters:
        """Allocate shared parameters for one more sampler, and write the current parameters into them."""
        values = self.agent.read_parameters()
        parameters = SharedParameters(values, shared=shared)
        parameters.publish(values)
        self.agent._subscribers = (*(self.agent._subscribers or ()), parameters)
        return parameters

    def unshare_memory(self, parameters: SharedParameters) -> None:
        """Stop publishing to this sampler."""
        self.agent._subscribers = tuple(other for other in self.agent._subscribers or () if other is not parameters)
        parameters.memory.close()

    def worker_copy(self) -> Agent:
        """A copy to act with in a worker: on the CPU, with its own parameters."""
        copied, parameters = self.agent.copy_for_worker(), self.agent.read_parameters()
        if parameters:  # the learner may write into its own arrays while this copy acts
            copied.write_parameters({name: value.copy() for name, value in parameters.items()})
        return copied

    def server_copy(self) -> Agent:
        """A copy for the inference server: as `worker_copy`, but on the device of the learner's model."""
        return self.worker_copy()

    # ---- a copy that acts ------------------------------------------------------------------

    def attach(self, parameters: SharedParameters) -> None:
        """From now on, read parameters from `parameters`."""
        self.agent._source = parameters

    def pull_shared_memory(self, version: int = 0) -> int:
        """Write the newest published parameters into the agent, unless it has them already. With `version`, write the
        parameters of that version. Returns their version."""
        agent = self.agent
        if agent._source is not None and (version or agent._source.version) != agent._version:
            values, agent._version = agent._source.read(version)
            agent.write_parameters(values)
        return agent._version

    def inference_difference(self, make_inputs: Callable[[], Sequence[Any]]) -> float | None:
        """The largest absolute difference between the outputs of this worker's copy and torch's.

        `make_inputs()` returns inputs of `step`. If the copy runs its model with torch, this returns None and does not
        call it. Raises `ConfigError` for too large a difference.
        """
        return None

    def column_copy(self, rngs: Sequence[np.random.Generator]) -> Agent:
        """A copy with its own state for `len(rngs)` columns, and the same parameters."""
        copied = self._copy_without_columns()
        copied.seed_columns(rngs)
        copied.reset()
        return copied

    def _copy_without_columns(self) -> Agent:
        """A copy that reads parameters from the same place, and has no columns yet."""
        copied = copy.copy(self.agent)
        copied._source = self.agent._source
        copied.env_ranks = copied.n_envs = copied.selected = None
        return copied

    def set_columns(self, env_ranks: Sequence[int], n_envs: int) -> None:
        """Set which environments the columns are: column b is `env_ranks[b]` of `n_envs`, on all machines together.

        Call this once for each column copy, before `sample_mode` or `eval_mode`.
        """
        self.agent.env_ranks, self.agent.n_envs = env_ranks, n_envs

    # ---- a server copy ---------------------------------------------------------------------

    def compile_model(self, options: Mapping[str, Any]) -> None:
        """Compile the model with `torch.compile(model, **options)`. Raises `ConfigError` if the agent has no model."""
        raise ConfigError(f"{type(self.agent).__name__} has no model that could be compiled: leave compile_model out")

    def page_locked(self, memory: npt.NDArray[np.uint8]) -> AbstractContextManager[None]:
        """A context manager for the time in which inputs come from `memory`. If the model is on a GPU, the memory is
        page-locked."""
        return nullcontext()
