"""Games in turns whose players change from game to game."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import pytest
from gymnasium import spaces

from penstock import AsyncSampler, NamedArrays, ParallelSampler, RandomAgent, Sampler, SerialSampler
from penstock.envs import ScriptedGame
from penstock.errors import ConfigError, SamplerBrokenError
from tests.support import EVALUATING, assert_same, collect_with
from tests.toy_games import TurnGame, Valuing

from ..scale import mostly_first, some
from .started import check_fails, check_refused, started

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here


def drawn(agent_id: str, env_rank: int, game: int, rng: np.random.Generator) -> str:
    """Draws the player, and shows what it was asked with."""
    return "main" if rng.random() < 0.4 + 0.1 * env_rank else ("past", "other")[game % 2]


def in_turn(agent_id: str, game: int) -> str:
    return "main" if agent_id == f"a{game % 2}" else "past"


class Wide(TurnGame):
    """A `TurnGame` whose observations take more memory than all else."""

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-np.inf, np.inf, (4 + 1000,), np.float32)

    def last(self, observe: bool = True) -> Any:
        observation, *others = super().last(observe)
        return np.append(observation, np.ones(1000, np.float32)), *others


def zeros(observation: Any) -> Any:
    """A scripted player."""
    return np.zeros(len(observation), np.int64)


def agents() -> dict[str, Any]:
    return {"main": Valuing(), "past": Valuing(), "other": RandomAgent()}


@pytest.mark.parametrize(
    ("cls", "n_workers"), some([(ParallelSampler, 2), (AsyncSampler, 3), (ParallelSampler, 1), (ParallelSampler, 4)], 2)
)
def test_the_same_players_for_any_number_of_workers(cls: type[Sampler], n_workers: int) -> None:
    options: Any = {"policy_of": drawn, "bootstrap_value": False, **EVALUATING}
    one = collect_with(SerialSampler, TurnGame, agents(), **options)
    assert_same(one, collect_with(cls, TurnGame, agents(), n_workers=n_workers, **options))
    # Each policy has a column for each seat. The seats that it does not play have no rows.
    played = {
        name: sum(samples[name].env.valid.sum() for samples, _ in one if samples is not None) for name in agents()
    }
    assert min(played.values()) > 50


@pytest.mark.slow
def test_each_decision_is_of_one_policy_and_games_are_whole() -> None:
    players = {"main": Valuing(), "past": zeros}
    with started(partial(TurnGame, 2), players, policy_of=in_turn, batch_T=12, batch_B=3, seed=2) as sampler:
        n, seats, games = 0, sampler.seats(), dict[Any, dict[Any, str]]()
        assert seats["main"] == seats["past"]
        for itr in range(30):
            batch, infos = sampler.obtain_samples(itr)
            n += sum(int(own.env.valid.sum()) for own in batch.values())
            assert not batch.past.agent.action.any()
            for info in infos:
                game = games.setdefault((info.env_rank, info.number), {})
                game[info.agent_id] = info.policy
        (worker,) = sampler.stats().workers
        assert n <= worker.steps <= n + 12, "the decisions of all policies, and those that are open"
    whole = [(key, game) for key, game in games.items() if None in game]
    assert len(whole) > 50
    for (_, number), game in whole:
        for agent_id, policy in game.items():
            assert policy == (None if agent_id is None else in_turn(agent_id, number))


def test_set_policy_of_changes_no_running_game() -> None:
    options: dict[str, Any] = {"batch_B": 4, "n_workers": 2, "policy_of": lambda agent_id, game: "main"}
    with started(partial(TurnGame, 2), agents(), ParallelSampler, **options) as sampler:
        running = [0] * 4
        for itr in range(6):
            for info in sampler.obtain_samples(itr)[1]:
                if info.agent_id is None:
                    running[info.env_rank] = info.number + 1
        sampler.set_policy_of(lambda agent_id: "past")
        for itr in range(6, 14):
            for info in sampler.obtain_samples(itr)[1]:
                if info.agent_id is not None:
                    assert info.policy == ("main" if info.number <= running[info.env_rank] else "past")
        assert info.policy in ("past", None)
        with pytest.raises(ConfigError, match="policy_of must be a function of agent_id, got 3"):
            sampler.set_policy_of(3)


def test_what_cannot_be_is_refused() -> None:
    message = "policy_of with game or rng and agents that all act in each step do not go"
    check_refused(ScriptedGame, message, agents(), policy_of=in_turn)
    with started(TurnGame, {"main": RandomAgent()}, policy_of=lambda agent_id: "main") as sampler:
        message = "set_policy_of needs games in turns, and a first policy_of with|set_policy_of and on_worker"
        with pytest.raises(ConfigError, match=message):
            sampler.set_policy_of(lambda agent_id: "main")
    options: dict[str, Any] = {"policy_of": lambda agent_id, game: "main" if game < 2 else "nobody"}
    message = r"policy_of returned 'nobody' for env_rank 0, agent 'a0'"
    check_fails(TurnGame, message, agents(), error=SamplerBrokenError, batch_T=50, batch_B=1, n=9, **options)


# ---- what is recorded ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_turns", "kind"),
    mostly_first(
        [True, False],
        [
            (SerialSampler, {}),
            (ParallelSampler, {"n_workers": 2, "debug": True}),
            (AsyncSampler, {"n_workers": 3}),
            (ParallelSampler, {"n_workers": 2, "n_slots": 2}),
        ],
    ),
)
def test_without_the_others_the_batch_is_the_same(in_turns: bool, kind: Any) -> None:
    cls, options = kind
    env_fn: Any = TurnGame if in_turns else ScriptedGame
    policy_of: Any = drawn if in_turns else {"a0": "main", "a1": "past", "a2": "other"}.get
    given: Any = {"policy_of": policy_of, "bootstrap_value": False, **EVALUATING}
    every = collect_with(SerialSampler, env_fn, agents(), **given)
    found = collect_with(cls, env_fn, agents(), **given, **options, record=["main"])
    assert_same([(None if own is None else NamedArrays(main=own.main), infos) for own, infos in every], found)


@pytest.mark.slow
def test_who_is_not_recorded_needs_no_value_and_no_memory() -> None:
    """Observations of 3 policies, or of one."""
    nbytes = {}
    for record in (None, ("main",)):
        players = {"main": Valuing(), "past": Valuing(), "other": zeros if record else Valuing()}
        with ParallelSampler(partial(Wide, 2), batch_T=64, batch_B=4, n_workers=2) as sampler:
            example = sampler.initialize(players, policy_of=drawn, seed=0, bootstrap_value=True, record=record)
            batch, infos = sampler.obtain_samples(0)
            assert batch.keys() == example.keys() == (record or ("main", "past", "other"))
            assert set(sampler.seats()) == set(players)
            assert {info.policy for info in infos} == {None, *players}, "their trajectories are there"
            assert batch.main.agent.bootstrap_value.any()
            assert sampler.metrics()["sampler/policy_version/past"] == 1
            nbytes[record] = sampler.stats().bytes_shared
    assert nbytes["main",] < 0.4 * nbytes[None]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("main", r"record must be a list with some of the policies \['main', 'past', 'other'\], got 'main'"),
        ([], "record must be a list with some of the policies"),
        (["main", "nobody"], "record must be a list with some of the policies"),
        ([3], "record must be a list with some of the policies"),
        (7, "record must be a list with some of the policies"),
    ],
)
def test_a_wrong_record_is_refused(record: Any, message: str) -> None:
    check_refused(TurnGame, message, agents(), policy_of=drawn, record=record)


def test_one_agent_is_always_recorded() -> None:
    check_refused(TurnGame, "record says which policies of a dict of agents are recorded", record=["agent"])
