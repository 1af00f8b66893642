"""Environments of several agents: a column is a seat, in every sampler, with any number of workers. Joint
agents act for all their seats of an environment together."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import pytest

from penstock import (
    AgentStep,
    AsyncSampler,
    GameError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    ResetCollector,
    SerialSampler,
    WaitResetCollector,
)
from penstock.envs.toy import ScriptedGame
from penstock.learning import Ratio, Replay

from ..against_loop import compare
from ..scale import scaled
from ..support import assert_same, collect_with
from ..toy_games import Team, Valued, odd_or_even
from .started import check_refused, started

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here

pytestmark = pytest.mark.timeout(scaled(3600, 120))

#: Environments with 4, 2, 5, 3 and 4 agents in one sampler.
MIXED = [{"k": k} for k in (4, 2, 5, 3, 4)]


@pytest.mark.slow
def test_rewards_of_hundreds_of_agents_are_added_up_alike_in_any_number_of_workers() -> None:
    class Fractions(ScriptedGame):
        def step(self, actions: dict[str, Any]) -> Any:
            observations, rewards, *rest = super().step(actions)
            return observations, {a: r + self.np_random.normal() * 10**5 for a, r in rewards.items()}, *rest

    options: dict[str, Any] = {"env_kwargs": {"k": 200}, "bootstrap_value": False, "batch_B": 2, "n": 2}
    wanted = collect_with(SerialSampler, Fractions, **options)
    assert sum(len(infos) for _, infos in wanted) > 100
    assert_same(wanted, collect_with(ParallelSampler, Fractions, n_workers=2, **options))


class Ones(RandomAgent):
    """Always takes action 1."""

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        return AgentStep(np.ones_like(super().step(observation, prev_action, prev_reward).action))


@pytest.mark.parametrize("agents", [Ones(), {"a0": Ones(), "a1": Ones()}], ids=["one policy", "two policies"])
def test_a_game_s_record_has_the_rewards_of_all_agents_and_the_late_ones(agents: Any) -> None:
    script = [{}, {"a0": "die"}, {"a0": "late"}, {"a0": "late", "a1": "die"}]
    options: dict[str, Any] = {"batch_T": 6, "batch_B": 1, "traj_info_kwargs": {"discount": 0.5}}
    with started(partial(ScriptedGame, 2, script), agents, **options) as sampler:
        _, infos = sampler.obtain_samples(0)
        first = [(i.agent_id, i.Length, i.Return, i.NonzeroRewards, i.DiscountedReturn) for i in infos[:3]]
        assert first == [
            ("a0", 2, 5, 2, 2 + 3 / 2),
            ("a1", 4, 14, 4, 2 + 3 / 2 + 4 / 4 + 5 / 8),
            (None, 4, 20, 4, 4 + 6 / 2 + 4.5 / 4 + 5.5 / 8),
        ]
        assert sampler.stats().late_rewards == 2
        assert sampler.metrics()["sampler/late_rewards"] == 2


def test_late_rewards_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    script = [{"a0": "die"}, {"a0": "late"}]
    with started(partial(ScriptedGame, 2, script), batch_T=4) as sampler, caplog.at_level("WARNING", logger="penstock"):
        for itr in range(3):
            sampler.obtain_samples(itr)
    told = [text for record in caplog.records if "had ended" in (text := record.getMessage())]
    assert len(told) == 1
    assert "stats().late_rewards" in told[0]


@pytest.mark.parametrize("length", [5, 30])  # random steps end some games, or none
def test_the_length_of_a_trajectory_contains_its_random_steps(length: int) -> None:
    env_fn = partial(ScriptedGame, 2, [{}] * length)
    with started(env_fn, batch_T=60, batch_B=6, max_decorrelation_steps=29, seed=1) as sampler:
        _, infos = sampler.obtain_samples(0)
        assert len({int(row) for row in sampler.samples_np.env.observation[0, :, 1]}) > 3
        assert {info.Length for info in infos} == {length}
        for rank in range(6):
            own = [info for info in infos if info.env_rank == rank][:3]
            assert [info.agent_id for info in own] == ["a0", "a1", None]
            assert own[2].Return == own[0].Return + own[1].Return


@pytest.mark.slow
def test_every_environment_is_closed(tmp_path: Any) -> None:
    class Noted(ScriptedGame):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self._file = tmp_path / str(time.monotonic_ns())
            self._file.touch()

        def close(self) -> None:
            self._file.unlink()

    options: dict[str, Any] = {"env_kwargs": [{"k": 1}, {"k": 2}]}
    for cls in (SerialSampler, ParallelSampler):
        with started(Noted, Valued(), cls, eval_n_envs=2, env_info=True, bootstrap_value=True, **options) as sampler:
            sampler.obtain_samples(0)
            assert len(list(tmp_path.iterdir())) == 4
        assert not list(tmp_path.iterdir())
    check_refused(Noted, "policy_of raised ZeroDiv", {"x": Valued()}, policy_of=lambda agent: 1 / 0, **options)
    check_refused(Noted, "observation", RandomAgent(mask_key="observation.x"), **options)
    assert not list(tmp_path.iterdir())


def check_drawn(drawn: Any, discount: float) -> None:
    """Transitions of a `ScriptedGame`, whose reward is the step of the game plus the action."""
    before, after, factor = (np.asarray(each) for each in (drawn.observation, drawn.next_observation, drawn.discount))
    assert (before[:, 0] > 0).all()  # an agent's number + 1: of no idle cell
    goes_on = factor > 0
    assert goes_on.any()
    assert not goes_on.all()
    np.testing.assert_allclose(factor[goes_on], discount)
    np.testing.assert_array_equal(after[goes_on][:, 2], before[goes_on][:, 2] + 1)  # own steps
    np.testing.assert_array_equal(after[goes_on][:, 0], before[goes_on][:, 0])
    np.testing.assert_allclose(drawn.return_, before[:, 1] + 1 + np.asarray(drawn.action))


@pytest.mark.parametrize("kwargs", [{}, {"ratio": Ratio(2.0)}, {"server": "process"}, {"lag": 1, "ratio": Ratio(2.0)}])
def test_workers_write_the_cells_of_their_seats_into_a_replay(kwargs: dict[str, Any]) -> None:
    replay = Replay(capacity=20_000, discount=0.9, seed=0)
    options: dict[str, Any] = {"env_kwargs": MIXED, "batch_B": 5, "n_workers": 3, "replay": replay, **kwargs}
    infos: list[Any] = []
    with started(ScriptedGame, Valued(), AsyncSampler, seed=1, **options) as sampler:
        while len(infos) < 200:
            drawn = replay.sample(256)  # so many that some end an episode
            infos += sampler.take_traj_infos()
        check_drawn(drawn, 0.9)
        assert {info.env_rank for info in infos} == set(range(5))
        for rank in range(5):
            games = [info.number for info in infos if info.env_rank == rank and info.agent_id is None]
            assert games == list(range(len(games)))


class Telling(ScriptedGame):
    def _infos(self) -> Any:
        return {agent: {"own": own, "who": float(agent[1:])} for agent, own in self._own.items()}


@pytest.mark.parametrize("env_fn", [Telling, partial(Telling, start=["a1"])])
def test_env_info_is_recorded_for_each_seat(env_fn: Any) -> None:
    compare(SerialSampler, env_fn, Valued, batch_T=30, batch_B=3, n_batches=3, env_info={"own": 0, "who": 0.0})


# ---- joint agents ------------------------------------------------------------------------------

T, B, K, N_BATCHES = 7, 4, 4, 12


def value(*inputs: Any) -> Any:
    """The values `[k]` of a `Team` in one game."""
    return Team().value(*(own[np.newaxis] for own in inputs))[0]


def of_teams(cls: Any, several: bool) -> Any:
    return {"even": cls(), "odd": cls()} if several else cls()


@pytest.mark.parametrize("several", [False, True], ids=["one team", "two teams"])
@pytest.mark.parametrize("wait_reset", [False, True])
def test_a_team_has_the_state_of_its_game_and_the_values_of_who_is_there(wait_reset: bool, several: bool) -> None:
    """Games begin without some agents, also without a whole team; others die, join and come back."""
    options = {"policy_of": odd_or_even} if several else {}
    sizes = {"batch_T": T, "batch_B": B, "n_batches": N_BATCHES, "wait_reset": wait_reset}
    compare(SerialSampler, partial(ScriptedGame, K), lambda: of_teams(Team, several), **sizes, **options)


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


class Breaks(ScriptedGame):
    """Its ninth step fails, or the first step of its second game."""

    n_steps = n_games = 0

    def __init__(self, at_once: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.at_once = at_once

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.n_games += 1
        return super().reset(seed, options)

    def step(self, actions: dict[str, Any]) -> Any:
        self.n_steps += 1
        if (self.n_games == 2) if self.at_once else (self.n_steps == 9):
            raise GameError("the game is gone")
        return super().step(actions)


@pytest.mark.parametrize("at_once", [False, True], ids=["in a later step", "in its first step"])
@pytest.mark.parametrize(
    ("cls", "collector_cls", "several"),
    [
        (SerialSampler, ResetCollector, False),
        (SerialSampler, ResetCollector, True),
        (SerialSampler, WaitResetCollector, False),
        (partial(GpuSampler, n_workers=2), ResetCollector, False),
        (partial(GpuSampler, n_workers=2), WaitResetCollector, False),
    ],
)
def test_a_game_that_is_built_again_has_a_new_state_and_the_last_value_of_the_one_before(
    cls: Any, collector_cls: Any, several: bool, at_once: bool
) -> None:
    # An inference server has no values of joint agents. A collector that waits clears the row in which a game fails:
    # `check_values` cannot see there who has just joined.
    has_values = cls is SerialSampler and collector_cls is ResetCollector
    sizes: dict[str, Any] = {"batch_T": T, "batch_B": B, "collector_cls": collector_cls, "bootstrap_value": has_values}
    sizes |= {"env_kwargs": {"k": K, "at_once": at_once}, "on_game_failure": "renew", "max_renewals": 50}
    sizes |= {"policy_of": odd_or_even} if several else {}
    with started(Breaks, of_teams(Team, several), cls=cls, **sizes) as sampler:
        for itr in range(N_BATCHES // 2):
            samples, _ = sampler.obtain_samples(itr)
            for own in samples.values() if several else [samples]:
                valid, step = own.env.valid, own.env.observation[..., 1]
                assert (own.agent.agent_info.count == step)[valid].all(), "the state counts the steps of its game"
                if has_values:
                    check_values(own.by_env().numpy())
        assert sampler.stats().cut_episodes >= (B if at_once else 2 * B)
