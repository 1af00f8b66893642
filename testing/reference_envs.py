"""Environments of every kind as their documents have them, for the reference loop: who gets what in a step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from penstock.buffers.named import NamedArrays

ByAgent = dict[Any, Any]


def _parts(space: Any) -> dict[str, Any]:
    """The keys of a Dict or Tuple space, by their names in a batch."""
    is_dict = isinstance(space, spaces.Dict)
    return {str(key): key for key in space} if is_dict else {f"_{i}": i for i in range(len(space))}


def row_of(space: Any, element: Any = None) -> Any:
    """What a batch has of an element of `space`; zeros for None. A copy."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = _parts(space).items()
        return NamedArrays({name: row_of(space[k], None if element is None else element[k]) for name, k in parts})
    return np.zeros(space.shape, space.dtype) if element is None else np.asarray(element).astype(space.dtype)


def element_of(space: Any, row: Any) -> Any:
    """What an environment gets for a row of a batch. A copy."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = {key: element_of(space[key], row[name]) for name, key in _parts(space).items()}
        return parts if isinstance(space, spaces.Dict) else tuple(parts.values())
    return int(row) if isinstance(space, spaces.Discrete) else np.array(row)


def stack(rows: Sequence[Any]) -> Any:
    """Rows of the same structure along a new first dimension. A copy."""
    if isinstance(rows[0], NamedArrays):
        return NamedArrays({name: stack([row[name] for row in rows]) for name, _ in rows[0].items()})
    return np.stack(rows)


class Single:
    """A `gymnasium.Env`, or several of one kind seen as one. `seats` are the agents, each with its two spaces."""

    def __init__(self, env: Any) -> None:
        self.env, self.seats = env, {None: (env.observation_space, env.action_space)}

    def reset(self, seed: int | None, options: Any = None) -> ByAgent:
        """The first observation of each agent that acts first."""
        return {None: self.env.reset(seed=seed, options=options)[0]}

    def step(self, actions: ByAgent) -> tuple[ByAgent, ByAgent, float]:
        """What each agent gets that has acted: observation, reward, terminated, truncated, info; the first observation
        of each that joins; and the sum of all other rewards. `actions` has one for each seat."""
        return {None: self.env.step(actions[None])}, {}, 0.0


class Batched:
    """A `gymnasium.vector.VectorEnv`. Its agents are its rows. They come back without `reset`. In the mode DISABLED,
    `start_of(b)` may say how row b begins again: seed and options."""

    start_of: Callable[[int], tuple[Any, Any]] | None = None

    def __init__(self, env: Any) -> None:
        self.env, self.mode, self.resetting = env, AutoresetMode(env.metadata["autoreset_mode"]), set[int]()
        self.seats = dict.fromkeys(range(env.num_envs), (env.single_observation_space, env.single_action_space))

    def _each(self, observations: Any) -> list[Any]:
        return copy.deepcopy(list(iterate(self.env.observation_space, observations)))

    def reset(self, *seeds: int | None) -> ByAgent:
        """As `Single.reset`, with a seed for each row."""
        self.resetting = set()
        return dict(enumerate(self._each(self.env.reset(seed=list(seeds))[0])))

    def step(self, actions: ByAgent) -> tuple[ByAgent, ByAgent, float]:
        """As `Single.step`. A row whose step was only a reset has not acted."""
        rows: Any = create_empty_array(self.env.single_action_space, len(actions))
        given = concatenate(self.env.single_action_space, list(actions.values()), rows)
        observations, rewards, terminated, truncated, infos = self.env.step(given)
        over = np.logical_or(terminated, truncated)
        first = last = self._each(observations)
        if self.mode is AutoresetMode.DISABLED and over.any():
            first = self._each(self._reset(over))
        steps, joined = {}, {b: first[b] for b in self.resetting}
        for b in self.seats.keys() - self.resetting:
            info, final = self._info_of(infos, b), last[b]
            if over[b] and self.mode is AutoresetMode.SAME_STEP:
                final, info = info["final_obs"], info["final_info"]
            steps[b] = final, rewards[b], bool(terminated[b]), bool(truncated[b]), info
        ended = {b for b in steps if over[b]}
        self.resetting = ended if self.mode is AutoresetMode.NEXT_STEP else set()
        return steps, joined | {b: first[b] for b in ended - self.resetting}, 0.0

    def _reset(self, over: Any) -> Any:
        if self.start_of is None:
            return self.env.reset(options={"reset_mask": over})[0]
        for b in np.flatnonzero(over).tolist():
            (seed, options), mask = self.start_of(b), np.arange(len(over)) == b
            seeds = [seed if row else None for row in mask]
            observations, _ = self.env.reset(seed=seeds, options={**(options or {}), "reset_mask": mask})
        return observations

    def _info_of(self, infos: Mapping[str, Any], b: int) -> dict[str, Any]:
        """The entries of row b: those whose mask `_name` is True there, or that have none."""
        own = {k: v for k, v in infos.items() if not k.startswith("_") and (f"_{k}" not in infos or infos[f"_{k}"][b])}
        return {k: self._info_of(v, b) if isinstance(v, dict) else v[b] for k, v in own.items()}


class Several:
    """A PettingZoo `ParallelEnv`. Who was flagged has ended, even if the environment lists it still.

    For an `AECEnv`, `reset` returns nothing, and the caller makes its turns.
    """

    def __init__(self, env: Any) -> None:
        self.env, self.ended = env, set[Any]()  # who has ended, and is listed still
        self.seats = {agent: (env.observation_space(agent), env.action_space(agent)) for agent in env.possible_agents}

    def _living(self) -> list[Any]:
        return [agent for agent in self.env.agents if agent not in self.ended]

    def reset(self, seed: int | None, options: Any = None) -> ByAgent:
        """As `Single.reset`."""
        observations, _ = self.env.reset(seed=seed, options=options) or ({}, {})
        self.ended = set()
        return {agent: observations[agent] for agent in self._living() if observations}

    def step(self, actions: ByAgent) -> tuple[ByAgent, ByAgent, float]:
        """As `Single.step`."""
        acted = self._living()
        results = self.env.step({agent: actions[agent] for agent in acted})
        observations, rewards, terminated, truncated, _ = results
        flagged = {agent for agent in self.seats if terminated.get(agent) or truncated.get(agent)}
        self.ended = (self.ended | flagged) & set(self.env.agents)
        missing = None, 0.0, False, False, dict[str, Any]()
        steps = {agent: [by.get(agent, no) for by, no in zip(results, missing, strict=True)] for agent in acted}
        joined = {agent: observations[agent] for agent in self._living() if agent not in acted}
        return steps, joined, sum(reward for agent, reward in rewards.items() if agent not in acted)
