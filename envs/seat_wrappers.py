"""Wrappers for environments of several agents: agents that act at different times, and agents that come with new ids.

They are used as PettingZoo's environments are, and PettingZoo need not be installed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import gymnasium as gym

from penstock.arguments import integer, must_be
from penstock.buffers.reports import in_one_line
from penstock.envs.checks import reset_with
from penstock.envs.seats import AgentId, are_by_agent, has_vanished, is_in_turns, is_parallel, is_set
from penstock.errors import ConfigError, SpaceError, brief

Spaces = tuple[gym.Space[Any], gym.Space[Any]]


class _Wrapper:
    """Other names are those of the environment."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        if name == "env" or name.startswith("_"):  # while it is copied or unpickled, it has no `env` yet
            raise AttributeError(name)
        return getattr(self.env, name)


_MOST_STEPS = 100_000  # in which nobody is asked


class OwnClocks(_Wrapper):
    """A `ParallelEnv` whose observations say who acts next, as an `AECEnv`: each agent decides at its own times.

    An agent is asked for an action when `env.reset` or `env.step` returns an observation for it. When all who are asked
    have acted, `env.step` gets their actions. It gets an empty dict while nobody is asked. So a decision may take many
    steps: the agent gets the rewards of all of them, and `info["steps"]` says how many steps the decision took.

    Who is flagged in `terminations` or `truncations` has ended. `close`, `state` and all else are those of `env`.
    Raises `ConfigError` if `env` is no `ParallelEnv`, and `SpaceError` if an agent disappears without a flag, or has an
    id that is not in `possible_agents`. The same if nobody is asked in 100,000 steps.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        if not is_parallel(env):
            raise ConfigError(f"OwnClocks is for a ParallelEnv of PettingZoo, got {type(env).__name__}")
        self.possible_agents: list[AgentId] = list(getattr(env, "possible_agents", ()))

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Begin a new game, and play until somebody is asked."""
        result = reset_with(self.env, seed, options)
        if not are_by_agent(result, 2):
            raise SpaceError(f"env.reset must return a tuple of two dicts by agent, got {brief(result)}")
        self._t = 0
        self._began: dict[AgentId, int] = {}  # the step in which the last decision of each agent began
        self._rewards, self._actions = dict[AgentId, float](), dict[AgentId, Any]()
        self._living, self._ended = list[AgentId](), dict[AgentId, None]()
        self._ghosts = set[AgentId]()  # who has ended, but is in `env.agents` still
        self._late = list[float]()
        observations, infos = result
        self._note(observations, {}, {}, {}, infos)
        self._run()

    def _run(self) -> None:
        """Step until somebody is asked or has ended, or nobody is left."""
        began = self._t
        while self._living and not self._asked:
            if self._t - began == _MOST_STEPS:
                raise SpaceError(
                    f"nobody was asked in {_MOST_STEPS:,} steps, but {brief(self._living)} are there: env.step must "
                    "return an observation for who acts next, or flag who has ended"
                )
            given, self._actions = self._actions, {}
            result = self.env.step(given)
            if not are_by_agent(result, 5):
                raise SpaceError(f"env.step must return five dicts by agent, got {brief(result)}")
            self._t += 1
            self._note(*result)

    def _note(self, observations: Any, rewards: Any, terminated: Any, truncated: Any, infos: Any) -> None:
        """The environment has returned this: find who gets rewards, who has ended, and who is asked."""
        listed, before = dict.fromkeys(self.env.agents), self._living
        for agent in (*listed, *observations, *rewards, *terminated, *truncated):
            if agent not in self.possible_agents and agent != "__all__":
                raise SpaceError(f"agent {agent!r} is not one of possible_agents, {brief(self.possible_agents)}")
        self._observations, self._infos, self._flags = dict(observations), infos, (dict(terminated), dict(truncated))
        self._ghosts &= listed.keys()
        self._living = []
        for agent in dict.fromkeys((*before, *listed)):
            if agent in self._ghosts:
                continue
            if is_set(terminated.get(agent)) or is_set(truncated.get(agent)):
                self._ended[agent] = None
                self._ghosts |= {agent} & listed.keys()
            elif agent in listed:
                self._living.append(agent)
            else:
                raise has_vanished(f"agent {agent!r}")
        for agent, reward in rewards.items():
            if agent not in before and agent not in self._living:
                self._late += [reward] if reward else []
                continue
            try:
                self._rewards[agent] = self._rewards.get(agent, 0.0) + reward
            except TypeError:
                raise SpaceError(
                    f"the reward of agent {agent!r} must be a single number, got {brief(reward)}"
                ) from None
        self._asked = deque([*self._ended, *(agent for agent in self._living if agent in observations)])

    def take_late_rewards(self) -> list[float]:
        """The rewards for agents that were not in the game, since the last call."""
        late, self._late = self._late, []
        return late

    @property
    def agents(self) -> list[AgentId]:
        """Who is in the game, and who has ended and was not reported yet."""
        return [*self._ended, *self._living]

    @property
    def agent_selection(self) -> AgentId:
        """Who is asked, or has ended."""
        return self._asked[0]

    def agent_iter(self, max_iter: int = 2**63) -> Iterator[AgentId]:
        """Each agent that is asked or has ended, until nobody is left."""
        while self.agents and max_iter > 0:
            max_iter -= 1
            yield self.agent_selection

    def last(self, observe: bool = True) -> tuple[Any, float, Any, Any, dict[str, Any]]:
        """Of the agent that is asked: observation, all rewards since its last decision, flags, and info."""
        agent = self.agent_selection
        terminated, truncated = (flags.get(agent, False) for flags in self._flags)
        info = {**self._infos.get(agent, {}), "steps": self._t - self._began.get(agent, self._t)}
        observation = self._observations.get(agent) if observe else None
        return observation, self._rewards.get(agent, 0.0), terminated, truncated, info

    def step(self, action: Any) -> None:
        """The decision of the agent that is asked; None for one that has ended."""
        agent = self._asked.popleft()
        self._rewards.pop(agent, None)
        if agent in self._ended:
            del self._ended[agent]
            self._began.pop(agent, None)
        else:
            self._actions[agent], self._began[agent] = action, self._t
        self._run()


def _checked(spaces: Any) -> dict[str, Spaces]:
    wanted = "(observation_space, action_space)"
    must_be("spaces of Seats", spaces, isinstance(spaces, Mapping), f"a dict {{kind: {wanted}}}")
    for name, pair in spaces.items():
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        fits = is_pair and all(isinstance(space, gym.Space) for space in pair)
        must_be(f"spaces[{name!r}] of Seats", pair, fits, wanted)
    return dict(spaces)


class Seats(_Wrapper):
    """An environment whose agents come with new ids all the time, for samplers, which need a fixed list of agents.

    A *seat* is `"kind:0"`, `"kind:1"`, ... An agent takes the first free seat of its kind when it appears, and leaves
    it when it has ended. The seats are the `possible_agents`. `agent_of(seat)` is the id of the agent that sits there.

    Args:
        env: a `ParallelEnv` or an `AECEnv` of PettingZoo; it needs no `possible_agents`.
        seats: how many agents of each kind may be there at the same time. In a `ParallelEnv`, those that end in a step
            count too, together with those that appear in it.
        kind: `kind(agent_id)` returns the kind of an agent.
        spaces: the observation space and the action space of each kind. By default, the environment is reset once, and
            the first agent of each kind shows them.

    Raises `ConfigError` for wrong arguments, and if `kind` raises. Raises `SpaceError` for an unknown kind, for more
    agents of a kind than it has seats, and for an agent whose spaces are not those of its kind.
    """

    def __init__(
        self,
        env: Any,
        seats: Mapping[str, int],
        *,
        kind: Callable[[Any], str],
        spaces: Mapping[str, Spaces] | None = None,
    ) -> None:
        super().__init__(env)
        if not (is_parallel(env) or is_in_turns(env)):
            raise ConfigError(f"Seats is for environments of several agents (PettingZoo), got {type(env).__name__}")
        if not isinstance(seats, Mapping) or not seats or not callable(kind):
            raise ConfigError(
                f"Seats needs a dict with the number of seats of each kind, and a function of an agent's id, got "
                f"{brief(seats)} and kind={brief(kind)}"
            )
        for name, n in seats.items():
            must_be("the kinds of Seats", name, isinstance(name, str), "texts")
            integer(f"the number of seats of kind {name!r}", n, 1)
        self.possible_agents = [f"{name}:{i}" for name, n in seats.items() for i in range(n)]
        self.agents: list[AgentId] = []
        self._kind, self._n, self._in_turns = kind, dict(seats), is_in_turns(env)
        self._seat_of: dict[Hashable, str] = {}
        self._ended = set[Hashable]()  # who has ended, but is in `env.agents` still
        if self._in_turns:  # a ParallelEnv must not have it
            self.agent_iter = self._iterate
        self._spaces = self._find_spaces() if spaces is None else _checked(spaces)
        if missing := [name for name in seats if name not in self._spaces]:
            raise ConfigError(
                f"no agent of kind {missing[0]!r} is there after env.reset, so its spaces are not known: give "
                f"spaces={{{missing[0]!r}: (observation_space, action_space), ...}}"
            )

    def _find_spaces(self) -> dict[str, Spaces]:
        self.env.reset()
        spaces = dict[str, Spaces]()
        for agent in self.env.agents:
            spaces.setdefault(self._kind_of(agent), self._spaces_of(agent))
        return spaces

    def _spaces_of(self, agent: Any) -> Spaces:
        return self.env.observation_space(agent), self.env.action_space(agent)

    def observation_space(self, agent: str) -> gym.Space[Any]:
        """The observation space of a seat."""
        return self._spaces[agent.rpartition(":")[0]][0]

    def action_space(self, agent: str) -> gym.Space[Any]:
        """The action space of a seat."""
        return self._spaces[agent.rpartition(":")[0]][1]

    def agent_of(self, seat: str) -> Any:
        """The id of the agent in this seat; None if it is free."""
        return next((agent for agent, other in self._seat_of.items() if other == seat), None)

    # ---- who sits where --------------------------------------------------------------------

    def _kind_of(self, agent: Any) -> str:
        try:
            name = self._kind(agent)
        except Exception as error:
            raise ConfigError(f"kind raised {in_one_line(error)} for agent {agent!r}") from error
        if not isinstance(name, str) or name not in self._n:
            raise SpaceError(f"agent {agent!r} is of kind {name!r}, and only these kinds have seats: {list(self._n)}")
        return name

    def _sit(self, agent: Any) -> None:
        """The agent appears, and takes a seat."""
        name = self._kind_of(agent)
        if self._spaces_of(agent) != self._spaces[name]:
            raise SpaceError(
                f"agent {agent!r} of kind {name!r} has the spaces {self._spaces_of(agent)}, and this kind has "
                f"{self._spaces[name]}: the agents of a kind must have the same spaces"
            )
        seat = self._free_seat(f"{name}:{i}" for i in range(self._n[name]))
        if seat is None:
            raise SpaceError(
                f"{self._n[name] + 1} agents of kind {name!r} are there, with agent {agent!r}, and it has "
                f"{self._n[name]} seats: give it more, Seats(env, {{{name!r}: ...}})"
            )
        self._seat_of[agent] = seat

    def _free_seat(self, seats: Iterable[str]) -> str | None:
        """The first of these seats in which nobody sits; None if there is none."""
        taken = set(self._seat_of.values())
        return next((seat for seat in seats if seat not in taken), None)

    def _leave(self, may_leave: Callable[[Any], bool]) -> None:
        """Who is not in `env.agents` any more leaves the seat."""
        listed = set(self.env.agents)
        for agent in [agent for agent in self._seat_of if agent not in listed]:
            if not may_leave(agent):
                raise has_vanished(f"agent {agent!r}")
            del self._seat_of[agent]

    def _join(self) -> None:
        """Who has appeared in `env.agents` takes a seat."""
        for agent in self.env.agents:
            if agent not in self._seat_of:
                self._sit(agent)
        self.agents = [self._seat_of[agent] for agent in self.env.agents]

    # ---- the environment -------------------------------------------------------------------

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """As the environment, with seats in the place of agents."""
        self._seat_of, self._ended = {}, set()
        result = reset_with(self.env, seed, options)
        self._join()
        return tuple(map(self._by_seat, result)) if are_by_agent(result, 2) else result

    def step(self, actions: Any) -> Any:
        """As the environment: `actions` are by seat in a `ParallelEnv`, and one action in an `AECEnv`."""
        if self._in_turns:
            selected = self.env.agent_selection
            self.env.step(actions)
            self._leave(lambda agent: agent == selected and actions is None)
            self._join()
            return None
        result = self.env.step({agent: actions[seat] for agent, seat in self._seat_of.items() if seat in actions})
        if not are_by_agent(result, 5):
            return result  # which the caller refuses
        self._join()  # first: the seats of those who end in this step are not free yet
        _, rewards, terminated, truncated, _ = result
        translated = tuple(map(self._by_seat, result))
        for agent in rewards.keys() - self._seat_of.keys():
            if rewards[agent]:  # the agent is not there now: in an empty seat, this is a late reward
                if (seat := self._free_seat(self.possible_agents)) is None:
                    raise SpaceError(
                        f"agent {agent!r}, which is not there, gets a reward, and no seat is empty: give more seats"
                    )
                translated[1][seat] = translated[1].get(seat, 0.0) + rewards[agent]
        self._ended |= {
            agent for agent in self._seat_of if is_set(terminated.get(agent)) or is_set(truncated.get(agent))
        }
        self._leave(self._ended.__contains__)
        self._ended &= self._seat_of.keys()
        return translated

    def _by_seat(self, values: Mapping[Any, Any]) -> dict[str, Any]:
        return {self._seat_of[agent]: value for agent, value in values.items() if agent in self._seat_of}

    @property
    def agent_selection(self) -> Any:
        """The seat of the agent that acts."""
        agent = self.env.agent_selection
        return self._seat_of.get(agent, agent)

    def _iterate(self, max_iter: int = 2**63) -> Iterator[Any]:
        return (self._seat_of.get(agent, agent) for agent in self.env.agent_iter(max_iter))
