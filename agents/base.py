"""The agent: it chooses actions for a batch of environments. It needs no torch."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from penstock.agents.acting import Actor, act
from penstock.agents.runtime import AgentRuntime
from penstock.agents.saving import load, save
from penstock.agents.shared_parameters import SharedParameters
from penstock.buffers.named import NamedArrays
from penstock.errors import ConfigError, SamplerStateError

#: The space of observations or actions.
Space = gym.Space[Any]

_Self = TypeVar("_Self", bound="Agent")

_FROM_SEED_COLUMNS = "_noise", "_rngs", "_uniform"


class AgentStep(NamedTuple):
    """What `Agent.step` returns."""

    action: Any  #: `[B, ...]`, one action per column, in the structure of the action space
    agent_info: Any = NamedArrays()  #: arrays `[B, ...]` to record with the action, by name


class Agent(ABC):
    """Chooses actions for a batch of environments. Column b of the batch is one environment.

    Subclasses override `step`, and `value` if they can estimate values. Inputs are numpy arrays (`NamedArrays` for
    Dict and Tuple spaces) with leading dimension `[B]`. Outputs may be numpy arrays or CPU tensors. Copy the inputs
    that you keep: the next step overwrites their memory.

    An agent with parameters also overrides `read_parameters` and `write_parameters`. An agent that draws random
    numbers overrides `seed_columns` and `reseed_columns`. An agent with state per column overrides `reset` and
    `reset_one`. Samplers with central inference (`GpuSampler`, `AlternatingSampler`) also call `select`.

    The object that you make is the learner's agent. Workers act with copies of it: one copy samples, another
    evaluates. Each has its own state per column, so that evaluation does not change training. A copy acts with the
    parameters of the last `sync_shared_memory`. Samplers make and use these copies through `runtime`.
    """

    #: True if actions depend on earlier inputs. Collectors then call `value` where an episode is truncated, for all
    #: columns. Otherwise they compute these values at the end of the batch, in one call with any number of rows.
    recurrent = False
    #: Where the mask of legal actions is: "observation.NAME" or "info.NAME"; None without one. Random steps before the
    #: first batch respect it, and a mask without a legal action raises an error that names the environment. The stock
    #: agents for discrete actions take it as an argument. In your own agent, `penstock.agents.mask_of` reads the masks.
    mask_key: str | None = None
    runtime_cls: ClassVar[type[AgentRuntime]] = AgentRuntime  #: what samplers do with the agent

    observation_space: Space
    action_space: Space
    # The sampler sets these in a copy, before it calls `sample_mode` or `eval_mode`:
    env_ranks: Sequence[int] | None = None  #: the env_rank of each column
    n_envs: int | None = None  #: the number of environments on all machines
    #: The columns for which `step` and `value` get rows; None for all columns. See `select`.
    selected: npt.NDArray[np.intp] | None = None

    # State of the runtime.
    _from_initialize: ClassVar[Sequence[str]] = ("observation_space", "action_space")  # attributes that it sets
    _subscribers: tuple[SharedParameters, ...] | None = None  # in the learner's agent: one per sampler
    _source: SharedParameters | None = None  # in a worker's copy: where it reads parameters
    _actor: Actor | None = None  # what `act` uses
    _version = 0  # in a worker's copy: the version that it has read

    # ---- setup -----------------------------------------------------------------------------

    def initialize(self, observation_space: Space, action_space: Space, *, seed: int | None = None) -> None:
        """Set the spaces; raise `SpaceError` if the agent does not support them. A sampler calls this once, in the
        main process, unless you have called it. The agent makes its initial parameters from `seed`."""
        self.observation_space, self.action_space = observation_space, action_space

    def seed_columns(self, rngs: Sequence[np.random.Generator]) -> None:
        """Set one random stream per column. If an agent draws the noise of column b only from `rngs[b]`, its
        trajectories do not depend on the number of workers."""

    def reseed_columns(self, columns: npt.NDArray[np.intp], rngs: Sequence[np.random.Generator]) -> None:
        """Set new random streams for some columns, because their environments were rebuilt."""

    def reset(self) -> None:
        """Reset the state of every column."""

    def reset_one(self, column: int) -> None:
        """Reset the state of one column: its episode has ended. `column` is an index among all columns, also while
        some are selected."""

    # ---- acting ----------------------------------------------------------------------------

    @abstractmethod
    def step(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> AgentStep:
        """Actions for `observation` `[B, ...]`. `prev_action` and `prev_reward` are zero at the first step of an
        episode."""

    def value(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> Any:
        """Estimated values `[B]` of `observation`. Must not change the state of any column."""
        raise ConfigError(
            f"{type(self).__name__} has no value(): override it, or initialize the sampler with bootstrap_value=False"
        )

    def select(self, columns: npt.NDArray[np.intp] | None) -> None:
        """From now on, `step` and `value` get rows for these columns only (None: for all columns).

        Samplers with central inference call this between steps, to serve environments as they become ready. An agent
        with state per column uses the state of the columns in `self.selected`.
        """
        self.selected = columns

    def act(self, observation: Any, *, greedy: bool = True, start: Any = None, prev_reward: Any = None) -> Any:
        """The action for one observation, or the actions `[B, ...]` for a batch of them, outside a sampler.

        `observation` is in the structure of the observation space, and the action in that of the action space: pass it
        to `env.step`. With `greedy`, the agent takes the most probable or best action. Otherwise it draws one, as in
        evaluations. It acts with its present parameters, and draws the same numbers in every run.

        A recurrent agent needs `start`: True at the first step of an episode (or `[B]` bools), False at the others. It
        remembers its state and its last action. `prev_reward` is the reward of the step before, if the model uses it.

        Raises `SamplerStateError` before `initialize`, and `SpaceError` for an observation that does not fit.
        """
        self._require_initialized()
        return act(self, observation, greedy, start, prev_reward)

    @contextmanager
    def _acting(self, actor: Agent, greedy: bool) -> Iterator[None]:
        """The time of one step of `act` with the copy `actor`."""
        actor.eval_mode(0)
        actor._set_greedy(greedy)
        yield

    def _set_greedy(self, greedy: bool) -> None:
        """Whether `act` takes the best action or draws one. Called after `eval_mode`."""

    def _require_initialized(self) -> None:
        if "observation_space" not in vars(self):
            raise SamplerStateError(self._not_initialized())

    def _not_initialized(self) -> str:
        return (
            f"this {type(self).__name__} is not initialized: call sampler.initialize(agent), or "
            "agent.initialize(env.observation_space, env.action_space)"
        )

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            """Called for a missing attribute only: some messages say why it is missing."""
            if name in self._from_initialize and "observation_space" not in vars(self):
                raise AttributeError(f"{name} is missing: {self._not_initialized()}")
            if name in _FROM_SEED_COLUMNS:
                raise AttributeError(
                    f"step is for the copies of this {type(self).__name__} in a sampler: outside of one, call "
                    "agent.act(observation)"
                )
            return object.__getattribute__(self, name)  # raises the usual error, or that of a property

    # ---- resuming --------------------------------------------------------------------------

    def column_state(self, column: int) -> dict[str, Any]:
        """What this copy keeps for one column: random stream, noise, recurrent state. `sampler.state_dict` saves it.

        This saves every attribute that has the methods `column_state(column)` and `load_column_state(column, state)`.
        The attributes of penstock's agents have them. If your agent has more methods than its base class, define these
        two methods too. If it keeps nothing for each column, they only call the methods of the base class.
        """
        parts = {name: getattr(part, "column_state", None) for name, part in vars(self).items()}
        return {name: save(column) for name, save in parts.items() if save is not None}

    def load_column_state(self, column: int, state: Mapping[str, Any]) -> None:
        """Restore what `column_state` has returned, perhaps for another column of another copy."""
        for name, part in state.items():
            getattr(self, name).load_column_state(column, part)

    # ---- modes -----------------------------------------------------------------------------

    def train_mode(self, itr: int) -> None:
        """The user's code calls this before training."""

    def sample_mode(self, itr: int) -> None:
        """The sampler calls this before it collects a batch."""

    def eval_mode(self, itr: int) -> None:
        """The sampler calls this before an evaluation."""

    # ---- parameters ------------------------------------------------------------------------

    def read_parameters(self) -> Mapping[str, npt.NDArray[Any]]:
        """The current parameters by name, as arrays. Names, shapes and dtypes must stay the same."""
        return {}

    def write_parameters(self, parameters: Mapping[str, npt.NDArray[Any]]) -> None:
        """Copy parameters from arrays as `read_parameters` returns them. Do not keep the arrays."""

    def state_dict(self) -> dict[str, Any]:
        """What to save in a checkpoint: the parameters by name."""
        return {name: value.copy() for name, value in self.read_parameters().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the parameters of `state_dict`, and publish them to every sampler of this agent."""
        self.write_parameters(state)
        self._publish_if_shared()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `state_dict` into a file. If the process is killed meanwhile, the old file stays."""
        save(path, self.state_dict(), type(self).__name__)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Restore what `save` has written, and publish it to every sampler of this agent. No code in the file is run.

        Raises `SamplerStateError` before `initialize`, and `ConfigError` if another kind of agent has written the file.
        """
        self._require_initialized()
        self.load_state_dict(load(path, type(self).__name__))

    def _publish_if_shared(self) -> None:
        if self._subscribers:
            self.sync_shared_memory()

    def sync_shared_memory(self) -> None:
        """Publish the parameters to every sampler of this agent. Workers use them from their next batch on.

        Raises `SamplerStateError` before the first `sampler.initialize(agent)`.
        """
        if self._subscribers is None:
            raise SamplerStateError("this agent belongs to no sampler yet: call sampler.initialize(agent) first")
        if self._subscribers:
            parameters = self.read_parameters()
            for subscriber in self._subscribers:
                subscriber.publish(parameters)

    # ---- copies ----------------------------------------------------------------------------

    def copy_for_worker(self: _Self) -> _Self:
        """A copy for a worker, or for the inference server.

        Override this if `write_parameters` writes into existing arrays: call the base method, and give the copy its
        own arrays.
        """
        return copy.copy(self)

    @property
    def runtime(self) -> AgentRuntime:
        """What samplers do with this agent. Each access makes a new object. All state is in the agent."""
        return self.runtime_cls(self)

    def __getstate__(self) -> dict[str, Any]:
        """A copy belongs to no sampler. So `copy.deepcopy(agent)` can serve as a target network."""
        return {**vars(self), "_subscribers": None, "_source": None, "_actor": None}

    def __repr__(self) -> str:
        spaces = vars(self).get("observation_space"), vars(self).get("action_space")
        state = "not initialized" if None in spaces else f"observations {spaces[0]}, actions {spaces[1]}"
        return f"<{', '.join([type(self).__name__, *self._described(), state])}>"

    def _described(self) -> list[str]:
        """What `repr` says beside the class and the spaces."""
        return [] if self.mask_key is None else [f"mask_key={self.mask_key!r}"]
