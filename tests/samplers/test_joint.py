"""Joint agents, which act for all their seats of an environment together: a plain loop says what a batch has."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import pytest

from penstock import (
    Agent,
    AgentStep,
    AlternatingSampler,
    AsyncSampler,
    GpuSampler,
    NamedArrays,
    ParallelSampler,
    ResetCollector,
    SerialSampler,
    WaitResetCollector,
)
from penstock.envs.seeding import ColumnStreams, Purpose
from penstock.envs.toy import ScriptedGame

from ..scale import quick_first
from ..toy_games import odd_or_even

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here

T, B, K, SEED, N_BATCHES = 7, 4, 4, 3, 12


def act(observation: Any, prev_action: Any, prev_reward: Any, count: int) -> Any:
    """Actions `[k]`, which depend on all that an agent gets, and on its state."""
    mixed = observation[:, :3].sum() + prev_action.sum() + prev_reward.sum()
    return (int(mixed) + 5 * count + np.arange(len(observation))) % 3


def value(observation: Any, prev_action: Any, prev_reward: Any) -> Any:
    """Values `[k]`. Different inputs seldom have the same."""
    mixed = observation[:, :3].sum() + 50 * prev_action.sum() + 200 * prev_reward.sum()
    return (mixed + 1000 * np.arange(len(observation))).astype(np.float32)


class Team(Agent):
    """Its state counts the steps of the game."""

    joint = True

    def seed_columns(self, rngs: Any) -> None:
        self._count = np.zeros(len(rngs), np.int64)

    def reseed_columns(self, columns: Any, rngs: Any) -> None:
        """It draws nothing."""

    def reset(self) -> None:
        self._count[...] = 0

    def reset_one(self, column: int) -> None:
        self._count[column] = 0

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        rows = np.arange(len(self._count)) if self.selected is None else self.selected
        count, k = self._count[rows], prev_reward.shape[1]
        self._count[rows] += 1
        action = [act(*each) for each in zip(observation, prev_action, prev_reward, count.tolist(), strict=True)]
        return AgentStep(np.array(action, np.int64).reshape(-1, k), NamedArrays(count=np.repeat(count[:, None], k, 1)))

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        return np.array([value(*each) for each in zip(observation, prev_action, prev_reward, strict=True)])


class Team2(Team):
    """With a state that the samplers must treat with care: see `Agent.recurrent`."""

    recurrent = True


NAMES = "observation", "valid", "action", "count", "reward", "done", "final_value"


class PlainLoop:
    """One environment, in which each of `teams` acts together."""

    def __init__(self, env: Any, seed: int, teams: Sequence[Sequence[str]], *, waits: bool) -> None:
        self.env, self.everyone, self.waits = env, env.possible_agents, waits
        self.seats = [[self.everyone.index(agent) for agent in team] for team in teams]
        self.action, self.reward = np.zeros(K, np.int64), np.zeros(K, np.float32)
        self.counts = [0] * len(teams)
        self.row = self.row_of(env.reset(seed=seed)[0], env.agents)

    def row_of(self, observations: Any, agents: Any) -> Any:
        row = np.zeros((K, 4), np.float32)
        for agent in agents:
            row[self.everyone.index(agent)] = observations[agent]
        return row

    def values_of(self, row: Any) -> Any:
        found = np.zeros(K, np.float32)
        for own in self.seats:
            found[own] = value(row[own], self.action[own], self.reward[own])
        return found

    def begin_game(self) -> None:
        self.row, self.counts = self.row_of(self.env.reset()[0], self.env.agents), [0] * len(self.seats)

    def batch(self) -> dict[str, Any]:
        """The next batch `[T, K]`."""
        if not self.env.agents:
            self.begin_game()
        cells: dict[str, Any] = {name: np.zeros((T, K), np.float32) for name in NAMES}
        cells["observation"] = np.zeros((T, K, 4), np.float32)
        for t in range(T):
            if self.env.agents:  # otherwise it waits for the end of the batch
                for name, cell in self.step().items():
                    cells[name][t] = cell
        values = self.values_of(self.row)
        return {**cells, "bootstrap_value": values * np.isin(self.everyone, self.env.agents)}

    def step(self) -> dict[str, Any]:
        env, everyone, row, acted = self.env, self.everyone, self.row, list(self.env.agents)
        there, action, count = np.isin(everyone, acted), np.zeros(K, np.int64), np.zeros(K, np.int64)
        for i, own in enumerate(self.seats):
            action[own] = act(row[own], self.action[own], self.reward[own], self.counts[i])
            count[own] = self.counts[i]
            self.counts[i] += 1
        self.action = action = action * there
        seen, rewards, *flags, _ = env.step({agent: int(action[everyone.index(agent)]) for agent in acted})
        self.reward = reward = np.array([rewards[a] if a in acted else 0 for a in everyone], np.float32)
        terminated, truncated = (np.array([bool(flag.get(a)) for a in everyone]) for flag in flags)
        done = terminated | truncated
        values = self.values_of(self.row_of(seen, {*acted, *env.agents})) * truncated
        found = row, there, action, count * there, reward, done, values
        self.action, self.reward = action * ~done, reward * ~done
        self.row = self.row_of(seen, env.agents)
        if not (env.agents or self.waits):
            self.begin_game()
        return dict(zip(NAMES, found, strict=True))


def check(sampler: Any, agents: Any, *, has_values: bool = True, waits: bool = False, **kwargs: Any) -> None:
    """All batches of `sampler` are those of the plain loop."""
    several = isinstance(agents, dict)
    seeds = ColumnStreams(SEED, range(B)).env_seeds(Purpose.TRAIN)
    everyone = ScriptedGame(K).possible_agents
    teams = [[a for a in everyone if odd_or_even(a) == name] for name in agents] if several else [everyone]
    loops = [PlainLoop(ScriptedGame(K), seed, teams, waits=waits) for seed in seeds]
    with sampler:
        sampler.initialize(agents, seed=SEED, bootstrap_value=has_values, **kwargs)
        if isinstance(sampler, AsyncSampler):
            sampler.start()
        for itr in range(N_BATCHES):
            samples, _ = sampler.obtain_samples(itr)
            wanted = [loop.batch() for loop in loops]
            for team, own in zip(teams, samples.values() if several else [samples], strict=True):
                env, agent = own.env, own.agent
                fields = {"observation": env.observation, "valid": env.valid, "action": agent.action}
                fields |= {"count": agent.agent_info.count, "reward": env.reward, "done": env.done}
                if has_values:
                    fields |= {"final_value": agent.final_value, "bootstrap_value": agent.bootstrap_value}
                cells = [everyone.index(a) for a in team]
                for name, found in fields.items():
                    axis = 0 if name == "bootstrap_value" else 1
                    expected = np.concatenate([np.take(each[name], cells, axis) for each in wanted], axis)
                    np.testing.assert_array_equal(found.numpy(), expected, f"{name} of batch {itr}")


GAME: dict[str, Any] = {"env_kwargs": {"k": K}, "batch_T": T, "batch_B": B, "max_decorrelation_steps": 0}
TEAMS: dict[str, Any] = {"policy_of": odd_or_even}


@pytest.mark.parametrize("several", [False, True], ids=["one team", "two teams"])
@pytest.mark.parametrize("collector_cls", [ResetCollector, WaitResetCollector])
@pytest.mark.parametrize("cls", quick_first([SerialSampler, partial(ParallelSampler, n_workers=2)]))
def test_the_state_is_that_of_the_game_and_the_values_those_of_who_is_there(
    cls: Any, collector_cls: Any, several: bool
) -> None:
    """Games begin without some agents, also without a whole team; others die, join and come back."""
    agents, kwargs = ({"even": Team(), "odd": Team()}, TEAMS) if several else (Team(), {})
    waits = collector_cls is WaitResetCollector
    check(cls(ScriptedGame, collector_cls=collector_cls, **GAME), agents, waits=waits, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Team, Team2])
@pytest.mark.parametrize("collector_cls", [ResetCollector, WaitResetCollector])
@pytest.mark.parametrize(
    "cls",
    [
        partial(GpuSampler, n_workers=2),
        partial(GpuSampler, n_workers=4, min_ready=1),
        partial(GpuSampler, n_workers=2, server="process"),
        partial(AlternatingSampler, n_workers=2),
        partial(AsyncSampler, n_workers=2),
        partial(AsyncSampler, n_workers=2, server="process"),
    ],
    ids=["together", "min_ready", "process", "halves", "ahead", "ahead process"],
)
def test_whoever_acts_the_state_is_that_of_the_game(cls: Any, collector_cls: Any, make: Any) -> None:
    waits = collector_cls is WaitResetCollector
    check(cls(ScriptedGame, collector_cls=collector_cls, **GAME), make(), has_values=False, waits=waits)
