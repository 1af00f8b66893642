"""Environments of several agents: how they are recognized, and how a sampler sees them.

A *seat* is one agent of one environment: (env_rank, agent id). The environments are PettingZoo's `ParallelEnv`s, in
which all agents act at the same time, and its `AECEnv`s, in which they take turns. They are recognized by what they
have, so PettingZoo need not be installed.
"""

from __future__ import annotations

import copy
import importlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from penstock.arguments import must_be
from penstock.envs.checks import reset_with
from penstock.envs.wrappers import MaskInObservation
from penstock.errors import ConfigError, SpaceError, brief

GLOBAL_STATE = "global_state"  # the name of the state of the whole environment in an observation

#: The end of an error where only a `ParallelEnv` is possible.
PLAYED_IN_TURNS = (
    "is played in turns (PettingZoo's AECEnv). Samplers take such environments. Here all agents must act at the same "
    "time: give a ParallelEnv"
)

AgentId = Hashable  # usually a text; integers are fine
Result = tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any], dict[Any, Any], dict[Any, Any]]


class SeatRank(int):
    """The env_rank of a seat. As text it names the agent too: `7, agent 'adversary_2'`."""

    agent_id: AgentId

    def __new__(cls, env_rank: int, agent_id: AgentId) -> SeatRank:
        new = super().__new__(cls, env_rank)
        new.agent_id = agent_id
        return new

    def __reduce__(self) -> tuple[Any, ...]:  # for copies and pickles
        return SeatRank, (int(self), self.agent_id)

    def __str__(self) -> str:
        return f"{int(self)}, agent {self.agent_id!r}"

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return str(self)


@dataclass(frozen=True)
class SeatTable:
    """Which agents some environments have, and which policy plays each. Each policy has a column for each of its seats,
    environment by environment, in the order of `possible_agents`."""

    agents: Sequence[Sequence[AgentId]]  #: by environment
    policy: Sequence[Sequence[int]]  #: the index of the policy of each of them
    first_env_rank: int = 0
    #: Where the policy of a seat is chosen for each game: how many policies there are. Each has a column for each seat.
    n_policies: int = 0
    #: The largest number of agents in an environment. A shard counts the environments of all shards, so that a seat has
    #: the same number in each.
    most: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "most", max(self.most, *map(len, self.agents), 0))

    def part(self, envs: range) -> SeatTable:
        """The table of these environments alone. Each seat keeps its number."""
        chosen, first = slice(envs.start, envs.stop), self.first_env_rank + envs.start
        return replace(self, agents=self.agents[chosen], policy=self.policy[chosen], first_env_rank=first)

    @cached_property
    def _by_policy(self) -> dict[int, list[tuple[int, int, AgentId]]]:
        seats = defaultdict[int, list[tuple[int, int, AgentId]]](list)
        if self.n_policies:
            for p in range(self.n_policies):
                for b, agents in enumerate(self.agents):
                    seats[p] += [(b, p * self.most + seat, agent) for seat, agent in enumerate(agents)]
            return seats
        for b, row in enumerate(zip(self.agents, self.policy, strict=True)):
            for seat, (agent, p) in enumerate(zip(*row, strict=True)):
                seats[p].append((b, seat, agent))
        return seats

    def cells(self, p: int, envs: range) -> range:
        """The columns of policy p that these environments have."""
        seats = self._by_policy.get(p, [])
        return range(bisect_left(seats, (envs.start,)), bisect_left(seats, (envs.stop,)))

    def seats(self, p: int, envs: range) -> list[tuple[int, int, AgentId]]:
        """The same columns: the index of each one's environment, that of its seat there, and its agent. With
        `n_policies`, each policy has seats of its own."""
        cells = self.cells(p, envs)
        return self._by_policy[p][cells.start : cells.stop] if cells else []

    def places(self, b: int) -> list[tuple[int, int]]:
        """The policy and the column of each seat of environment b. Each seat has one policy."""
        columns = {p: iter(self.cells(p, range(b, b + 1))) for p in self.policy[b]}
        return [(p, next(columns[p])) for p in self.policy[b]]

    def ranks(self, p: int, envs: range) -> list[SeatRank]:
        """The same columns: env_rank and agent of each."""
        return [SeatRank(self.first_env_rank + b, agent) for b, _, agent in self.seats(p, envs)]

    @classmethod
    def of_single(cls, n_envs: int, first_env_rank: int) -> SeatTable:
        """The table of `n_envs` environments of one agent, which has no id. One policy plays all of them."""
        return cls([(None,)] * n_envs, [(0,)] * n_envs, first_env_rank)


def is_parallel(env: object) -> bool:
    """Whether `env` is a PettingZoo `ParallelEnv`, or is like one."""
    return _has_agents(env) and not hasattr(env, "agent_iter")


def is_in_turns(env: object) -> bool:
    """Whether `env` is a PettingZoo `AECEnv`, or is like one."""
    return _has_agents(env) and hasattr(env, "agent_iter") and hasattr(env, "last")


def _has_agents(env: object) -> bool:
    spaces_are_calls = all(callable(getattr(env, f"{kind}_space", None)) for kind in ("observation", "action"))
    return spaces_are_calls and hasattr(env, "step") and not isinstance(env, gym.Env)


def are_by_agent(result: object, n: int) -> bool:
    """Whether `result` is a tuple of `n` dicts by agent, as `reset` and `step` must return it."""
    return isinstance(result, tuple) and len(result) == n and all(isinstance(part, Mapping) for part in result)


def registered(env_id: str) -> Callable[..., Any] | None:
    """What builds the environment with this id in PettingZoo's registry, a `ParallelEnv` if there is one, else an
    `AECEnv`; None if the registry has none."""
    try:
        pettingzoo: Any = importlib.import_module("pettingzoo")
        unknown = importlib.import_module("pettingzoo.env_registry.exceptions").PettingZooRegistryError
    except ImportError:  # not installed, or older than 1.27
        return None
    for kind in ("parallel", "aec"):
        try:
            # With the spec, not the id: the workers do not know environments that the user's script registers.
            return partial(pettingzoo.make, kind, pettingzoo.spec(kind, env_id))
        except unknown:
            pass
    return None


class ParallelView:
    """A `ParallelEnv` as samplers use it: with its agents and their spaces, and with what the agents' observations get
    beside their own: a mask from `info`, the state of the whole environment.

    Args:
        env: the environment.
        mask_key: the name of the mask in `info[agent]`, which becomes `action_mask` of the observation; None for none.
        global_state: whether each observation gets `env.state()`, as `global_state`.

    `possible_agents` are the ids, `spaces` the observation space and the action space of each.

    Raises `ConfigError` for an environment without `possible_agents`, or without `state_space` if that is needed.
    """

    def __init__(self, env: Any, *, mask_key: str | None = None, global_state: bool = False) -> None:
        self.env = env
        self.metadata = getattr(env, "metadata", {})
        self.possible_agents: list[AgentId] = list(getattr(env, "possible_agents", ()))
        ids = set(self.possible_agents)
        if not ids or len(ids) < len(self.possible_agents) or None in ids:  # None stands for the whole game
            raise ConfigError(
                f"possible_agents of {type(env).__name__} must name each agent once, and none of them None, since each "
                f"gets columns of the batch, got {brief(self.possible_agents)}: give the environment a fixed list of "
                "possible_agents"
            )
        self._state_space = self._find_state_space() if global_state else None
        self._masks = {}
        self.spaces: dict[AgentId, tuple[gym.Space[Any], gym.Space[Any]]] = {}
        for agent in self.possible_agents:
            observation, action = env.observation_space(agent), env.action_space(agent)
            for name, space in (("observation", observation), ("action", action)):
                where = f"the {name}_space of agent {agent!r}"
                must_be(where, space, isinstance(space, gym.Space), "a gymnasium space")
            if mask_key is not None:
                stub: Any = gym.Env()
                stub.observation_space, stub.action_space = observation, action
                self._masks[agent] = MaskInObservation(stub, mask_key)
                observation = self._masks[agent].observation_space
            self.spaces[agent] = self._with_state_space(observation), action
        self._is_plain = not (global_state or self._masks)
        #: `env.step`, with what observations get.
        self.step: Callable[[dict[Any, Any]], Result] = env.step if self._is_plain else self._step

    def _find_state_space(self) -> gym.Space[Any]:
        space = getattr(self.env, "state_space", None)
        if not isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Discrete):
            raise ConfigError(
                f"global_state=True needs an environment with state() and a state_space of fixed shape; that of "
                f"{type(self.env).__name__} is {brief(space)}: define both, or leave global_state out"
            )
        return space

    def _with_state_space(self, observation: gym.Space[Any]) -> gym.Space[Any]:
        if self._state_space is None:
            return observation
        parts = dict(observation.items()) if isinstance(observation, spaces.Dict) else {"observation": observation}
        if GLOBAL_STATE in parts:
            raise ConfigError(f"the observation has an entry {GLOBAL_STATE!r} already: leave global_state=True out")
        return spaces.Dict({**parts, GLOBAL_STATE: self._state_space})

    @property
    def agents(self) -> list[AgentId]:
        """The ids of the agents that act next."""
        agents: list[AgentId] = self.env.agents
        return agents

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """As `env.reset`, with what observations get."""
        result = reset_with(self.env, seed, options)
        if self._is_plain or not are_by_agent(result, 2):
            return result  # if it is wrong, the caller refuses it
        observations, infos = result
        return self._completed(observations, infos, None), infos

    def _step(self, actions: dict[Any, Any]) -> Result:
        result: Result = self.env.step(actions)
        if not are_by_agent(result, 5):
            return result  # which the caller refuses
        observations, rewards, terminated, truncated, infos = result
        last = {agent for agent in observations if is_set(terminated.get(agent)) or is_set(truncated.get(agent))}
        return self._completed(observations, infos, last), rewards, terminated, truncated, infos

    def _completed(self, observations: Mapping[Any, Any], infos: Any, last: Collection[Any] | None) -> dict[Any, Any]:
        """The observations with what they get. `last`: the agents that have ended, whose info may have no mask; None
        after a reset."""
        completed = dict(observations)
        for agent, mask in self._masks.items():
            if agent in observations:
                info, is_last = infos.get(agent, {}), agent in (last or ())
                try:
                    completed[agent] = mask.joined(observations[agent], info, is_first=last is None, is_last=is_last)
                except SpaceError as error:
                    raise SpaceError(f"agent {agent!r}: {error}") from None
        if self._state_space is not None:
            state = np.array(self.env.state())  # a copy: the environment may use the array again
            for agent, seen in completed.items():
                parts = seen if isinstance(seen, dict) else {"observation": seen}
                completed[agent] = {**parts, GLOBAL_STATE: state}
        return completed

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def around(self, env: Any) -> ParallelView:
        """The same view of `env`, which is a copy of this environment."""
        view = copy.copy(self)
        view.env = env
        view.step = env.step if self._is_plain else view._step
        return view

    # ---- calls, as gymnasium.Env has them --------------------------------------------------

    @property
    def unwrapped(self) -> Any:
        """The innermost environment."""
        return getattr(self.env, "unwrapped", self.env)

    def has_wrapper_attr(self, name: str) -> bool:
        """Whether the environment or one of its wrappers has this attribute."""
        return hasattr(self._with_attr(name), name)

    def get_wrapper_attr(self, name: str) -> Any:
        """The attribute `name` of the environment or of one of its wrappers."""
        return getattr(self._with_attr(name), name)

    def set_wrapper_attr(self, name: str, value: object) -> None:
        """Set the attribute where it is: in the first wrapper that has it itself, else in the innermost environment."""
        env = self._with_attr(name)
        while name not in vars(env) and getattr(env, "env", None) is not None:
            env = env.env
        setattr(env, name, value)

    def _with_attr(self, name: str) -> Any:
        """PettingZoo's wrapper around an environment that is played in turns does not pass attributes on."""
        return self.env if hasattr(self.env, name) or not hasattr(self.unwrapped, name) else self.unwrapped


def has_vanished(who: str) -> SpaceError:
    """The error for an agent that has left without an end."""
    return SpaceError(f"{who} is not in env.agents any more, but neither terminated nor truncated")


def is_set(flag: Any) -> bool:
    """Whether this flag of an agent is True. What is no flag is refused elsewhere."""
    try:
        return bool(flag)
    except ValueError:  # an array of several numbers, which is refused later
        return True


def ended_agents(
    before: Collection[Any], agents: Collection[Any], terminated: Mapping[Any, Any], truncated: Mapping[Any, Any]
) -> set[Any]:
    """Who has ended, but is still in `env.agents` after this step. `before`: who was so before it."""
    return {a for a in agents if a in before or is_set(terminated.get(a)) or is_set(truncated.get(a))}


class TurnView(ParallelView):
    """An `AECEnv` as samplers use it. See `ParallelView`. Observations get their additions in `last`."""

    def __init__(self, env: Any, *, mask_key: str | None = None, global_state: bool = False) -> None:
        super().__init__(env, mask_key=mask_key, global_state=global_state)
        self.step = env.step
        #: `env.last`, with what the observation gets.
        self.last: Callable[[], Any] = env.last if self._is_plain else self._last
        #: The rewards for agents that were not in the game, since the last call. Only `OwnClocks` has such rewards.
        self.take_late_rewards: Callable[[], Iterable[float]] | None = getattr(env, "take_late_rewards", None)

    def _last(self) -> Any:
        result = self.env.last()
        if not isinstance(result, tuple) or len(result) != 5:
            return result  # which the caller refuses
        observation, reward, terminated, truncated, info = result
        agent = self.env.agent_selection
        ended = {agent} if is_set(terminated) or is_set(truncated) else set()
        if observation is not None:
            observation = self._completed({agent: observation}, {agent: info}, ended)[agent]
        return observation, reward, terminated, truncated, info


def view_of(env: Any, *, mask_key: str | None = None, global_state: bool = False) -> ParallelView:
    """The environment as samplers use it."""
    view = TurnView if is_in_turns(env) else ParallelView
    return view(env, mask_key=mask_key, global_state=global_state)


class OneSeat(gym.Env[Any, Any]):
    """One agent of a `ParallelView` as an environment of its own, to see what it returns; the others act at random.

    Its episode begins when the agent is there, and ends when it is not there any more.
    """

    def __init__(self, agent: AgentId, view: ParallelView) -> None:
        self._agent, self._view, self._living = agent, view, list[AgentId]()
        self._ended = set[AgentId]()  # who has ended, but is in `env.agents` still
        self.observation_space, self.action_space = view.spaces[agent]
        self.metadata = view.metadata

    def _seed(self, seed: int | None) -> None:
        super().reset(seed=seed)
        for i, (_, space) in enumerate(self._view.spaces.values()):
            space.seed(None if seed is None else seed + i)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._seed(seed)
        observations, infos = self._begin(seed)
        for _ in range(1000):  # steps in which the agent must join
            if self._agent in self._living:
                break
            if self._living:
                observations, *_, infos = self._play(self._sampled())
            else:
                observations, infos = self._begin(None)
        self._last = observations[self._agent]
        return self._last, infos.get(self._agent, {})

    def _begin(self, seed: int | None) -> Any:
        result = self._view.reset(seed=seed)
        self._living, self._ended = list(self._view.agents), set()
        return result

    def _play(self, actions: dict[AgentId, Any]) -> Result:
        result = self._view.step(actions)
        listed, (_, _, *flags, _) = self._view.agents, result
        self._ended = ended_agents(self._ended, listed, *flags)
        self._living = [agent for agent in listed if agent not in self._ended]
        return result

    def _sampled(self) -> dict[AgentId, Any]:
        return {agent: self._view.spaces[agent][1].sample() for agent in self._living}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observations, rewards, terminated, truncated, infos = self._play({**self._sampled(), self._agent: action})
        agent = self._agent
        self._last = observations.get(agent, self._last)  # who has died may have none
        ended = bool(terminated.get(agent)) or agent not in self._view.agents
        return self._last, float(rewards.get(agent, 0.0)), ended, bool(truncated.get(agent)), infos.get(agent, {})

    def close(self) -> None:
        self._view.close()


class OneTurnSeat(OneSeat):
    """The same for a `TurnView`. The others move at random, legally if there is an `action_mask`."""

    _view: TurnView

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._seed(seed)
        self._view.reset(seed=seed)
        for _ in range(1000):  # games in which the agent must move
            observation, _, terminated, truncated, info = self._until_asked()
            if not (terminated or truncated):
                break
            self._view.reset()
        return observation, info

    def _until_asked(self) -> tuple[Any, Any, bool, bool, Any]:
        """Play until the agent is asked or has ended: what `last` returns then."""
        view, last = self._view, None
        while view.agents:
            agent, last = view.env.agent_selection, view.last()
            observation, reward, terminated, truncated, info = last
            if agent == self._agent:
                return observation, float(reward), bool(terminated), bool(truncated), info
            view.env.step(None if terminated or truncated else random_move(view.spaces[agent][1], observation, info))
        return None, 0.0, True, False, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._view.env.step(action)
        return self._until_asked()


def random_move(space: gym.Space[Any], observation: Any, info: Any) -> Any:
    """A random action, which is legal if there is an `action_mask`."""
    masks = [part["action_mask"] for part in (observation, info) if isinstance(part, Mapping) and "action_mask" in part]
    return (
        space.sample(np.asarray(masks[0], np.int8)) if masks and isinstance(space, spaces.Discrete) else space.sample()
    )


def one_seat(agent: AgentId, view: ParallelView) -> gym.Env[Any, Any]:
    """One agent as an environment of its own."""
    return OneTurnSeat(agent, view) if isinstance(view, TurnView) else OneSeat(agent, view)
