"""Policies of any form act for columns: environments that play episodes at the same time, and share no state."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from penstock.agents import Agent
from penstock.agents.agent import as_agent_step
from penstock.arguments import signature
from penstock.buffers.named import as_named
from penstock.buffers.reports import in_one_line
from penstock.buffers.tree import map_tree, tree_leaves, tree_of
from penstock.envs.rows import in_range
from penstock.errors import ConfigError, SpaceError, brief
from penstock.vector.objects import has_fixed_shape

Space = gym.Space[Any]
Spaces = tuple[Space, Space]  #: of observations and of actions

_HINT = ". For a model of Stable-Baselines3, give lambda obs: model.predict(obs, deterministic=True)[0]"
_LISTED = ("states", "infos", "tasks", "rngs")  # parameters of a function that get a list with an entry for each column


class SelectsActions(Protocol):
    """A policy that keeps a state, as LeRobot's do. It acts for one column at a time. If `select_action` has parameters
    named `tasks`, `infos` or `rngs`, each gets a list with one entry."""

    def reset(self) -> None:
        """Begin an episode."""

    def select_action(self, batch: Any) -> Any:
        """The action `[1, ...]` for the observation `[1, ...]`."""


#: What `evaluate` accepts as a policy.
Policy = Agent | Callable[..., Any] | SelectsActions


class Player:
    """Acts with one policy for `n` columns. Each column has its own state and random stream, and both begin again with
    each episode.

    A subclass for each form of policy says what begins, and which actions, or chunks of them, the policy returns.
    """

    acts_for_one = False  #: whether the policy acts for one column at a time in any case

    def __init__(self, policy: Any, spaces: Spaces, n: int, *, batched: bool) -> None:
        self._policy, self._spaces, self._batched = policy, spaces, batched and not self.acts_for_one
        self.rngs: list[Any] = [None] * n
        self.infos: list[dict[str, Any]] = [{} for _ in range(n)]
        self.last_reward = np.zeros(n, np.float32)

    @property
    def wants_infos(self) -> bool:
        """Whether the policy looks at the infos of each step."""
        return False

    def begin(self, column: int, rng: np.random.Generator, task: str, info: Mapping[str, Any]) -> None:
        """An episode of `task` begins in this column; `info` is that of its reset."""
        self.rngs[column], self.infos[column], self.last_reward[column] = rng, dict(info), 0
        self._begin(column, task)

    def act(self, columns: npt.NDArray[np.intp], observation: Any) -> list[npt.NDArray[Any]]:
        """The next actions of these columns, whose observations are the rows of `observation`. Returns an array
        `[k, n, ...]` for each part of the action space: a chunk of n actions for each of k columns."""
        if self._batched:
            return self._chunks(self._call(columns, observation), len(columns))
        chunks = [
            self._chunks(self._call(columns[i : i + 1], take_rows(self._spaces[0], observation, [i])), 1)
            for i in range(len(columns))
        ]
        if len({chunk[0].shape[1] for chunk in chunks}) > 1:
            raise SpaceError(f"{brief(self._policy)} returns chunks of different lengths: give all the same length")
        return [np.concatenate(parts) for parts in zip(*chunks, strict=True)]

    def _begin(self, column: int, task: str) -> None:
        raise NotImplementedError

    def _call(self, columns: npt.NDArray[np.intp], observation: Any) -> Any:
        raise NotImplementedError

    def _chunks(self, result: Any, k: int) -> list[npt.NDArray[Any]]:
        """What the policy has returned, as arrays `[k, n, ...]`."""
        arrays: list[npt.NDArray[Any]] = []
        for name, space, value in self._leaves(result):
            array, shape = _as_array(value, name), tuple(space.shape)
            extra = array.ndim - len(shape)
            fits = extra in (1, 2) and len(array) == k and array.shape[extra:] == shape
            n = array.shape[1] if extra == 2 else 1
            if not fits or n == 0 or (arrays and arrays[0].shape[1] != n):
                text = ", ".join(map(str, shape))
                raise SpaceError(
                    f"a policy must return actions [{k}, {text}] or chunks [{k}, n, {text}] for {k} environments, with "
                    f"the same n in all parts: {name} of {space} has the shape {array.shape}"
                )
            if array.dtype != space.dtype:
                array = _cast(array, space, name)
            arrays.append(array if extra == 2 else array[:, None])
        return arrays

    def _leaves(self, result: Any) -> Iterable[tuple[str, Any, Any]]:
        space = self._spaces[1]
        if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
            return tree_leaves(space, "action", result)
        return [("action", space, result)]

    def in_space(self, leaves: Sequence[Any]) -> Any:
        """Arrays for each part of the action space, in its structure."""
        return as_named(tree_of(self._spaces[1], leaves))


class _AgentPlayer(Player):
    """An `Agent`, as the evaluations of samplers run it."""

    def __init__(self, policy: Agent, spaces: Spaces, n: int, *, batched: bool) -> None:
        super().__init__(policy, spaces, n, batched=batched)
        self._agent = policy.runtime.column_copy([np.random.default_rng(0) for _ in range(n)])
        self._agent.runtime.set_columns([0] * n, 1)  # nothing may depend on the column
        self._agent.eval_mode(0)
        self._last = as_named(map_tree(lambda part: np.zeros((n, *part.shape), part.dtype), spaces[1]))

    def _begin(self, column: int, task: str) -> None:
        self._agent.reset_one(column)
        self._agent.reseed_columns(np.array([column]), [self.rngs[column]])
        self._last[column] = 0

    def _call(self, columns: npt.NDArray[np.intp], observation: Any) -> Any:
        agent = self._agent
        agent.select(columns)
        step = agent.step(as_named(observation), self._last[columns], self.last_reward[columns])
        self._last[columns] = action = as_named(as_agent_step(step, agent).action)
        return action


class _FunctionPlayer(Player):
    """A function of the observations `[k, ...]`. Each of the parameters `_LISTED` that it has gets a list with an entry
    for each column."""

    def __init__(self, policy: Any, spaces: Spaces, n: int, *, batched: bool) -> None:
        super().__init__(policy, spaces, n, batched=batched)
        self._names = [name for name in _LISTED if name in _parameters_of(self._function)]
        self.states: list[Any] = [None] * n
        self.tasks = [""] * n

    @property
    def _function(self) -> Callable[..., Any]:
        return self._policy  # type: ignore[no-any-return]

    @property
    def wants_infos(self) -> bool:
        return "infos" in self._names

    def _begin(self, column: int, task: str) -> None:
        self.states[column], self.tasks[column] = None, task

    def _listed(self, which: Sequence[int]) -> dict[str, list[Any]]:
        """What the function gets beside the observations of these columns."""
        return {name: [getattr(self, name)[c] for c in which] for name in self._names}

    def _call(self, columns: npt.NDArray[np.intp], observation: Any) -> Any:
        which = columns.tolist()
        result = self._policy(observation, **self._listed(which))
        if "states" not in self._names:
            return result
        if not (isinstance(result, tuple) and len(result) == 2 and len(result[1]) == len(which)):
            raise SpaceError(
                f"a policy with a parameter named states must return (action, states), with {len(which)} states, got "
                f"{brief(result)}"
            )
        for column, state in zip(which, result[1], strict=True):
            self.states[column] = state
        return result[0]


class _ObjectPlayer(_FunctionPlayer):
    """An object with `reset` and `select_action`: each column has a copy, which shares the parameters of torch modules
    with the others. The buffers of modules are copied: they may be a state, such as a counter or a cache. What the
    policy draws from torch depends on the episode and the step only."""

    acts_for_one = True

    def __init__(self, policy: SelectsActions, spaces: Spaces, n: int, *, batched: bool) -> None:
        super().__init__(policy, spaces, n, batched=batched)
        copied: Any = copy.deepcopy
        shared: dict[int, Any] = {}
        if (torch := sys.modules.get("torch")) is not None:
            from penstock.agents.torch_agent import deep_copy as copied

            shared = {id(part): part for part in _parts_of(policy) if issubclass(type(part), torch.nn.Parameter)}
        try:
            self._copies = [copied(policy, dict(shared)) for _ in range(n)]
        except Exception as error:  # copying may run the user's code
            raise ConfigError(
                f"{brief(policy)} cannot be copied, and each environment needs a copy: {in_one_line(error)}. Make what "
                "cannot be copied in its reset(), or give it a method __deepcopy__"
            ) from error

    @property
    def _function(self) -> Callable[..., Any]:
        return self._policy.select_action  # type: ignore[no-any-return]

    def _begin(self, column: int, task: str) -> None:
        super()._begin(column, task)
        self._copies[column].reset()

    def _call(self, columns: npt.NDArray[np.intp], observation: Any) -> Any:
        (column,) = columns.tolist()
        with _seeded_torch(int(self.rngs[column].integers(2**62))):
            return self._copies[column].select_action(observation, **self._listed([column]))


def _parameters_of(policy: Any) -> Sequence[str]:
    """The names of the parameters after the first, without those that a `partial` has set."""
    given = policy.keywords if isinstance(policy, partial) else ()
    torch = sys.modules.get("torch")
    called = policy.forward if torch is not None and isinstance(policy, torch.nn.Module) else policy
    return [name for name in list(signature(called).parameters)[1:] if name not in given]


def as_policies(policies: Any) -> dict[str, Any]:
    """The policies by name; one alone is called "policy". Raises `ConfigError` for what cannot act."""
    named = dict(policies) if isinstance(policies, Mapping) else {"policy": policies}
    for name, policy in named.items():
        if not isinstance(name, str):
            raise ConfigError(f"policies must have names that are texts, got {name!r}")
        _class_for(policy)
    if not named:
        raise ConfigError("policies has no policy: give one, or a dict of policies by name")
    return named


def _class_for(policy: Any) -> type[Player]:
    if isinstance(policy, Agent):
        if policy.joint:
            raise ConfigError(f"{policy} acts for several agents together: evaluate plays environments of one agent")
        return _AgentPlayer
    if isinstance(policy, type):
        raise ConfigError(f"a policy is an object, got the class {policy.__name__}: make one of it")
    if callable(getattr(policy, "select_action", None)) and callable(getattr(policy, "reset", None)):
        return _ObjectPlayer
    if callable(policy):
        return _FunctionPlayer
    hint = _HINT if callable(getattr(policy, "predict", None)) else ""
    raise ConfigError(
        "a policy is an Agent, a function of the observations, or an object with reset() and select_action(batch), got "
        f"{brief(policy)}{hint}"
    )


def snapshot(policy: Any, spaces: Spaces, seed: int, *, for_workers: bool) -> Any:
    """The policy to act with. An agent is copied with its present parameters, so that training may go on: for workers
    onto the CPU, else onto its own device."""
    if not isinstance(policy, Agent):
        return policy
    policy.runtime.ensure_initialized(*spaces, seed)
    return policy.runtime.worker_copy() if for_workers else policy.runtime.server_copy()


def make_player(policy: Any, spaces: Spaces, n: int, *, batched: bool) -> Player:
    """What acts with a policy, of which `snapshot` has been taken, for `n` columns."""
    return _class_for(policy)(policy, spaces, n, batched=batched)


def _as_array(value: Any, name: str) -> npt.NDArray[Any]:
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
            return np.asarray(value.float() if str(value.dtype) == "torch.bfloat16" else value)
        return np.asarray(value)
    except Exception as error:  # of other libraries, for what is no array
        text = f"a policy must return an array or a tensor as {name}: {in_one_line(error)}"
        raise SpaceError(f"{text}{f'. It returned a tuple{_HINT}' if isinstance(value, tuple) else ''}") from error


def _cast(array: npt.NDArray[Any], space: Any, name: str) -> npt.NDArray[Any]:
    """`array` in the dtype of `space`. Raises `SpaceError` where numbers would become others."""
    if not np.can_cast(array.dtype, space.dtype, "same_kind"):
        raise SpaceError(f"a policy must return {space.dtype} as {name} of {space}, got {array.dtype}")
    if space.dtype.kind in "iu" and array.dtype.kind in "iu" and not in_range(array, space.dtype):
        raise SpaceError(f"{name} has values from {array.min()} to {array.max()}, which {space} does not have")
    return array.astype(space.dtype)


# ---- batches of observations -------------------------------------------------------------------------


def take_rows(space: Space, batch: Any, rows: Sequence[int]) -> Any:
    """Some rows of a batch of observations. A part without a fixed shape, such as a text, is a list."""
    return map_tree(lambda _, part: part[rows] if _is_array(part) else [part[r] for r in rows], space, batch)


def one_row(space: Space, observation: Any) -> Any:
    """An observation as a batch of one."""
    return map_tree(
        lambda part, value: np.array(value, part.dtype)[None] if has_fixed_shape(part) else [value],  # a copy
        space,
        observation,
    )


def concatenated(space: Space, batches: Sequence[Any]) -> Any:
    """Several batches as one."""
    return map_tree(
        lambda _, *parts: _joined(parts) if _is_array(parts[0]) else [row for part in parts for row in part],
        space,
        *batches,
    )


def _joined(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _is_array(part: object) -> bool:
    return isinstance(part, np.ndarray)


# ---- torch, which need not be there -------------------------------------------------------------------


def _seeded_torch(seed: int) -> AbstractContextManager[Any]:
    """Inside, torch draws from `seed`, and keeps no gradients. Afterwards its generators are as before."""
    stack = ExitStack()
    if (torch := sys.modules.get("torch")) is not None:
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        stack.enter_context(torch.random.fork_rng(devices=list(devices)))
        stack.enter_context(torch.no_grad())
        torch.manual_seed(seed)
    return stack


def training_modes(policies: Mapping[str, Any]) -> Iterator[str]:
    """A warning for each policy with a torch module that acts differently in training mode, and is in it. Agents choose
    the mode themselves."""
    torch = sys.modules.get("torch")
    for name, policy in policies.items() if torch is not None else ():
        parts = [] if isinstance(policy, Agent) else _parts_of(policy)
        if (found := next((part for part in parts if _is_training(part, torch)), None)) is not None:
            yield (
                f"the policy {name!r} has a {type(found).__name__} in training mode, which acts differently there: "
                "call eval() of its module before you evaluate it"
            )


def _is_training(part: Any, torch: Any) -> bool:
    if not issubclass(type(part), torch.nn.Module) or not part.training:
        return False
    is_dropout = isinstance(part, torch.nn.modules.dropout._DropoutNd)
    rate = getattr(part, "p" if is_dropout else "dropout", 0)  # LSTM and attention have a rate too
    is_rate = isinstance(rate, int | float) and rate > 0
    keeps_statistics = isinstance(part, torch.nn.modules.batchnorm._NormBase) and part.track_running_stats
    return is_rate or keeps_statistics or isinstance(part, torch.nn.RReLU)


def _parts_of(policy: Any) -> Iterator[Any]:
    """The policy, and what it holds, however deep. Of a function, that is its closure, and the global variables that it
    uses. Classes and modules of Python are not its own."""
    seen, parts = set[int](), [policy]
    while parts:
        part = parts.pop()
        if id(part) in seen or issubclass(type(part), type | ModuleType):
            continue
        seen.add(id(part))
        if isinstance(part, FunctionType):
            named = (part.__globals__.get(name) for name in part.__code__.co_names)
            parts += (*(part.__closure__ or ()), *filter(gc.is_tracked, named))
            continue
        yield part
        parts += filter(gc.is_tracked, gc.get_referents(part))  # others hold nothing
