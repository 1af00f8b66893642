"""Environments of several agents: a column is a seat, in every sampler, with any number of workers. Joint
agents act for all their seats of an environment together."""

from __future__ import annotations

import sys
import time
from functools import partial
from itertools import product
from typing import Any

import cloudpickle
import numpy as np
import pytest

from penstock import (
    Agent,
    AgentStep,
    AlternatingSampler,
    AsyncSampler,
    GameError,
    GpuSampler,
    NamedArrays,
    ParallelSampler,
    RandomAgent,
    ResetCollector,
    SerialSampler,
    WaitResetCollector,
)
from penstock.envs.toy import ScriptedGame
from penstock.learning import Ratio, Replay

from ..against_loop import compare
from ..scale import FULL, covering, scaled
from ..support import assert_same, collect_with
from ..toy_games import Valued, odd_or_even
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
            drawn = replay.sample(64)
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
@pytest.mark.parametrize("cls", [SerialSampler, partial(ParallelSampler, n_workers=2)])
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


SERVED: dict[str, Any] = {
    "together": partial(GpuSampler, n_workers=2),
    "min_ready": partial(GpuSampler, n_workers=3, min_ready=1),
    "process": partial(GpuSampler, n_workers=2, server="process"),
    "halves": partial(AlternatingSampler, n_workers=2),
    "ahead": partial(AsyncSampler, n_workers=2),
    "ahead process": partial(AsyncSampler, n_workers=2, server="process"),
}
CELLS = list(product(SERVED, [ResetCollector, WaitResetCollector], [Team, Team2]))


@pytest.mark.slow
@pytest.mark.parametrize(("how", "collector_cls", "make"), CELLS if FULL else covering(CELLS))
def test_whoever_acts_the_state_is_that_of_the_game(how: str, collector_cls: Any, make: Any) -> None:
    check(SERVED[how], collector_cls, make)


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
