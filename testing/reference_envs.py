"""Environments of every kind as their documents have them, for the reference loop: who gets what in a step.

The key of a column is (env_rank, agent id), with None for the only agent of an environment. `reset` gets the
environments that begin an episode, each with the arguments of its own `reset`, and whether their last episodes have
ended. It returns the first observation of each column that acts first. `step` gets an action of each column that acts.
It returns what each of them gets, as from `gymnasium.Env.step`; the first observation of each column that joins; and by
environment the sum of all other rewards.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from penstock.buffers.named import NamedArrays

Key = tuple[int, Any]
Seen = dict[Key, Any]
Starts = Mapping[int, Mapping[str, Any]]
Steps = tuple[dict[Key, Any], Seen, dict[int, float]]

#: What a batched environment may raise for a form of seeds that it does not take.
_REFUSALS = TypeError, ValueError, AssertionError, gym.error.Error


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


def sizes_of(space: Any) -> list[int]:
    """How many actions each component of a discrete space has."""
    return [int(n) for n in np.ravel(space.nvec if isinstance(space, spaces.MultiDiscrete) else space.n)]


class Singles:
    """`gymnasium.Env`s. With `mask_name`, `info` has the mask of legal actions, which agents see."""

    def __init__(self, envs: Sequence[Any], mask_name: str) -> None:
        self.envs, self.mask_path = envs, mask_name.split(".") if mask_name else []
        #: The observation space and the action space of each column, environment by environment.
        self.spaces: dict[Key, tuple[Any, Any]] = {
            (e, agent): self._spaces(*arguments)
            for e, env in enumerate(envs)
            for agent, arguments in self._agents(env).items()
        }

    def _agents(self, env: Any) -> dict[Any, tuple[Any, Any]]:
        return {None: (env.observation_space, env.action_space)}

    def _spaces(self, observation: Any, action: Any) -> tuple[Any, Any]:
        if not self.mask_path:
            return observation, action
        parts = dict(observation) if isinstance(observation, spaces.Dict) else {"observation": observation}
        return spaces.Dict({**parts, "action_mask": spaces.MultiBinary(sum(sizes_of(action)))}), action

    def seen(self, key: Key, observation: Any, info: Any) -> Any:
        """What the agent sees of this observation. The last one of an episode may come without a mask."""
        if not self.mask_path or observation is None:
            return observation
        mask = info
        for name in self.mask_path:
            mask = mask.get(name) if isinstance(mask, Mapping) else None
        mask = np.zeros(sum(sizes_of(self.spaces[key][1]))) if mask is None else mask
        parts = observation if isinstance(observation, Mapping) else {"observation": observation}
        return {**parts, "action_mask": np.array(mask, np.int8)}

    def reset(self, starts: Starts, *, at_end: bool) -> Seen:
        return {(e, None): self.seen((e, None), *self.envs[e].reset(**how)) for e, how in starts.items()}

    def step(self, actions: Mapping[Key, Any]) -> Steps:
        steps = {}
        for key, action in actions.items():
            observation, *results, info = self.envs[key[0]].step(action)
            steps[key] = self.seen(key, observation, info), *results, info
        return steps, {}, {}


class Batched:
    """A `gymnasium.vector.VectorEnv`: each row is an environment."""

    def __init__(self, env: Any) -> None:
        self.env, self.envs, self.mode = env, [env], AutoresetMode(env.metadata["autoreset_mode"])
        self.resets_itself = self.mode is not AutoresetMode.DISABLED
        #: The rows whose episode has ended, and which have not begun another one.
        self.ended: set[int] = set()
        spaces = env.single_observation_space, env.single_action_space
        self.spaces: dict[Key, tuple[Any, Any]] = {(b, None): spaces for b in range(env.num_envs)}

    def _each(self, observations: Any) -> list[Any]:
        return copy.deepcopy(list(iterate(self.env.observation_space, observations)))

    def reset(self, starts: Starts, *, at_end: bool) -> Seen:
        """A row whose episode has ended, and that resets itself, has begun with this step, or begins with the next."""
        is_done = self.resets_itself and at_end and not any(starts.values())
        if is_done and self.mode is AutoresetMode.NEXT_STEP:
            return {}
        if not is_done:
            self._reset_rows(starts)
        self.ended -= starts.keys()
        return {(b, None): self.first[b] for b in starts}

    def _reset_rows(self, starts: Starts) -> None:
        """One call for the rows that begin with the same options. Without a mask it resets all rows."""
        n, left = self.env.num_envs, dict(starts)
        while left:
            options = next(iter(left.values())).get("options")
            rows = [b for b, how in left.items() if how.get("options") == options]
            seeds = [left.pop(b).get("seed") for b in rows]
            if len(rows) < n or self.mode is AutoresetMode.DISABLED:
                options = {**(options or {}), "reset_mask": np.isin(range(n), rows)}
            self.first = self._each(self._reset(dict(zip(rows, seeds, strict=True)), options))

    def _reset(self, seeds: Mapping[int, int | None], options: Any) -> Any:
        more = {} if options is None else {"options": options}
        if not any(seed is not None for seed in seeds.values()):
            return self.env.reset(**more)[0]
        row_seeds: Any = [seeds.get(b) for b in range(self.env.num_envs)]
        for form in (lambda: row_seeds, lambda: np.array(row_seeds) % 2**31):
            with suppress(*_REFUSALS):
                return self.env.reset(seed=form(), **more)[0]
        return self.env.reset(seed=row_seeds[0] % 2**31, **more)[0]  # it takes one for all

    def step(self, actions: Mapping[Key, Any]) -> Steps:
        if self.ended and self.mode is AutoresetMode.DISABLED:  # they wait, but are stepped with the others
            self.reset({b: {} for b in self.ended}, at_end=True)
        space, n = self.env.single_action_space, self.env.num_envs
        zero, memory = element_of(space, row_of(space)), cast(Any, create_empty_array(space, n))
        given: Any = concatenate(space, [actions.get((b, None), zero) for b in range(n)], memory)
        observations, rewards, terminated, truncated, infos = self.env.step(given)
        before, self.ended = self.ended, set(np.flatnonzero(np.logical_or(terminated, truncated)).tolist())
        self.first, steps = self._each(observations), {}
        for b, _ in actions:
            last, info = self.first[b], self._info_of(infos, b)
            if b in self.ended and self.mode is AutoresetMode.SAME_STEP:
                last, info = info["final_obs"], info["final_info"]
            steps[b, None] = last, rewards[b], bool(terminated[b]), bool(truncated[b]), info
        return steps, {(b, None): self.first[b] for b in before if self.mode is AutoresetMode.NEXT_STEP}, {}

    def actions_of(self, actions: Any) -> list[Any]:
        """The actions of the rows, from what `step` of the environment gets."""
        return list(iterate(self.env.action_space, actions))

    def _info_of(self, infos: Mapping[str, Any], b: int) -> dict[str, Any]:
        """The entries of row b: those whose mask `_name` is True there, or that have none."""
        entries = {
            k: v for k, v in infos.items() if not k.startswith("_") and (f"_{k}" not in infos or infos[f"_{k}"][b])
        }
        return {k: self._info_of(v, b) if isinstance(v, dict) else v[b] for k, v in entries.items()}


class Games(Singles):
    """PettingZoo's `ParallelEnv`s. Who was flagged has ended, even if the environment lists it still.

    For `AECEnv`s, `reset` returns nothing, and the caller makes their turns.
    """

    def __init__(self, envs: Sequence[Any], mask_name: str) -> None:
        super().__init__(envs, mask_name)
        self.ended: list[set[Any]] = [set() for _ in envs]  # who has ended, and is listed still

    def _agents(self, env: Any) -> dict[Any, tuple[Any, Any]]:
        return {agent: (env.observation_space(agent), env.action_space(agent)) for agent in env.possible_agents}

    def _living(self, e: int) -> list[Any]:
        return [agent for agent in self.envs[e].agents if agent not in self.ended[e]]

    def reset(self, starts: Starts, *, at_end: bool) -> Seen:
        seen = {}
        for e, how in starts.items():
            observations, infos = self.envs[e].reset(**how) or ({}, {})
            self.ended[e] = set()
            for agent in self._living(e) if observations else ():
                seen[e, agent] = self.seen((e, agent), observations[agent], infos.get(agent))
        return seen

    def step(self, actions: Mapping[Key, Any]) -> Steps:
        steps, joined, others = dict[Key, Any](), Seen(), dict[int, float]()
        for e in {e: None for e, _ in actions}:
            env, acted = self.envs[e], self._living(e)
            observations, rewards, terminated, truncated, infos = env.step({a: actions[e, a] for a in acted})
            flagged = {a for _, a in self.spaces if terminated.get(a) or truncated.get(a)}
            self.ended[e] = (self.ended[e] | flagged) & set(env.agents)
            for a in acted:
                outcome = rewards.get(a, 0.0), terminated.get(a, False), truncated.get(a, False), infos.get(a, {})
                steps[e, a] = self.seen((e, a), observations.get(a), outcome[-1]), *outcome
            new = [a for a in self._living(e) if a not in acted]
            joined |= {(e, a): self.seen((e, a), observations[a], infos.get(a)) for a in new}
            others[e] = sum(reward for a, reward in rewards.items() if a not in acted)
        return steps, joined, others
