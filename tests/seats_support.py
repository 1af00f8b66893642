"""What the tests of several agents share: agents that tell what they saw, odd environments, comparisons, an oracle."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium import spaces

from penstock import Agent, AgentStep, NamedArrays, Sampler, SerialSampler
from penstock.envs.toy import ScriptedGame

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here

#: a0 dies at step 2, a1 is cut off at step 4, a2 joins at step 1, and the game is over at step 5.
STORY = [{"a2": "join"}, {"a0": "die"}, {}, {"a1": "cut"}, {}]
OPENING = ["a0", "a1"]


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

    def __init__(self, n_actions: int = 3) -> None:
        self._n = n_actions

    def seed_columns(self, rngs: Sequence[np.random.Generator]) -> None:
        self._rngs = list(rngs)

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        rows = range(len(self._rngs)) if self.selected is None else self.selected
        action = np.array([self._rngs[row].integers(self._n) for row in rows])
        return AgentStep(action, NamedArrays(value=self.value(observation, prev_action, prev_reward)))

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        leaves = [leaf for _, leaf in NamedArrays(o=observation).leaves()]
        return sum(np.tanh(leaf).reshape(len(leaf), -1).astype(np.float32).sum(1) for leaf in leaves) + np.float32(1.5)


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


# ---- environments ------------------------------------------------------------------------------


class Odd(ScriptedGame):
    """A `ScriptedGame` that returns its dicts, lists and arrays again in each step, its agents in changing order, and
    flags that are no bools. A reader that keeps a reference, or that relies on the order, sees something else."""

    def __init__(self, reuse: bool = True, shuffle: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._reuse, self._shuffle = reuse, shuffle
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
        if not self._reuse:
            self.agents = agents
            return results
        for agent, observation in results[0].items():
            self._arrays[agent][...] = observation
            results[0][agent] = self._arrays[agent]
        for kept, own in zip(self._dicts, results, strict=True):
            kept.clear()
            kept.update(own)
        self._list[:] = agents
        self.agents = self._list
        return self._dicts


class Roles(ScriptedGame):
    """A scripted game whose first agent sees 5 numbers and has 4 actions; all others see 4 and have 3."""

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return spaces.Box(-np.inf, np.inf, (5,), np.float32) if agent == "a0" else super().observation_space(agent)

    def action_space(self, agent: str) -> gym.Space[Any]:
        return spaces.Discrete(4) if agent == "a0" else super().action_space(agent)

    def _observations(self) -> dict[str, Any]:
        found = super()._observations()
        return {**found, "a0": np.append(found["a0"], np.float32(7))} if "a0" in found else found


class Numbered:
    """A small `ParallelEnv` of integer ids, whose actions and observations are dicts. Nothing is random: it shows which
    action each agent was given. Agent 1 leaves after `lives` steps, the others two steps later."""

    metadata: dict[str, Any] = {"name": "numbered"}  # noqa: RUF012

    def __init__(self, ids: Sequence[int] = (7, 1, 4), lives: int = 3) -> None:
        self.possible_agents, self.agents, self._lives = list(ids), [], lives

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


# ---- batches -----------------------------------------------------------------------------------


def batches_of(
    cls: type[Sampler],
    env_fn: Any,
    agents: Any,
    *,
    n: int = 5,
    evaluate: bool = False,
    policy_of: Any = None,
    record: Any = None,
    traj_info_kwargs: Any = None,
    bootstrap_value: bool = True,
    **options: Any,
) -> list[tuple[Any, list[dict[str, Any]]]]:
    """Copies of `n` batches, each with the attributes of the finished trajectories; and those of evaluations between
    the batches, as (None, trajectories)."""
    options = {"batch_T": 9, "batch_B": 5, "max_decorrelation_steps": 12, **options}
    is_async, found = hasattr(cls, "start"), list[tuple[Any, list[dict[str, Any]]]]()
    if evaluate:
        options |= {"eval_n_envs": 3, "eval_max_steps": 60}
    with cls(env_fn, **options) as sampler:
        sampler.initialize(
            agents,
            seed=7,
            bootstrap_value=bootstrap_value,
            policy_of=policy_of,
            record=record,
            traj_info_kwargs=traj_info_kwargs,
        )
        if is_async:
            sampler.start()
        for itr in range(n):
            samples, infos = sampler.obtain_samples(itr)
            found.append((samples.copy().numpy() if hasattr(samples, "env") else _copied(samples), _public(infos)))
            if evaluate and itr % 2:
                found.append((None, _public(sampler.evaluate_agent(itr))))
    return found


def _copied(samples: Any) -> NamedArrays:
    return NamedArrays({name: own.copy().numpy() for name, own in samples.items()})


def _public(infos: list[Any]) -> list[dict[str, Any]]:
    return [{name: value for name, value in vars(info).items() if name[0] != "_"} for info in infos]


def assert_same(wanted: Sequence[tuple[Any, Any]], found: Sequence[tuple[Any, Any]], rtol: float = 0) -> None:
    """All fields of all batches, and all trajectories."""
    assert len(wanted) == len(found)
    for i, ((x, infos), (y, others)) in enumerate(zip(wanted, found, strict=True)):
        assert infos == others, i
        assert (x is None) == (y is None)
        for (name, left), (other, right) in zip(x.leaves(), y.leaves(), strict=True) if x is not None else ():
            assert name == other
            if name.endswith("policy_version"):
                continue
            np.testing.assert_allclose(left, right, rtol=rtol, atol=0, err_msg=f"{name}, {i}")


def serial(env_fn: Any, agents: Any, **options: Any) -> list[tuple[Any, list[dict[str, Any]]]]:
    return batches_of(SerialSampler, env_fn, agents, **options)


def cells(column: Any) -> Iterator[tuple[int, bool]]:
    """The valid rows of one column of `valid` `[T]`."""
    yield from (int(t) for t in np.flatnonzero(column))


def check_rules(samples: Any) -> None:
    """The rules that hold in every batch of a `ScriptedGame`: idle cells are zero, episodes have no gap, starts and
    ends are where they are said to be. Observations are (agent's number + 1, step, own steps, draw)."""
    env, agent = samples.env, samples.agent
    valid, done = np.asarray(env.valid), np.asarray(env.done)
    for name, field in [*env.items(), *agent.items()]:
        if name in ("bootstrap_obs", "bootstrap_value", "policy_version", "prev_reward", "prev_action"):
            continue
        for path, leaf in NamedArrays({name: field}).leaves():
            assert not np.asarray(leaf)[~valid].any(), f"{path} of an idle cell"
    assert not np.asarray(env.prev_done)[~valid].any()
    goes_on = valid[:-1] & ~done[:-1]
    assert valid[1:][goes_on].all(), "a gap in an episode"
    observation = np.asarray(env.observation)
    observation = observation[..., :4]
    own = observation[..., 2]
    assert (np.asarray(env.prev_done) == (valid & (own == 0)))[valid].all(), "own steps are 0 where an episode begins"
    assert (own[1:] == own[:-1] + 1)[goes_on].all()
    assert (done == (np.asarray(env.terminated) | np.asarray(env.truncated))).all()
    action = np.asarray(agent.action)
    np.testing.assert_array_equal(np.asarray(env.reward)[valid], (observation[..., 1] + 1 + action)[valid])
    if "final_obs" in env:
        final = np.asarray(env.final_obs)
        assert (final[done][:, 2] == own[done] + 1).all()
        assert (final[done][:, 0] == observation[done][:, 0]).all()
        assert not final[~done].any()
    after = np.asarray(env.bootstrap_obs)
    assert (after[..., 2] == own[-1] + 1)[valid[-1] & ~done[-1]].all()


class Follower:
    """Follows every column over batches: the rewards of each trajectory, by (env_rank, agent)."""

    def __init__(self, seats: Sequence[tuple[int, Any]]) -> None:
        self.seats = list(seats)
        self.running: dict[Any, list[float]] = defaultdict(list)
        self.finished: list[tuple[int, Any, int, float]] = []
        self.total = 0.0

    def follow(self, samples: Any) -> list[tuple[int, Any, int, float]]:
        """The trajectories that end in this batch: (env_rank, agent, length, return), ordered by time, then column."""
        env, found = samples.env, []
        valid, done, reward = (np.asarray(each) for each in (env.valid, env.done, env.reward))
        starts = np.asarray(env.prev_done)
        for t in range(len(valid)):
            for b in np.flatnonzero(valid[t]):
                seat = self.seats[b]
                if starts[t, b]:
                    self.running[seat] = []
                self.running[seat].append(float(reward[t, b]))
                self.total += float(reward[t, b])
                if done[t, b]:
                    rewards = self.running.pop(seat)
                    found.append((*seat, len(rewards), sum(rewards)))
        self.finished += found
        return found
