"""`Agent.act`: actions outside a sampler, for one observation or a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.buffers.named import NamedArrays, as_named, fields_of, map_leaves
from penstock.errors import ConfigError, SpaceError

if TYPE_CHECKING:
    from penstock.agents.base import Agent, Space


@dataclass
class Actor:
    """A copy of the agent for `n` rows, and its last actions."""

    agent: Agent
    n: int
    prev_action: Any


def act(agent: Agent, observation: Any, greedy: bool, start: Any, prev_reward: Any) -> Any:
    """`Agent.act`."""
    is_batch = _is_batch(agent.observation_space, observation)
    rows = _rows(agent.observation_space, observation, is_batch, "observation")
    n = len(next(NamedArrays(rows=rows).leaves())[1])
    if agent.recurrent and start is None:
        raise ConfigError(
            f"{type(agent).__name__} has a state that changes from step to step: give start=True at the first step of "
            "an episode (or [B] bools), and start=False at the others"
        )
    actor = agent._actor
    if actor is None or actor.n != n:
        actor = agent._actor = _new_actor(agent, n)
    starts = np.broadcast_to(np.asarray(False if start is None else start, np.bool_), (n,))
    for column in np.flatnonzero(starts).tolist():
        actor.agent.reset_one(column)
    _zero(actor.prev_action, starts)
    rewards = np.broadcast_to(np.asarray(0 if prev_reward is None else prev_reward, np.float32), (n,)).copy()
    with agent._acting(actor.agent, greedy):
        action = as_named(actor.agent.step(rows, actor.prev_action, rewards).action)
    actor.prev_action[...] = action
    return _elements(agent.action_space, action, None if is_batch else 0)


def _new_actor(agent: Agent, n: int) -> Actor:
    rngs = [np.random.default_rng(sequence) for sequence in np.random.SeedSequence(0).spawn(n)]
    copied = agent.runtime.column_copy(rngs)
    copied.runtime.set_columns([0] * n, 1)
    return Actor(copied, n, _zeros(agent.action_space, n))


def _zero(rows: Any, columns: npt.NDArray[np.bool_]) -> None:
    map_leaves(lambda leaf: leaf.__setitem__(columns, 0), rows)


def _zeros(space: Space, n: int) -> Any:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return NamedArrays({name: _zeros(sub, n) for name, sub in _parts(space)})
    return np.zeros((n, *(space.shape or ())), space.dtype)


def _parts(space: spaces.Dict | Any) -> list[tuple[str, Space]]:
    if isinstance(space, spaces.Dict):
        return [(str(key), sub) for key, sub in space.items()]
    return [(f"_{i}", sub) for i, sub in enumerate(space)]


def _is_batch(space: Space, observation: Any) -> bool:
    """Whether the first array of `observation` has one dimension more than `space` says."""
    while isinstance(space, spaces.Dict | spaces.Tuple):
        name, sub = _parts(space)[0]
        observation, space = _part(observation, name, space), sub
    return bool(np.ndim(observation) > len(space.shape or ()))


def _part(value: Any, name: str, space: Space) -> Any:
    fields = fields_of(value)
    by_name = {str(key): part for key, part in fields.items()} if fields is not None else {}
    if name not in by_name:
        raise SpaceError(f"observation must be an element of {space}, or a batch of them: it has no entry {name!r}")
    return by_name[name]


def _rows(space: Space, value: Any, is_batch: bool, name: str) -> Any:
    """`value` as agents get it: arrays `[B, ...]` in the dtypes of the space."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return NamedArrays(
            {key: _rows(sub, _part(value, key, space), is_batch, f"{name}.{key}") for key, sub in _parts(space)}
        )
    shape = tuple(space.shape or ())
    array = np.asarray(value, space.dtype)
    array = array if is_batch else array[np.newaxis]
    if array.shape[1:] != shape:
        batch = str(("B", *shape)).replace("'", "")
        raise SpaceError(f"{name} must have the shape {shape}, or {batch}, got {np.shape(value)}")
    return array


def _elements(space: Space, rows: Any, row: int | None) -> Any:
    """The actions `[B, ...]` in the structure of the space; only that of `row` if it is given."""
    if isinstance(space, spaces.Dict):
        return {key: _elements(sub, rows[str(key)], row) for key, sub in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_elements(sub, rows[f"_{i}"], row) for i, sub in enumerate(space))
    actions = np.array(rows)
    if row is None:
        return actions
    return int(actions[row]) if isinstance(space, spaces.Discrete) else actions[row]
