"""Joint agents, which act for all their seats of an environment together."""

from __future__ import annotations

import sys
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
from penstock.envs.toy import ScriptedGame

from ..against_loop import compare
from ..scale import quick_first
from ..toy_games import odd_or_even
from .started import started

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here

T, B, K, N_BATCHES = 7, 4, 4, 12


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


class Apart(Team):
    """The same for a loop that knows of no teams: it gets the rows of all games, and reads the step of the game."""

    joint = False

    def reset_one(self, column: int) -> None:
        """It counts nothing."""

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        observation, prev_action, prev_reward = (
            each.reshape(B, -1, *each.shape[1:]) for each in (observation, prev_action, prev_reward)
        )
        self._count = observation[..., 1].max(1).astype(int)
        action, info = super().step(observation, prev_action, prev_reward)
        return AgentStep(action.ravel(), NamedArrays(count=info["count"].ravel()))


def of_teams(cls: Any, several: bool) -> Any:
    return {"even": cls(), "odd": cls()} if several else cls()


def check(cls: Any, collector_cls: Any, make: Any, several: bool = False) -> None:
    """All batches of a sampler are those of the reference loop."""
    classes = iter((make, Apart))
    options: dict[str, Any] = {"batch_T": T, "batch_B": B, "n_batches": N_BATCHES, "bootstrap_value": False}
    options |= {"policy_of": odd_or_even} if several else {}
    waits = collector_cls is WaitResetCollector
    compare(cls, partial(ScriptedGame, K), lambda: of_teams(next(classes), several), wait_reset=waits, **options)


@pytest.mark.parametrize("several", [False, True], ids=["one team", "two teams"])
@pytest.mark.parametrize("collector_cls", [ResetCollector, WaitResetCollector])
@pytest.mark.parametrize("cls", quick_first([SerialSampler, partial(ParallelSampler, n_workers=2)]))
def test_the_state_is_that_of_the_game(cls: Any, collector_cls: Any, several: bool) -> None:
    """Games begin without some agents, also without a whole team; others die, join and come back."""
    check(cls, collector_cls, Team, several)


@pytest.mark.parametrize("several", [False, True], ids=["one team", "two teams"])
@pytest.mark.parametrize("collector_cls", [ResetCollector, WaitResetCollector])
def test_values_are_those_of_who_is_there(collector_cls: Any, several: bool) -> None:
    sizes: dict[str, Any] = {"env_kwargs": {"k": K}, "batch_T": T, "batch_B": B, "collector_cls": collector_cls}
    options = {"policy_of": odd_or_even} if several else {}
    with started(ScriptedGame, of_teams(Team, several), bootstrap_value=True, **sizes, **options) as sampler:
        for itr in range(N_BATCHES):
            samples, _ = sampler.obtain_samples(itr)
            for own in samples.values() if several else [samples]:
                check_values(own.by_env().numpy())


def check_values(batch: Any) -> None:
    env, agent = batch.env, batch.agent
    after = np.concatenate([env.observation[1:], env.bootstrap_obs[None]])
    after = np.where(after[..., 1:2] > 0, after, 0)  # step 0 is of the next game
    after = np.where(env.done[..., None], env.final_obs, after)
    for t, b in np.ndindex(T, B):
        wanted = value(after[t, b], agent.action[t, b], env.reward[t, b]) * env.truncated[t, b]
        np.testing.assert_array_equal(agent.final_value[t, b], wanted)
    goes_on = ~env.done[-1]
    for b in range(B):
        prev = (part[-1, b] * goes_on[b] for part in (agent.action, env.reward))
        wanted = value(env.bootstrap_obs[b], *prev) * (env.bootstrap_obs[b, :, 0] > 0)
        np.testing.assert_array_equal(agent.bootstrap_value[b], wanted)


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
    check(cls, collector_cls, make)
