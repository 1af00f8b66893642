"""The agent: action selection, a batch of columns at a time. No torch here."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from penstock.agents.shared_parameters import SharedParameters
from penstock.buffers.named import NamedArrays
from penstock.errors import ConfigError, SamplerStateError, SpaceError

__all__ = ["Agent", "AgentStep"]

_Self = TypeVar("_Self", bound="Agent")


class AgentStep(NamedTuple):
    """What `Agent.step` returns."""

    action: Any  #: `[B, ...]`, one action per column, in the structure of the action space
    agent_info: Any = NamedArrays()  #: arrays `[B, ...]` to record beside the action, by name


class Agent(ABC):
    """Chooses actions for a batch of environments, its columns.

    Subclasses override `step`, and `value` if they can bootstrap. Inputs are numpy arrays (or
    `NamedArrays` for Dict and Tuple spaces) with leading dimension `[B]`; outputs may be numpy arrays
    or CPU tensors. An agent keeps no reference to its inputs: the memory is written again.

    The object that the caller holds is the learner's. Each worker samples with a copy of it
    (`worker_copy`) that has its own per-column state, and evaluates with another, so evaluation never
    disturbs training. What the copies share are the parameters, as of the last `sync_shared_memory`.
    """

    #: True if actions depend on earlier inputs. `value` is then asked for while the column's state is
    #: that of its time step, with all columns at once; otherwise once a batch, for any number of rows.
    recurrent = False

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    env_ranks: Sequence[int] | None = None  #: of a copy's columns, once `set_columns` has told it
    n_envs: int | None = None  #: how many environments there are in all, likewise
    #: The columns that `step` and `value` are called for, if not for all; see `select`.
    selected: npt.NDArray[np.intp] | None = None
    _audiences: tuple[SharedParameters, ...] | None = None  # the learner's: one per sampler
    _followed: SharedParameters | None = None  # a worker copy's
    _version = 0

    _initialized = False

    # ---- life ------------------------------------------------------------------------------

    def initialize(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any], *, seed: int | None = None
    ) -> None:
        """Take the spaces; raise `SpaceError` for those that the agent cannot handle. Called once, by
        the sampler, in the main process. `seed` fixes the initial parameters that the agent makes."""
        self.observation_space, self.action_space = observation_space, action_space

    def ensure_initialized(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any], seed: int | None
    ) -> None:
        """`initialize`, unless an earlier sampler has done it; raise `SpaceError` if for other spaces."""
        if not self._initialized:
            self.initialize(observation_space, action_space, seed=seed)
            self._initialized = True
        elif (self.observation_space, self.action_space) != (observation_space, action_space):
            raise SpaceError(
                f"the agent was initialized for {self.observation_space} and {self.action_space}, the environment "
                f"has {observation_space} and {action_space}: make a new agent"
            )

    def seed_columns(self, rngs: Sequence[np.random.Generator]) -> None:
        """Take one random stream per column. An agent that draws column b's noise from `rngs[b]`
        alone gives the same trajectories however the columns are spread over workers."""

    def reseed_columns(self, columns: npt.NDArray[np.intp], rngs: Sequence[np.random.Generator]) -> None:
        """Take new random streams for some of the columns, whose environments have been built anew."""

    def set_columns(self, env_ranks: Sequence[int], n_envs: int) -> None:
        """Take note that column b is environment `env_ranks[b]` of `n_envs`, on all machines together.

        Called once for each copy that acts, when its columns are seeded and before it is put into a mode.
        What hangs on the environment, an epsilon of its own for example, then does not hang on the worker.
        """
        self.env_ranks, self.n_envs = env_ranks, n_envs

    def reset(self) -> None:
        """Forget the state of every column."""

    def reset_one(self, column: int) -> None:
        """Forget the state of one column, whose episode has ended."""

    # ---- acting ----------------------------------------------------------------------------

    @abstractmethod
    def step(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> AgentStep:
        """Actions for `observation` `[B, ...]`, as an `AgentStep`. `prev_action` and `prev_reward` are zero at the
        first step of an episode."""

    def value(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> Any:
        """Estimated values `[B]` of `observation`. Must leave the columns' state as it is."""
        raise ConfigError(
            f"{type(self).__name__} has no value(): override it, or initialize the sampler with bootstrap_value=False"
        )

    def select(self, columns: npt.NDArray[np.intp] | None) -> None:
        """From now on, `step` and `value` are called for these columns alone (None: for all of them).

        A sampler that serves environments as they become ready does this between any two steps. An agent
        that keeps something for each column takes that of `self.selected`; `reset_one` counts over all columns.
        """
        self.selected = columns

    # ---- modes -----------------------------------------------------------------------------

    def train_mode(self, itr: int) -> None:
        """The learner is about to train. Called by the user's code."""

    def sample_mode(self, itr: int) -> None:
        """A batch of samples is about to be collected."""

    def eval_mode(self, itr: int) -> None:
        """An evaluation is about to run."""

    # ---- parameters ------------------------------------------------------------------------

    def read_parameters(self) -> Mapping[str, npt.NDArray[Any]]:
        """The learner's current parameters by name, as CPU arrays; the names and shapes never change."""
        return {}

    def write_parameters(self, parameters: Mapping[str, npt.NDArray[Any]]) -> None:
        """Set this copy's parameters from arrays as `read_parameters` gives them (copy, do not keep)."""

    def state_dict(self) -> dict[str, Any]:
        """Everything to save: the parameters by name."""
        return {name: value.copy() for name, value in self.read_parameters().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave. Call `sync_shared_memory` for the workers to see it."""
        self.write_parameters(state)

    def sync_shared_memory(self) -> None:
        """Publish the learner's parameters; workers act on them from their next batch on."""
        if self._audiences is None:
            raise SamplerStateError("this agent belongs to no sampler yet: call sampler.initialize(agent) first")
        if self._audiences:
            parameters = self.read_parameters()
            for audience in self._audiences:
                audience.publish(parameters)

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle of an agent belongs to no sampler; a target network is made this way."""
        return {**vars(self), "_audiences": None, "_followed": None}

    # ---- copies, made by the sampler -------------------------------------------------------

    def share_memory(self, *, shared: bool) -> SharedParameters:
        """Allocate shared parameters for one more sampler, publish to it, and return them."""
        parameters = self.read_parameters()
        audience = SharedParameters(parameters, shared=shared)
        audience.publish(parameters)
        self._audiences = (*(self._audiences or ()), audience)
        return audience

    def unshare_memory(self, audience: SharedParameters) -> None:
        """Publish to this sampler no longer."""
        self._audiences = tuple(other for other in self._audiences or () if other is not audience)
        audience.memory.close()

    def worker_copy(self: _Self) -> _Self:
        """A copy to sample with in a worker: parameters of its own, on the CPU, nothing shared yet."""
        return copy.copy(self)

    def server_copy(self: _Self) -> _Self:
        """A copy to act for all environments in the main process: as `worker_copy`, but where the learner's
        model is, on a GPU if it is on one."""
        return self.worker_copy()

    def compile_model(self, options: Mapping[str, Any]) -> None:
        """In a copy that is about to act for all environments: compile the model, with these arguments of
        `torch.compile`. Raises `ConfigError` if there is none."""
        raise ConfigError(f"{type(self).__name__} has no model that could be compiled: leave compile_model out")

    def page_locked(self, memory: npt.NDArray[np.uint8]) -> AbstractContextManager[None]:
        """In such a copy: while this is entered, inputs come from `memory`. One that acts on a GPU keeps it
        page-locked."""
        return nullcontext()

    def attach(self, parameters: SharedParameters) -> None:
        """Follow the shared parameters, as a worker's copy."""
        self._followed = parameters

    def pull_shared_memory(self) -> None:
        """Take over the newest published parameters, if they are newer than this copy's."""
        if self._followed is not None and self._followed.version != self._version:
            parameters, self._version = self._followed.read()
            self.write_parameters(parameters)

    def column_copy(self: _Self, rngs: Sequence[np.random.Generator]) -> _Self:
        """A copy with state of its own for `len(rngs)` columns, and the same parameters."""
        twin = copy.copy(self)
        twin._followed = self._followed
        twin.env_ranks = twin.n_envs = twin.selected = None
        twin.seed_columns(rngs)
        twin.reset()
        return twin
