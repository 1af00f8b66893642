"""Environments of several agents: each seat, one agent of one environment, is a sub-environment of its own.

The rows of a vector environment are the seats, environment by environment, in the order of `possible_agents`. Requests,
seeds and calls go to whole environments. A seat is *idle* while its agent has ended or has not joined yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import gymnasium as gym

from penstock.envs.factory import EnvFactory, build_example_env, close_example_env
from penstock.envs.seats import PLAYED_IN_TURNS, ParallelView, SeatTable, is_in_turns
from penstock.errors import ConfigError, SpaceError


class SharedSpaces(ParallelView):
    """A `ParallelEnv` whose agents all have the same spaces, as the rows of a vector environment must."""

    spec = None

    def __init__(self, env: Any) -> None:
        if is_in_turns(env):
            raise ConfigError(f"{type(env).__name__} {PLAYED_IN_TURNS}")
        super().__init__(env)

    @property
    def observation_space(self) -> gym.Space[Any]:
        """The observation space of each agent. Raises `SpaceError` if two differ."""
        return self._common(0, "observation")

    @property
    def action_space(self) -> gym.Space[Any]:
        """The action space of each agent. Raises `SpaceError` if two differ."""
        return self._common(1, "action")

    @property
    def render_mode(self) -> Any:
        """The render mode of the environment, if it says one."""
        return self.get_wrapper_attr("render_mode") if self.has_wrapper_attr("render_mode") else None

    def _common(self, which: int, name: str) -> gym.Space[Any]:
        (first, spaces), *others = self.spaces.items()
        for agent, own in others:
            if own[which] != spaces[which]:
                raise SpaceError(
                    f"the {name}_space of agent {agent!r} is {own[which]}, that of agent {first!r} is {spaces[which]}: "
                    f"in a vector environment all agents must have the same; pad them, for example with SuperSuit's "
                    f"pad_{name}{'s' if name == 'observation' else '_space'}_v0"
                )
        return spaces[which]


def refuse_seats(env: object) -> NoReturn:
    """In the place of `SharedSpaces`, where all environments must have one agent."""
    raise ConfigError(
        f"{type(env).__name__} has several agents, but env_fns[0] returns an environment of one agent, or `spaces` is "
        "given: let all functions return a ParallelEnv, and leave `spaces` out"
    )


def read_seats(factories: Sequence[EnvFactory], first: SharedSpaces) -> SeatTable:
    """Builds an example environment for each different factory. `first` is that of the first."""
    found = {id(factories[0]): first.possible_agents}
    for i, factory in enumerate(factories):
        if id(factory) not in found:
            env = build_example_env(factory)
            close_example_env(env)
            if not isinstance(env, SharedSpaces):
                raise ConfigError(
                    f"env_fns[{i}] returns {type(env).__name__}, an environment of one agent, but env_fns[0] one of "
                    "several: let all functions return a ParallelEnv"
                )
            found[id(factory)] = env.possible_agents
    agents = [found[id(factory)] for factory in factories]
    return SeatTable(agents, [[0] * len(own) for own in agents])
