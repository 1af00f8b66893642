"""The agent: it chooses actions for a batch of environments. It needs no torch."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.agents.noise import ColumnNoise
from penstock.agents.shared_parameters import SharedParameters, parameters_of
from penstock.arguments import must_be
from penstock.buffers.named import ArrayTree, NamedArrays, as_named, map_leaves
from penstock.buffers.tree import map_tree, tree_leaves, tree_of
from penstock.errors import ConfigError, SamplerStateError, SpaceError, brief

#: The space of observations or actions.
Space = gym.Space[Any]

_Self = TypeVar("_Self", bound="Agent")

_NUMPY = "numpy array"  # in a file of `save`: marks a tensor that was an array
_FROM_SEED_COLUMNS = "_noise", "_rngs", "_uniform"


class AgentStep(NamedTuple):
    """What `Agent.step` returns."""

    action: Any  #: `[B, ...]`, one action per column, in the structure of the action space
    agent_info: Any = NamedArrays()  #: arrays `[B, ...]` to record with the action, by name


def as_agent(name: str, value: Any) -> Agent:
    """`value`; raises `ConfigError` naming the argument unless it is an agent."""
    wanted = "a penstock Agent (wrap a model, for example CategoricalPgAgent(model), or subclass penstock.Agent)"
    agent: Agent = must_be(name, value, isinstance(value, Agent), wanted)
    return agent


def as_agent_step(step: object, agent: Agent) -> AgentStep:
    """`step`, which `agent.step` returned. Raises `SpaceError` unless it is an `AgentStep`.

    A plain tuple is not accepted: it could be the action of a Tuple space.
    """
    if isinstance(step, AgentStep):
        return step
    raise SpaceError(f"{type(agent).__name__}.step must return AgentStep(action, agent_info): got {brief(step)}")


@dataclass
class _Actor:
    """A copy of the agent for `n` rows, and its last actions."""

    agent: Agent
    n: int
    prev_action: Any


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
        if hasattr(agent, "worker_copy"):
            raise ConfigError(f"{type(agent).__name__}.worker_copy is not called: its name is copy_for_worker")
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
        values = parameters_of(self.agent)
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
        copied, parameters = self.agent.copy_for_worker(), parameters_of(self.agent)
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

    def set_columns(self, env_ranks: Sequence[int], n_envs: int, *, in_turns: bool = False) -> None:
        """Set which environments the columns are: column b is `env_ranks[b]` of `n_envs`, on all machines together.
        `in_turns`: see `Agent.in_turns`.

        Call this once for each column copy, before `sample_mode` or `eval_mode`.
        """
        self.agent.env_ranks, self.agent.n_envs, self.agent.in_turns = env_ranks, n_envs, in_turns

    # ---- a server copy ---------------------------------------------------------------------

    def compile_model(self, options: Mapping[str, Any]) -> None:
        """Compile the model with `torch.compile(model, **options)`. Raises `ConfigError` if the agent has no model."""
        raise ConfigError(f"{type(self.agent).__name__} has no model that could be compiled: leave compile_model out")

    def page_locked(self, memory: npt.NDArray[np.uint8]) -> AbstractContextManager[None]:
        """While this context is open, `memory` is page-locked, if the model is on a CUDA device and the driver allows
        it. Then copies to the device are fast. Otherwise the context does nothing."""
        return nullcontext()


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
    #: True if the agent acts for all its seats of an environment together, where several agents share it. Then all its
    #: inputs and outputs are `[environments, k, ...]`, with a row for each seat. Rows of agents that are not there are
    #: zero.
    joint = False
    runtime_cls: ClassVar[type[AgentRuntime]] = AgentRuntime  #: what samplers do with the agent

    observation_space: Space
    action_space: Space
    # The sampler sets these in a copy, before it calls `sample_mode` or `eval_mode`:
    env_ranks: Sequence[int] | None = None  #: the env_rank of each column
    n_envs: int | None = None  #: the number of environments on all machines
    #: Whether the columns are agents that take turns. Then any step may turn out to be the first of a batch, since a
    #: batch may begin with decisions of the one before.
    in_turns = False
    #: The columns for which `step` and `value` get rows; None for all columns. See `select`.
    selected: npt.NDArray[np.intp] | None = None

    # State of the runtime.
    _from_initialize: ClassVar[Sequence[str]] = ("observation_space", "action_space")  # attributes that it sets
    _subscribers: tuple[SharedParameters, ...] | None = None  # in the learner's agent: one per sampler
    _source: SharedParameters | None = None  # in a worker's copy: where it reads parameters
    _actor: _Actor | None = None  # what `act` uses
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
        """Set new random streams for some columns, because their environments were rebuilt. This does it for every
        attribute that is a `ColumnNoise`, as those of penstock's agents are."""
        for noise in vars(self).values():
            if isinstance(noise, ColumnNoise):
                noise.reseed(columns, rngs)

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
        rows, is_batch = _rows(self.observation_space, observation)
        n = len(next(NamedArrays(rows=rows).leaves())[1])
        if self.recurrent and start is None:
            raise ConfigError(
                f"{type(self).__name__} has a state that changes from step to step: give start=True at the first step "
                "of an episode (or [B] bools), and start=False at the others"
            )
        actor = self._actor
        if actor is None or actor.n != n:
            actor = self._actor = _new_actor(self, n)
        starts = np.broadcast_to(np.asarray(False if start is None else start, np.bool_), (n,))
        for column in np.flatnonzero(starts).tolist():
            actor.agent.reset_one(column)
        _zero(actor.prev_action, starts)
        rewards = np.broadcast_to(np.asarray(0 if prev_reward is None else prev_reward, np.float32), (n,)).copy()
        with self._acting(actor.agent, greedy):
            action = as_named(actor.agent.step(rows, actor.prev_action, rewards).action)
        actor.prev_action[...] = action
        row = None if is_batch else 0
        return map_tree(lambda space, actions: _element(space, actions, row), self.action_space, action)

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

    def _trained_parameters(self) -> Mapping[str, npt.NDArray[Any]]:
        """Those of `read_parameters` that only the learner's training changes."""
        return parameters_of(self)

    def _parameters_to_send(self) -> Mapping[str, npt.NDArray[Any]]:
        """Those of `read_parameters` that may cross a network: arrays of numbers, and no code."""
        return parameters_of(self)

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
        _save(path, self.state_dict(), type(self).__name__)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Restore what `save` has written, and publish it to every sampler of this agent. No code in the file is run.

        Raises `SamplerStateError` before `initialize`, and `ConfigError` if another kind of agent has written the file.
        """
        self._require_initialized()
        self.load_state_dict(_load(path, type(self).__name__))

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
            parameters = parameters_of(self)
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


# ---- `act`: one observation or a batch, outside a sampler ---------------------------------------------


def _new_actor(agent: Agent, n: int) -> _Actor:
    rngs = [np.random.default_rng(sequence) for sequence in np.random.SeedSequence(0).spawn(n)]
    copied = agent.runtime.column_copy(rngs)
    copied.runtime.set_columns([0] * n, 1)
    return _Actor(copied, n, zeros_of(agent.action_space, n))


def zeros_of(space: Space, n: int) -> Any:
    """`n` rows of zeros in the structure of `space`, as agents get them."""
    return as_named(map_tree(lambda part: np.zeros((n, *(part.shape or ())), part.dtype), space))


def _zero(rows: ArrayTree, columns: npt.NDArray[np.bool_]) -> None:
    map_leaves(lambda leaf: leaf.__setitem__(columns, 0), rows)


def _rows(space: Space, observation: object) -> tuple[Any, bool]:
    """`observation` as agents get it: arrays `[B, ...]` in the dtypes of `space`; and whether it is a batch: its first
    array has one dimension more than `space` says."""
    leaves = list(tree_leaves(space, "observation", observation))
    _, first, array = leaves[0]
    is_batch = np.ndim(array) > len(first.shape or ())
    return as_named(tree_of(space, [_row(part, value, is_batch, name) for name, part, value in leaves])), is_batch


def _row(space: Space, value: Any, is_batch: bool, name: str) -> Any:
    shape = tuple(space.shape or ())
    array = np.asarray(value, space.dtype)
    array = array if is_batch else array[np.newaxis]
    if array.shape[1:] != shape:
        batch = str(("B", *shape)).replace("'", "")
        raise SpaceError(f"{name} must have the shape {shape}, or {batch}, got {np.shape(value)}")
    return array


def _element(space: Space, rows: object, row: int | None) -> Any:
    """A copy of the actions `[B, ...]`; only that of `row` if it is given."""
    actions = np.array(rows)
    if row is None:
        return actions
    return int(actions[row]) if isinstance(space, spaces.Discrete) else actions[row]


# ---- `save` and `load`: a file that torch reads without running code ------------------------------------


def _save(path: str | os.PathLike[str], state: Mapping[str, Any], agent: str) -> None:
    """Write `state`, and the class name `agent`. If the process is killed meanwhile, the old file stays."""
    import torch

    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        part.unlink(missing_ok=True)
        with open(part, "xb") as file:  # a new file, never one that somebody has linked to another place
            torch.save({"agent": agent, "state": packed(state)}, file)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _load(path: str | os.PathLike[str], agent: str) -> Any:
    """The state in the file. Raises `ConfigError` if another class of agent, or something else, has written it."""
    import torch

    foreign = f"{os.fspath(path)} was not written by agent.save: "
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise  # the file is missing, or cannot be read
    except Exception as error:  # torch raises many kinds for a file that it has not written
        raise ConfigError(f"{foreign}torch cannot read it ({type(error).__name__})") from error
    if not (isinstance(saved, dict) and saved.keys() == {"agent", "state"}):
        raise ConfigError(f"{foreign}load it yourself, with load_state_dict")
    if saved["agent"] != agent:
        raise ConfigError(f"{os.fspath(path)} has the state of a {saved['agent']}, this agent is a {agent}")
    return unpacked(saved["state"])


def packed(value: object) -> Any:
    """`value` with its arrays as tensors, and its numpy scalars as numbers, which torch reads without running code."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        import torch

        return {_NUMPY: torch.from_numpy(np.ascontiguousarray(value)), "shape": list(value.shape)}
    if isinstance(value, Mapping):
        return {key: packed(part) for key, part in value.items()}
    return type(value)(packed(part) for part in value) if type(value) in (list, tuple) else value  # type: ignore


def unpacked(value: object) -> Any:
    """What `packed` was called with."""
    if isinstance(value, dict):
        if _NUMPY in value:
            return value[_NUMPY].numpy().reshape(value["shape"])
        return {key: unpacked(part) for key, part in value.items()}
    return type(value)(unpacked(part) for part in value) if type(value) in (list, tuple) else value  # type: ignore
