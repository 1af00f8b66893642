"""Environments of several agents: a column is a seat, in every sampler, with any number of workers."""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from penstock import (
    AgentStep,
    AsyncSampler,
    ConfigError,
    ParallelSampler,
    RandomAgent,
    SerialSampler,
    TrajInfo,
)
from penstock.envs.toy import ScriptedGame
from penstock.learning import Ratio, Replay, Steps, gae

from ..scale import quick_first, scaled
from ..support import Diary, assert_same, check_rules, collect_with
from ..toy_games import Book, Odd, TurnGame, Valued

pytestmark = pytest.mark.timeout(scaled(3600, 120))

#: Environments with 4, 2, 5, 3 and 4 agents in one sampler.
MIXED = [{"k": k} for k in (4, 2, 5, 3, 4)]


# ---- one seed, one batch -----------------------------------------------------------------------


@pytest.mark.slow
def test_rewards_are_added_up_alike_in_any_number_of_workers() -> None:
    class Fractions(ScriptedGame):
        def step(self, actions: dict[str, Any]) -> Any:
            observations, rewards, *rest = super().step(actions)
            return observations, {a: r + self.np_random.normal() * 10**5 for a, r in rewards.items()}, *rest

    wanted = collect_with(
        SerialSampler, Fractions, RandomAgent(), env_kwargs={"k": 37}, bootstrap_value=False, batch_T=30
    )
    assert sum(len(infos) for _, infos in wanted) > 100
    for n_workers in scaled((2, 5), (3,)):
        found = collect_with(
            ParallelSampler,
            Fractions,
            RandomAgent(),
            env_kwargs={"k": 37},
            bootstrap_value=False,
            batch_T=30,
            n_workers=n_workers,
        )
        assert_same(wanted, found)


# ---- what is in the cells ----------------------------------------------------------------------


class Ones(RandomAgent):
    """Always takes action 1."""

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        step = super().step(observation, prev_action, prev_reward)
        return AgentStep(np.ones_like(step.action))

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        return 100 + observation[:, 1] + prev_reward / 16


# ---- values and advantages ---------------------------------------------------------------------


@pytest.mark.parametrize("record_final_obs", quick_first([True, False]))
def test_advantages_along_columns_are_those_of_whole_trajectories(record_final_obs: bool) -> None:
    gamma, lam, T = 0.97, 0.9, 8
    agent = Valued()
    with SerialSampler(
        ScriptedGame, env_kwargs=MIXED, batch_T=T, batch_B=5, record_final_obs=record_final_obs
    ) as sampler:
        sampler.initialize(agent, seed=1, bootstrap_value=True)
        n_compared = 0
        for itr in range(12):
            sampler.obtain_samples(itr)
            samples = sampler.samples_np
            advantage, returns = gae(Steps.of(samples), gamma, lam)
            n_compared += _compare_with_trajectories(samples, advantage, returns, gamma, lam)
        assert n_compared > 500


def _compare_with_trajectories(samples: Any, advantage: Any, returns: Any, gamma: float, lam: float) -> int:
    env, agent, n = samples.env, samples.agent, 0
    value = agent.agent_info.value
    for b in range(env.valid.shape[1]):
        rows: list[int] = []
        for t in range(len(env.valid)):
            if not env.valid[t, b]:
                assert not rows
                continue
            rows.append(t)
            is_last = t == len(env.valid) - 1
            if not (env.done[t, b] or is_last):
                continue
            if env.terminated[t, b]:
                after = 0.0
            elif env.done[t, b]:
                after = float(agent.final_value[t, b])
            else:
                after = float(agent.bootstrap_value[b])
            running = 0.0
            for row in reversed(rows):
                following = after if row == t else float(value[row + 1, b])
                running = float(env.reward[row, b]) + gamma * following - float(value[row, b]) + gamma * lam * running
                assert advantage[row, b] == pytest.approx(running, rel=1e-4, abs=1e-4)
                assert returns[row, b] == pytest.approx(running + float(value[row, b]), rel=1e-4, abs=1e-4)
                n += 1
            rows.clear()
    return n


# ---- trajectories ------------------------------------------------------------------------------


def test_a_game_s_record_has_the_rewards_of_all_agents_and_the_late_ones() -> None:
    script = [{}, {"a0": "die"}, {"a0": "late"}, {"a0": "late", "a1": "die"}]
    env_fn = partial(ScriptedGame, 2, script)
    with SerialSampler(env_fn, batch_T=6, batch_B=1, max_decorrelation_steps=0) as sampler:
        sampler.initialize(Ones(), seed=0, traj_info_kwargs={"discount": 0.5})
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
    with SerialSampler(partial(ScriptedGame, 2, script), batch_T=4, batch_B=2) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        with caplog.at_level("WARNING", logger="penstock"):
            for itr in range(3):
                sampler.obtain_samples(itr)
    told = [text for record in caplog.records if "had ended" in (text := record.getMessage())]
    assert len(told) == 1
    assert "stats().late_rewards" in told[0]


@pytest.mark.slow
@pytest.mark.parametrize("env_fn", [ScriptedGame, Odd])
@pytest.mark.parametrize("n_workers", [2, 1])
def test_a_traj_info_of_one_s_own_follows_each_agent(env_fn: Any, n_workers: int) -> None:
    options: dict[str, Any] = {"env_kwargs": MIXED, "batch_T": 20, "batch_B": 5, "max_decorrelation_steps": 0}
    with ParallelSampler(env_fn, traj_info_cls=Diary, n_workers=n_workers, **options) as sampler:
        sampler.initialize(Book(), seed=5)
        (seats,) = sampler.seats().values()
        open_steps: dict[Any, list[Any]] = {seat: [] for seat in seats}
        n_agents = n_games = 0
        for itr in range(5):
            _, infos = sampler.obtain_samples(itr)
            env, agent = sampler.samples_np.env, sampler.samples_np.agent
            finished = []
            for t in range(20):
                for b in np.flatnonzero(env.valid[t]):
                    flags = bool(env.terminated[t, b]), bool(env.truncated[t, b])
                    own = int(agent.agent_info.own[t, b])
                    step = (env.observation[t, b].tolist(), int(agent.action[t, b]), float(env.reward[t, b]), *flags)
                    open_steps[seats[b]].append((*step, own, {}))
                    if env.done[t, b]:
                        finished.append((*seats[b], open_steps[seats[b]], env.final_obs[t, b].tolist()))
                        open_steps[seats[b]] = []
            found = [
                (
                    i.env_rank,
                    i.agent_id,
                    [(seen.tolist(), *rest, int(told.own), info) for seen, *rest, told, info in i.steps],
                    i.end.tolist(),
                )
                for i in infos
                if i.agent_id is not None
            ]
            assert found == finished
            games = [info for info in infos if info.agent_id is None]
            assert all(info.steps == [] and info.end is None and info.Length > 0 for info in games)
            n_agents, n_games = n_agents + len(finished), n_games + len(games)
        assert n_agents > 50
        assert n_games > 20


class LongTurns(TurnGame):
    """A game has 150 moves, and then all agents end."""

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        super().reset(seed)
        self._most = 150


@pytest.mark.parametrize("traj_info_cls", [type("OwnTrajInfo", (TrajInfo,), {}), TrajInfo])
@pytest.mark.parametrize("in_turns", [False, True])
def test_trajectories_of_a_long_evaluation_are_in_the_order_of_their_episodes(
    in_turns: bool, traj_info_cls: Any
) -> None:
    """An evaluation is collected in parts of 128 rows."""
    script = [{"a0": "die"} if t == 99 else {} for t in range(150)]
    env_fn = partial(LongTurns, 2, ends=False) if in_turns else partial(ScriptedGame, 2, script)
    options = {"eval_n_envs": 2, "eval_episodes": 10, "eval_max_steps": 2000}
    with SerialSampler(env_fn, batch_T=2, batch_B=1, traj_info_cls=traj_info_cls, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        infos = sampler.evaluate_agent(0)
    wanted = [(episode, rank, agent) for episode in range(5) for rank in range(2) for agent in ("a0", "a1", None)]
    assert [(info.episode, info.env_rank, info.agent_id) for info in infos] == wanted
    by_agent = {agent: [info.Length for info in infos if info.agent_id == agent] for agent in ("a0", "a1", None)}
    assert by_agent[None] == [150] * 10
    if in_turns:
        assert [sum(both) for both in zip(by_agent["a0"], by_agent["a1"], strict=True)] == [150] * 10
    else:
        assert (by_agent["a0"], by_agent["a1"]) == ([100] * 10, [150] * 10)


# ---- what policies remember --------------------------------------------------------------------


@pytest.mark.slow
def test_the_first_row_after_random_steps_continues_the_trajectory() -> None:
    options: dict[str, Any] = {"env_kwargs": MIXED, "batch_T": 1, "batch_B": 5, "max_decorrelation_steps": 40}
    n_within = 0
    for seed in range(scaled(200, 10)):
        with SerialSampler(ScriptedGame, **options) as sampler:
            sampler.initialize(Book(), seed=seed)
            sampler.obtain_samples(0)
            env, agent = sampler.samples_np.env, sampler.samples_np.agent
            info, starts, count = agent.agent_info, env.prev_done[0], env.observation[0, :, 2]
            assert (starts == (env.valid[0] & (count == 0))).all()
            within = env.valid[0] & (count > 0)
            # The reward of a step is its number in the game plus the action.
            reward = env.observation[0, :, 1] + agent.prev_action[0]
            np.testing.assert_array_equal(env.prev_reward[0], np.where(within, reward, 0))
            np.testing.assert_array_equal(info.prev_reward[0][within], reward[within])
            np.testing.assert_array_equal(info.prev_action[0][within], agent.prev_action[0][within])
            assert not info.prev_action[0][starts].any()
            assert not info.prev_reward[0][starts].any()
            n_within += int(within.sum())
    assert n_within > 50


@pytest.mark.parametrize("length", [5, 30])  # random steps end some games, or none
def test_the_length_of_a_trajectory_contains_its_random_steps(length: int) -> None:
    env_fn = partial(ScriptedGame, 2, [{}] * length)
    with SerialSampler(env_fn, batch_T=60, batch_B=6, max_decorrelation_steps=29) as sampler:
        sampler.initialize(RandomAgent(), seed=1)
        _, infos = sampler.obtain_samples(0)
        assert len({int(row) for row in sampler.samples_np.env.observation[0, :, 1]}) > 3
        assert {info.Length for info in infos} == {length}
        for rank in range(6):
            own = [info for info in infos if info.env_rank == rank][:3]
            assert [info.agent_id for info in own] == ["a0", "a1", None]
            assert own[2].Return == own[0].Return + own[1].Return


# ---- other kinds of environments ---------------------------------------------------------------


@pytest.mark.slow
def test_every_environment_is_closed(tmp_path: Any) -> None:
    class Noted(ScriptedGame):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self._file = tmp_path / str(time.monotonic_ns())
            self._file.touch()

        def close(self) -> None:
            self._file.unlink()

    options: dict[str, Any] = {"env_kwargs": [{"k": 1}, {"k": 2}], "batch_T": 3, "batch_B": 2}
    for cls in (SerialSampler, ParallelSampler):
        with cls(Noted, eval_n_envs=2, env_info=True, **options) as sampler:
            sampler.initialize(Valued(), seed=0, bootstrap_value=True)
            sampler.obtain_samples(0)
            assert len(list(tmp_path.iterdir())) == 4
        assert not list(tmp_path.iterdir())
    for agents, policy_of in (({"x": Valued()}, lambda agent: 1 / 0), (RandomAgent(mask_key="observation.x"), None)):
        with SerialSampler(Noted, **options) as sampler, pytest.raises(ConfigError):
            sampler.initialize(agents, policy_of=policy_of)
        assert not list(tmp_path.iterdir())


def test_an_agent_may_copy_itself_in_a_worker() -> None:
    class Copying(Valued):
        def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
            assert list(copy.deepcopy(self).env_ranks or []) == list(self.env_ranks or [])
            return super().step(observation, prev_action, prev_reward)

    assert_same(
        collect_with(SerialSampler, ScriptedGame, Valued(), n=2),
        collect_with(SerialSampler, ScriptedGame, Copying(), n=2),
    )


@pytest.mark.slow
def test_hundreds_of_agents() -> None:
    with SerialSampler(
        ScriptedGame, env_kwargs={"k": 600}, batch_T=6, batch_B=2, max_decorrelation_steps=10
    ) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        samples, infos = sampler.obtain_samples(0)
        assert samples.env.reward.shape == (6, 1200)
        check_rules(sampler.samples_np)
        assert sum(info.agent_id is not None for info in infos) == int(samples.env.done.sum()) > 100


def check_drawn(drawn: Any, n_step: int, discount: float) -> None:
    """Transitions of a `ScriptedGame`, whose reward is the step of the game plus the action."""
    before, after, factor = (np.asarray(each) for each in (drawn.observation, drawn.next_observation, drawn.discount))
    assert (before[:, 0] > 0).all()  # an agent's number + 1: of no idle cell
    goes_on = factor > 0
    assert goes_on.any()
    assert not goes_on.all()
    n = np.rint(np.log(factor[goes_on]) / np.log(discount))
    np.testing.assert_array_equal(after[goes_on][:, 2], before[goes_on][:, 2] + n)  # own steps
    np.testing.assert_array_equal(after[goes_on][:, 0], before[goes_on][:, 0])
    assert ((n >= 1) & (n <= n_step)).all()
    if n_step == 1:
        np.testing.assert_allclose(drawn.return_, before[:, 1] + 1 + np.asarray(drawn.action))


@pytest.mark.parametrize(
    "kwargs", quick_first([{}, {"ratio": Ratio(2.0)}, {"server": "process"}, {"lag": 1, "ratio": Ratio(2.0)}])
)
def test_workers_write_the_cells_of_their_seats_into_a_replay(kwargs: dict[str, Any]) -> None:
    replay = Replay(capacity=20_000, discount=0.9, seed=0)
    with AsyncSampler(
        ScriptedGame, env_kwargs=MIXED, batch_T=10, batch_B=5, n_workers=3, replay=replay, **kwargs
    ) as sampler:
        sampler.initialize(Valued(), seed=1)
        sampler.start()
        infos = []
        while len(infos) < 200:
            drawn = replay.sample(64)
            infos += sampler.take_traj_infos()
        check_drawn(drawn, 1, 0.9)
        assert {info.env_rank for info in infos} == set(range(5))
        for rank in range(5):
            games = [info.episode for info in infos if info.env_rank == rank and info.agent_id is None]
            assert games == list(range(len(games)))


def test_env_info_is_recorded_for_each_seat() -> None:
    class Telling(ScriptedGame):
        def _infos(self) -> Any:
            return {agent: {"own": own, "who": float(agent[1:])} for agent, own in self._own.items()}

    for env_fn in (Telling, partial(Telling, start=["a1"])):
        with SerialSampler(
            env_fn, batch_T=30, batch_B=3, env_info=["own", "who"], max_decorrelation_steps=0
        ) as sampler:
            sampler.initialize(RandomAgent(), seed=0)
            for itr in range(3):
                sampler.obtain_samples(itr)
                env = sampler.samples_np.env
                info, valid = env.env_info, env.valid
                np.testing.assert_array_equal(info.own, np.where(valid, env.observation[..., 2] + 1, 0))
                np.testing.assert_array_equal(info.who[valid], env.observation[..., 0][valid] - 1)
                assert (info["_own"] == valid).all()
