"""Games of several agents, and agents that tell what they saw: they share what the tests of such games need."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium import spaces

from penstock import Agent, AgentStep, NamedArrays
from penstock.envs.toy import ScriptedGame

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here

#: a0 dies at step 2, a1 is cut off at step 4, a2 joins at step 1, and the game is over at step 5.
STORY = [{"a2": "join"}, {"a0": "die"}, {}, {"a1": "cut"}, {}]
OPENING = ["a0", "a1"]


def odd_or_even(agent_id: str) -> str:
    """Two policies, for the agents of a game."""
    return "odd" if int(agent_id[1:]) % 2 else "even"


# ---- agents ------------------------------------------------------------------------------------


class Book(Agent):
    """A recurrent agent with noise: its state is the number of a column's own steps. It reports all that it got.

    Actions depend on the state, the noise, the observation, prev_action and prev_reward, so that a leak into any of
    them changes the batch.
    """

    recurrent = True

    def seed_columns(self, rngs: Sequence[np.random.Generator]) -> None:
        self._rngs = list(rngs)

    def reseed_columns(self, columns: Any, rngs: Sequence[np.random.Generator]) -> None:
        for column, rng in zip(columns, rngs, strict=True):
            self._rngs[column] = rng

    def reset(self) -> None:
        self._own = np.zeros(len(self._rngs), np.int64)

    def reset_one(self, column: int) -> None:
        self._own[column] = 0

    def _rows(self) -> Any:
        return np.arange(len(self._own)) if self.selected is None else self.selected

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        rows = self._rows()
        own, noise = self._own[rows], np.array([self._rngs[row].random() for row in rows], np.float32)
        mixed = own * 5 + noise * 1000 + observation[:, 3] * 100 + prev_action * 7 + prev_reward * 3
        self._own[rows] += 1
        seen = {"own": own.copy(), "prev_action": np.array(prev_action), "prev_reward": np.array(prev_reward)}
        return AgentStep(mixed.astype(np.int64) % 3, NamedArrays(**seen, noise=noise))

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        return (observation[:, 1] + observation[:, 3] + 10 * self._own[self._rows()]).astype(np.float32) + 1


class Valued(Agent):
    """Acts at random, and has a value that is no round number: a function of the observation alone."""

    def seed_columns(self, rngs: Sequence[np.random.Generator]) -> None:
        self._rngs = list(rngs)

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        rows = range(len(self._rngs)) if self.selected is None else self.selected
        action = np.array([self._rngs[row].integers(3) for row in rows])
        return AgentStep(action, NamedArrays(value=self.value(observation, prev_action, prev_reward)))

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        leaves = [leaf for _, leaf in NamedArrays(o=observation).leaves()]
        return sum(np.tanh(leaf).reshape(len(leaf), -1).astype(np.float32).sum(1) for leaf in leaves) + np.float32(1.5)


def split_agents(n_policies: int, cls: Any = Book) -> dict[str, Any]:
    """What `initialize` gets for one policy, or for two: a0 has one of its own."""
    if n_policies == 1:
        return {"agent": cls()}
    policy_of = {"a0": "first"}.get
    return {"agent": {"first": cls(), "other": cls()}, "policy_of": lambda agent: policy_of(agent, "other")}


class Published(Agent):
    """Acts with its only parameter, the number of times that it was published."""

    def __init__(self) -> None:
        self.number = np.zeros((), np.int64)

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        n = len(prev_reward)
        return AgentStep(np.full(n, self.number % 3), {"number": np.full(n, self.number)})

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        return np.full(len(prev_reward), self.number, np.float32)

    def read_parameters(self) -> Any:
        return {"number": self.number}

    def write_parameters(self, parameters: Any) -> None:
        self.number = parameters["number"].copy()

    def publish(self) -> None:
        self.number = self.number + 1
        self.sync_shared_memory()


class Scripted(Agent):
    """Plays given actions, one list for each column."""

    def __init__(self, actions: Sequence[Sequence[int]]) -> None:
        self._actions = actions

    def reset(self) -> None:
        self._at = [0] * len(self._actions)

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        columns = range(len(prev_reward)) if self.selected is None else self.selected.tolist()
        found = []
        for column in columns:
            found.append(self._actions[column][self._at[column] % len(self._actions[column])])
            self._at[column] += 1
        return AgentStep(np.array(found))


class Valuing(Book):
    """A `Book` that reports its value, as a recurrent agent must."""

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        value = self.value(observation, prev_action, prev_reward)
        action, info = super().step(observation, prev_action, prev_reward)
        return AgentStep(action, NamedArrays(**dict(info.items()), value=value))


class Team(Agent):
    """Acts for all seats of a game together. Actions depend on all that they get, and on its state: that counts the
    steps of the game. Different inputs seldom have the same values."""

    joint = True

    def seed_columns(self, rngs: Sequence[np.random.Generator]) -> None:
        self._count = np.zeros(len(rngs), np.int64)

    def reset(self) -> None:
        self._count[...] = 0

    def reset_one(self, column: int) -> None:
        self._count[column] = 0

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        rows, k = self.selected if self.selected is not None else np.arange(len(self._count)), prev_reward.shape[1]
        count = self._count[rows]
        self._count[rows] += 1
        mixed = (observation[..., :3].sum(2) + prev_action + prev_reward).sum(1).astype(np.int64) + 5 * count
        return AgentStep((mixed[:, None] + np.arange(k)) % 3, NamedArrays(count=np.repeat(count[:, None], k, 1)))

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        mixed = (observation[..., :3].sum(2) + 50 * prev_action + 200 * prev_reward).sum(1)
        return (mixed[:, None] + 1000 * np.arange(prev_reward.shape[1])).astype(np.float32)


class StatefulTeam(Team):
    """With a state that the samplers must treat with care: see `Agent.recurrent`."""

    recurrent = True


# ---- environments ------------------------------------------------------------------------------


class Odd(ScriptedGame):
    """A `ScriptedGame` that returns its dicts, lists and arrays again in each step, its agents in changing order, and
    flags that are no bools. A reader that keeps a reference, or that relies on the order, sees something else."""

    def __init__(self, shuffle: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._shuffle = shuffle
        self._dicts: list[dict[str, Any]] = [{} for _ in range(5)]
        self._arrays = {agent: np.zeros(4, np.float32) for agent in self.possible_agents}
        self._list: list[str] = []
        self._order = np.random.default_rng(8)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = []  # a new list: the base class makes another one
        observations, infos = super().reset(seed, options)
        return tuple(self._odd([observations, {}, {}, {}, infos])[::4])

    def step(self, actions: dict[str, Any]) -> Any:
        observations, rewards, *flags, infos = super().step(actions)
        unusual = (0, 0.0, np.False_, False), (1, 1.0, np.True_, True)
        flags = [
            {agent: unusual[flag][(self.t + i) % 4] for i, (agent, flag) in enumerate(own.items())} for own in flags
        ]
        return tuple(self._odd([observations, rewards, *flags, infos]))

    def _odd(self, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
        order = list(self.possible_agents)
        if self._shuffle and self.t % 2:
            self._order.shuffle(order)
        results = [{agent: own[agent] for agent in order if agent in own} for own in results]
        agents = [agent for agent in order if agent in self.agents]
        for agent, observation in results[0].items():
            self._arrays[agent][...] = observation
            results[0][agent] = self._arrays[agent]
        for kept, own in zip(self._dicts, results, strict=True):
            kept.clear()
            kept.update(own)
        self._list[:] = agents
        self.agents = self._list
        return self._dicts


class Ghosts(ScriptedGame):
    """A `ScriptedGame` without joins that lists who has ended until the next reset. Only the others may act."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self._gone = set[str]()
        return super().reset(seed, options)

    def step(self, actions: dict[str, Any]) -> Any:
        listed = self.agents
        acted = self.agents = [agent for agent in listed if agent not in self._gone]
        results = super().step(actions)
        self._gone |= {*acted} - {*self.agents}
        self.agents = listed
        return results


class Roles(ScriptedGame):
    """A scripted game whose first agent sees 5 numbers and has 4 actions; all others see 4 and have 3."""

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return spaces.Box(-np.inf, np.inf, (5,), np.float32) if agent == "a0" else super().observation_space(agent)

    def action_space(self, agent: str) -> gym.Space[Any]:
        return spaces.Discrete(4) if agent == "a0" else super().action_space(agent)

    def observe(self) -> dict[str, Any]:
        found = super().observe()
        return {**found, "a0": np.append(found["a0"], np.float32(7))} if "a0" in found else found


class Numbered:
    """A small `ParallelEnv` of integer ids, whose actions and observations are dicts. Nothing is random: it shows which
    action each agent was given. Agent 1 leaves after `lives` steps, the others two steps later."""

    metadata: dict[str, Any] = {"name": "numbered"}  # noqa: RUF012

    def __init__(self, ids: Sequence[int] = (7, 1, 4), lives: int = 3) -> None:
        self.possible_agents, self.agents, self._lives = list(ids), list[Any](), lives

    def observation_space(self, agent: int) -> gym.Space[Any]:
        return spaces.Dict({"who": spaces.Discrete(10), "was": spaces.Box(-9, 9, (2,), np.float32)})

    def action_space(self, agent: int) -> gym.Space[Any]:
        return spaces.Dict({"push": spaces.Box(-1, 1, (2,), np.float32), "mode": spaces.Discrete(4)})

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self._t = list(self.possible_agents), 0
        return {agent: {"who": agent, "was": np.zeros(2, np.float32)} for agent in self.agents}, {}

    def step(self, actions: dict[int, Any]) -> Any:
        assert list(actions) == self.agents
        self._t += 1
        acted = self.agents
        observations = {agent: {"who": agent, "was": actions[agent]["push"] * 2} for agent in acted}
        rewards = {agent: float(actions[agent]["push"].sum() + 10 * actions[agent]["mode"]) for agent in acted}
        ended = {agent: self._t == self._lives + (0 if agent == 1 else 2) for agent in acted}
        self.agents = [agent for agent in acted if not ended[agent]]
        return observations, rewards, ended, dict.fromkeys(acted, False), {}

    def close(self) -> None:
        """There is nothing to close."""


class TurnGame:
    """A random game, as an `AECEnv`. Agents move in any order, also twice in a row. After each move, some agents get a
    reward, also those that have not moved yet; sometimes one dies or is cut off.

    An observation is (agent's number + 1, move, the agent's own moves, random number).
    """

    metadata: dict[str, Any] = {"name": "turn_game"}  # noqa: RUF012
    render_mode = None

    def __init__(self, k: int = 3, mask: bool = False, ends: bool = True) -> None:
        self.possible_agents = [f"a{i}" for i in range(k)]
        self.agents: list[str] = []
        self._mask, self._has_ends, self._rng = mask, ends, np.random.default_rng(0)

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def action_space(self, agent: str) -> gym.Space[Any]:
        return spaces.Discrete(3)

    def agent_iter(self) -> Iterator[str]:
        while self.agents:
            yield self.agent_selection

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self.t, self._most = 0, int(self._rng.integers(1, 25))
        self._own = dict.fromkeys(self.agents, 0)
        self._rewards = dict.fromkeys(self.agents, 0.0)
        self._terminated, self._truncated = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self._choose()

    def _choose(self) -> None:
        ended = [agent for agent in self.agents if self._terminated[agent] or self._truncated[agent]]
        if self.agents:
            self.agent_selection = ended[0] if ended else self.agents[self._rng.integers(len(self.agents))]
        self._draw = np.float32(self._rng.random())

    def last(self, observe: bool = True) -> Any:
        agent = self.agent_selection
        info = {"action_mask": np.array([1, 1, self.t % 2], np.int8)} if self._mask else {}
        seen = np.array([int(agent[1:]) + 1, self.t, self._own[agent], self._draw], np.float32)
        return seen, self._rewards[agent], self._terminated[agent], self._truncated[agent], info

    def step(self, action: Any) -> None:
        agent, rng = self.agent_selection, self._rng
        if self._terminated[agent] or self._truncated[agent]:
            assert action is None
            self.agents.remove(agent)
            self._choose()
            return
        assert action in (0, 1, 2)
        assert not self._mask or action < 2 or self.t % 2
        self.t, self._own[agent], self._rewards[agent] = self.t + 1, self._own[agent] + 1, 0.0
        for other in self.agents:
            if rng.random() < 0.4:
                self._rewards[other] += float(rng.integers(-3, 4)) + action
        is_over = self.t >= self._most
        for other in self.agents:
            if is_over or (self._has_ends and rng.random() < 0.06):
                (self._terminated if rng.random() < 0.6 else self._truncated)[other] = True
        self._choose()

    def close(self) -> None:
        """There is nothing to close."""


class Clocks:
    """A random `ParallelEnv`. Agents join late, die, are cut off and come back. Each step asks some of those that are
    there, or nobody. Everybody may get a reward, also who is not there.

    An observation is (agent's number + 1, step, 0, random number).
    """

    metadata: dict[str, Any] = {"name": "clocks"}  # noqa: RUF012
    render_mode = None

    def __init__(self, k: int = 3, chance: float = 0.4) -> None:
        self.possible_agents = [f"a{i}" for i in range(k)]
        self.agents: list[str] = []
        self.chance, self.rng, self.ledger = chance, np.random.default_rng(0), 0.0

    def observation_space(self, agent: Any) -> gym.Space[Any]:
        return spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def action_space(self, agent: Any) -> gym.Space[Any]:
        return spaces.Discrete(3)

    def _seen(self, agents: Any) -> dict[str, Any]:
        return {a: np.array([int(a[1:]) + 1, self.t, 0, self.rng.random()], np.float32) for a in agents}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.finished = self.ledger  # the rewards of all games before
        self.agents, self.t, self.options = [self.possible_agents[0]], 0, options
        self.asked = {agent for agent in self.agents if self.rng.random() < self.chance}
        self.has_begun = bool(self.asked)  # a game in which nobody acts is an error
        return self._seen(sorted(self.asked)), {}

    def step(self, actions: dict[str, int]) -> Any:
        assert set(actions) == self.asked
        rng, before = self.rng, list(self.agents)
        self.t += 1
        rewards = {agent: float(rng.integers(-3, 4)) for agent in self.possible_agents if rng.random() < 0.5}
        rewards = {agent: reward + actions.get(agent, 0) for agent, reward in rewards.items()}
        self.ledger += sum(rewards.values())
        is_over, terminated, truncated = self.t >= 30, dict[str, bool](), dict[str, bool]()
        for agent in before:
            if is_over or (self.has_begun and rng.random() < 0.05):
                (terminated if rng.random() < 0.6 else truncated)[agent] = True
        self.agents = [agent for agent in before if agent not in {**terminated, **truncated}]
        self.asked = {agent for agent in self.agents if rng.random() < self.chance}
        self.has_begun = self.has_begun or bool(self.asked)
        observations = self._seen([*terminated, *truncated, *sorted(self.asked)])
        if not is_over and self.agents and rng.random() < 0.3:
            joiner = self.possible_agents[rng.integers(len(self.possible_agents))]
            if joiner not in self.agents and joiner not in before:
                self.agents.append(joiner)
        return observations, rewards, terminated, truncated, {agent: {"own": self.t} for agent in before}

    def close(self) -> None:
        """There is nothing to close."""
