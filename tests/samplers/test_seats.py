"""Environments of several agents: a column is a seat, in every sampler, with any number of workers."""

from __future__ import annotations

import copy
import functools
import time
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from penstock import (
    AsyncSampler,
    ConfigError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    SerialSampler,
    TrajInfo,
)
from penstock.envs import ColumnStreams, Purpose
from penstock.envs.seeding import eval_seed
from penstock.envs.toy import ScriptedGame
from penstock.learning import Ratio, Replay, Sequences, Steps, gae

from ..scale import quick_first, scaled
from ..support import EVALUATING, Diary, Follower, assert_same, check_rules, collect_with
from ..toy_games import OPENING, STORY, Book, Numbered, Odd, TurnGame, Valued

pytestmark = pytest.mark.timeout(scaled(3600, 120))

AGENTS = {"random": RandomAgent, "book": Book, "valued": Valued}
#: Environments with 4, 2, 5, 3 and 4 agents in one sampler.
MIXED = [{"k": k} for k in (4, 2, 5, 3, 4)]


def options_of(name: str) -> dict[str, Any]:
    return {"bootstrap_value": name != "random", "env_kwargs": MIXED}


@functools.cache
def reference(name: str) -> list[tuple[Any, Any]]:
    return collect_with(SerialSampler, ScriptedGame, AGENTS[name](), **EVALUATING, **options_of(name))


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
        return step._replace(action=np.ones_like(step.action))

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        return 100 + observation[:, 1] + prev_reward / 16


def test_the_cells_of_a_scripted_game() -> None:
    # a0 dies at 2, a1 is cut off at 4, a2 joins at 1, the game is over at 5.
    with SerialSampler(
        partial(ScriptedGame, 3, STORY, OPENING), batch_T=7, batch_B=1, max_decorrelation_steps=0
    ) as sampler:
        sampler.initialize(Ones(), seed=0, bootstrap_value=True)
        samples, infos = sampler.obtain_samples(0)
        env, agent = samples.numpy().env, samples.numpy().agent
        idle = 0
        assert env.valid.T.tolist() == [[1, 1, 0, 0, 0, 1, 1], [1, 1, 1, 1, 0, 1, 1], [0, 1, 1, 1, 1, 0, 1]]
        assert env.reward.T.tolist() == [
            [2, 3, idle, idle, idle, 2, 3],
            [2, 3, 4, 5, idle, 2, 3],
            [idle, 3, 4, 5, 6, idle, 3],
        ]
        assert env.observation[..., 1].T.tolist() == [  # the step of the game
            [0, 1, idle, idle, idle, 0, 1],
            [0, 1, 2, 3, idle, 0, 1],
            [idle, 1, 2, 3, 4, idle, 1],
        ]
        assert env.observation[..., 2].T.tolist() == [  # own steps
            [0, 1, idle, idle, idle, 0, 1],
            [0, 1, 2, 3, idle, 0, 1],
            [idle, 0, 1, 2, 3, idle, 0],
        ]
        assert env.terminated.T.tolist() == [[0, 1, 0, 0, 0, 0, 1], [0] * 7, [0] * 7]
        assert env.truncated.T.tolist() == [[0] * 7, [0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0, 0]]
        assert env.done.T.tolist() == [[0, 1, 0, 0, 0, 0, 1], [0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0, 0]]
        assert env.prev_done.T.tolist() == [[1, 0, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 1, 0], [0, 1, 0, 0, 0, 0, 1]]
        assert agent.action.T.tolist() == env.valid.T.astype(int).tolist()
        assert env.final_obs[..., 1].T.tolist() == [[0, 2, 0, 0, 0, 0, 2], [0, 0, 0, 4, 0, 0, 0], [0, 0, 0, 0, 5, 0, 0]]
        final = 100 + 4 + 5 / 16, 100 + 5 + 6 / 16
        assert agent.final_value.T.tolist() == [[0] * 7, [0, 0, 0, final[0], 0, 0, 0], [0, 0, 0, 0, final[1], 0, 0]]
        assert env.bootstrap_obs[:, :3].tolist() == [[0, 0, 0], [2, 2, 2], [3, 2, 1]]
        assert agent.bootstrap_value.tolist() == [0, 100 + 2 + 3 / 16, 100 + 2 + 3 / 16]
        assert [(i.env_rank, i.agent_id, i.policy, i.episode, i.Length, i.Return) for i in infos] == [
            (0, "a0", "agent", 0, 2, 5),
            (0, "a1", "agent", 0, 4, 14),
            (0, "a2", "agent", 0, 4, 18),
            (0, None, None, 0, 5, 37),
            (0, "a0", "agent", 1, 2, 5),
        ]


@pytest.mark.slow
@pytest.mark.parametrize("env_fn", [ScriptedGame, Odd])
def test_every_reward_is_in_one_cell_or_is_late(env_fn: Any) -> None:
    n_games = scaled(10**5, 400)
    with SerialSampler(env_fn, env_kwargs=MIXED, batch_T=50, batch_B=5, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent(), seed=2)
        (seats,) = sampler.seats().values()
        follower, found, games, late = Follower(seats), [], 0.0, 0
        itr = n_ended = 0
        while n_ended < n_games:
            _, infos = sampler.obtain_samples(itr)
            itr += 1
            follower.follow(sampler.samples_np)
            found += [(i.env_rank, i.agent_id, i.Length, i.Return) for i in infos if i.agent_id is not None]
            ended = [info for info in infos if info.agent_id is None]
            games += sum(info.Return for info in ended)
            n_ended += len(ended)
            late = sampler.stats().late_rewards
        assert found == follower.finished  # valid rows, compressed, are the trajectories
        emitted = sum(sampler.get_attr("ledger"))
        assert late > 0
        assert follower.total + 0.5 * late == emitted
        # What the games have returned so far contains the late rewards too, of all games but those that run.
        assert 0 <= emitted - games < 5 * 5 * 25 * 28


@pytest.mark.slow
def test_every_step_may_be_taken_the_careful_way() -> None:
    """`debug=True` lets no step pass as an ordinary one."""

    class Plain(TrajInfo):
        """Needs every step too."""

    for env_fn in (ScriptedGame, Odd):
        fast, careful = (
            collect_with(SerialSampler, env_fn, Book(), env_kwargs=MIXED, n=scaled(400, 4), batch_T=30, **kwargs)
            for kwargs in ({}, {"debug": True})
        )
        assert_same(fast, careful)
        watched = collect_with(
            SerialSampler, env_fn, Book(), env_kwargs=MIXED, n=scaled(400, 4), batch_T=30, traj_info_cls=Plain
        )
        assert_same([(batch, 0) for batch, _ in fast], [(batch, 0) for batch, _ in watched])


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


@pytest.mark.parametrize("n_workers", quick_first([1, 3]))
def test_there_is_one_record_for_each_end_and_each_game_in_order(n_workers: int) -> None:
    n_steps = scaled(10**6, 10**4)
    with ParallelSampler(ScriptedGame, env_kwargs=MIXED, batch_T=100, batch_B=5, n_workers=n_workers) as sampler:
        sampler.initialize(RandomAgent(), seed=3)
        (seats,) = sampler.seats().values()
        games, n_seen, itr = [0] * 5, 0, 0
        steps = [0] * 5
        while n_seen < n_steps:
            _, infos = sampler.obtain_samples(itr)
            itr += 1
            env = sampler.samples_np.env
            n_seen += int(env.valid.sum())
            # Nobody is left after row t where the environment's seats are all ended or idle.
            expected: list[tuple[int, Any, int]] = []
            firsts = np.cumsum([0, 4, 2, 5, 3])
            lives = env.valid & ~env.done
            for t in range(100):
                for e, (first, k) in enumerate(zip(firsts, (4, 2, 5, 3, 4), strict=True)):
                    ended = [b for b in range(first, first + k) if env.done[t, b]]
                    expected += [(e, seats[b][1], games[e]) for b in ended]
                    joins = env.valid[t + 1, first : first + k] if t < 99 else env.bootstrap_obs[first : first + k, 0]
                    starts = env.observation[t + 1] if t < 99 else env.bootstrap_obs
                    is_new = bool(np.any(joins)) and (starts[first : first + k, 1][np.asarray(joins) != 0] == 0).all()
                    steps[e] += 1
                    if is_new:  # the game began again at step 0
                        assert not lives[t, first : first + k].any()
                        expected.append((e, None, games[e]))
                        games[e] += 1
            assert [(info.env_rank, info.agent_id, info.episode) for info in infos] == expected
            assert all(info.policy == (None if info.agent_id is None else "agent") for info in infos)


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
def test_ids_may_be_integers_and_actions_dicts() -> None:
    with SerialSampler(Numbered, batch_T=12, batch_B=2, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        _, infos = sampler.obtain_samples(0)
        assert sampler.seats() == {"agent": [(rank, agent) for rank in range(2) for agent in (7, 1, 4)]}
        env, agent = sampler.samples_np.env, sampler.samples_np.agent
        assert env.valid[:, 1].tolist() == [True] * 3 + [False] * 2 + [True] * 3 + [False] * 2 + [True] * 2
        assert (env.observation.who == np.where(env.valid, [7, 1, 4] * 2, 0)).all()
        np.testing.assert_allclose(env.reward, agent.action.push.sum(-1) + 10 * agent.action.mode, rtol=1e-6)
        goes_on = env.valid[:-1] & ~env.done[:-1]
        np.testing.assert_allclose(env.observation.was[1:][goes_on], 2 * agent.action.push[:-1][goes_on], rtol=1e-6)
        assert not agent.action.push[~env.valid].any()
        assert [(i.env_rank, i.agent_id, i.Length) for i in infos[:2]] == [(0, 1, 3), (1, 1, 3)]


class Nested(ScriptedGame):
    """Observations and actions of many parts. Neither 0 nor a tuple of zeros is in their spaces."""

    def observation_space(self, agent: str) -> gym.Space[Any]:
        parts = spaces.MultiBinary(3), spaces.MultiDiscrete([3, 4]), spaces.Box(-9, 9, (), np.float32)
        return spaces.Dict(
            place=spaces.Box(-99, 99, (4,), np.float64), number=spaces.Discrete(5, start=1), rest=spaces.Tuple(parts)
        )

    def action_space(self, agent: str) -> gym.Space[Any]:
        return spaces.Tuple((spaces.Discrete(3, start=1), spaces.Box(-1, 1, (), np.float32)))

    def _observations(self) -> Any:
        return {
            agent: {
                "place": row.astype(np.float64) / 3,
                "number": 1 + int(row[2]) % 5,
                "rest": (np.array([1, 0, 1], np.int8), np.array([1, 2]), np.array(0.5, np.float32)),
            }
            for agent, row in super()._observations().items()
        }

    def step(self, actions: dict[str, Any]) -> Any:
        assert all(1 <= number <= 3 and push.shape == () for number, push in actions.values())
        return super().step({agent: number for agent, (number, _) in actions.items()})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, np.float32])
def test_observations_and_actions_may_have_many_parts(dtype: Any) -> None:
    options: dict[str, Any] = {"bootstrap_value": False, **EVALUATING, "observation_dtype": dtype}
    wanted = collect_with(SerialSampler, Nested, RandomAgent(), **options)
    careful: Any = (SerialSampler, {"debug": True, "check_finite": True})
    parallel: Any = (ParallelSampler, {"n_workers": 3})
    central: Any = (GpuSampler, {"n_workers": 3, "min_ready": 1})
    for cls, kwargs in scaled([careful, parallel, central], [parallel] if dtype is None else [careful, central]):
        assert_same(wanted, collect_with(cls, Nested, RandomAgent(), **options, **kwargs))
    for batch, _ in wanted:
        if batch is None:
            continue
        valid = batch.env.valid
        assert batch.env.observation.place.dtype == (dtype or np.float64)
        assert batch.env.observation.number[valid].min() >= 1
        for fields in (batch.env.observation, batch.agent.action):
            for path, leaf in fields.leaves():
                assert not leaf[~valid].any(), path


def test_a_trajectory_may_have_several_episodes() -> None:
    class Three(TrajInfo):
        def __init__(self) -> None:
            super().__init__()
            self.n = 0

        def traj_done(self, terminated: bool, truncated: bool, env_info: Any) -> bool:
            self.n += 1
            return self.n == 3

    script = [{"a0": "die"}, {}, {}, {}]
    with SerialSampler(
        partial(ScriptedGame, 2, script), batch_T=24, batch_B=1, traj_info_cls=Three, max_decorrelation_steps=0
    ) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        _, infos = sampler.obtain_samples(0)
        assert [(info.agent_id, info.Length) for info in infos if info.agent_id == "a0"] == [("a0", 3)] * 2
        assert [(info.agent_id, info.Length) for info in infos if info.agent_id == "a1"] == [("a1", 12)] * 2
        assert [info.Length for info in infos if info.agent_id is None] == [4] * 6


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


@pytest.mark.parametrize("n_workers", [1, 2])
def test_each_environment_is_seeded_once_by_its_env_rank(n_workers: int) -> None:
    class Seeded(ScriptedGame):
        def __init__(self) -> None:
            super().__init__(2, [{}] * 3)
            self.seeds: list[int | None] = []

        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            self.seeds.append(seed)
            return super().reset(seed, options)

    with ParallelSampler(
        Seeded, batch_T=9, batch_B=3, eval_n_envs=2, eval_max_steps=24, n_workers=n_workers
    ) as sampler:
        sampler.initialize(RandomAgent(), seed=5)
        sampler.obtain_samples(0)
        streams, found = ColumnStreams(5, range(3)), sampler.get_attr("seeds")
        assert [seeds[0] for seeds in found] == streams.env_seeds(Purpose.TRAIN)
        assert all(seeds[1:] == [None] * (len(seeds) - 1) and len(seeds) > 3 for seeds in found)
        for itr in range(2):
            sampler.evaluate_agent(itr)
        for e, seeds in enumerate(sampler.get_attr("seeds", evaluation=True)):
            n, once = len(seeds) // 2, [eval_seed(5, k) for k in range(e, 99, 2)]
            assert seeds == 2 * once[:n]
            assert n > 1


def test_seats_have_random_numbers_of_their_own() -> None:
    with SerialSampler(ScriptedGame, env_kwargs=MIXED, batch_T=30, batch_B=5) as sampler:
        sampler.initialize(Book(), seed=0)
        sampler.obtain_samples(0)
        noise = sampler.samples_np.agent.agent_info.noise
        drawn = noise[noise != 0]
        assert len(np.unique(drawn)) == len(drawn) > 200


def test_batches_can_be_taken_apart_with_idle_cells() -> None:
    with SerialSampler(ScriptedGame, env_kwargs=MIXED, batch_T=12, batch_B=5) as sampler:
        sampler.initialize(Valued(), seed=0, bootstrap_value=True)
        for itr in range(3):
            samples, _ = sampler.obtain_samples(itr)
            env, valid = samples.env, samples.env.valid
            n = int(valid.sum())
            assert n < valid.numel()
            flat = samples.flatten()
            assert flat.env.valid.all()
            torch.testing.assert_close(flat.env.reward, env.reward[valid])
            steps = samples.transitions(0.9)
            assert len(steps.reward) == n
            following = torch.zeros_like(env.observation)
            following[:-1], following[-1] = env.observation[1:], env.bootstrap_obs
            following[env.done] = env.final_obs[env.done]
            torch.testing.assert_close(steps.next_observation, following[valid])
            torch.testing.assert_close(steps.discount, torch.where(env.terminated, 0.0, 0.9)[valid])
            parts = list(samples.minibatches(4, np.random.default_rng(0)))
            assert sum(len(part.env.reward) for part in parts) == n
            assert sorted(torch.cat([part.env.reward for part in parts]).tolist()) == sorted(flat.env.reward.tolist())
            cut = samples.sequences(4)
            assert cut.env.valid.any(0).all()
            assert int(cut.env.valid.sum()) == n


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


@pytest.mark.slow
@pytest.mark.parametrize("n_step", [1, 3])
def test_a_replay_draws_no_idle_cell(n_step: int) -> None:
    replay = Replay(capacity=40_000, n_step=n_step, discount=0.9, seed=0)
    with SerialSampler(ScriptedGame, env_kwargs=MIXED, batch_T=20, batch_B=5) as sampler:
        sampler.initialize(Valued(), seed=0)
        seen = set()
        for itr in range(6):
            sampler.obtain_samples(itr)
            env = sampler.samples_np.env
            seen |= {tuple(row) for row in env.observation[env.valid].tolist()}
            replay.append(sampler.samples_np)
        drawn = replay.sample(4000)
        check_drawn(drawn, n_step, 0.9)
        rows = {tuple(row) for row in np.asarray(drawn.observation).tolist()}
        assert rows <= seen
        assert len(rows) > len(seen) // 2


def test_a_replay_draws_sequences_across_idle_cells() -> None:
    replay = Replay(capacity=40_000, discount=0.9, sequences=Sequences(length=5), seed=0)
    with SerialSampler(ScriptedGame, env_kwargs=MIXED, batch_T=20, batch_B=5) as sampler:
        sampler.initialize(Book(), seed=0)
        for itr in range(6):
            sampler.obtain_samples(itr)
            replay.append(sampler.samples_np)
        drawn = replay.sample(2000)
        row, starts, mask = (np.asarray(each) for each in (drawn.observation, drawn.prev_done, drawn.mask))
        assert (row[: len(mask)][mask > 0][:, 0] > 0).all()
        both = (mask[:-1] > 0) & (mask[1:] > 0)
        begins = starts[1 : len(mask)][both]
        own, following = row[: len(mask) - 1][both][:, 2], row[1 : len(mask)][both][:, 2]
        np.testing.assert_array_equal(following, np.where(begins, 0, own + 1))


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


@pytest.mark.slow
@pytest.mark.parametrize("record_final_obs", [True, False])
def test_extra_checks_accept_idle_seats(record_final_obs: bool) -> None:
    options = {"env_kwargs": MIXED, "record_final_obs": record_final_obs}
    plain = collect_with(SerialSampler, ScriptedGame, Book(), **options)
    assert any(not batch.env.valid.all() for batch, _ in plain)
    checked = collect_with(SerialSampler, ScriptedGame, Book(), debug=True, check_finite=True, **options)
    assert_same(plain, checked)


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


def test_slots_keep_batches_readable() -> None:
    wanted = [batch for batch, _ in reference("book") if batch is not None]
    with SerialSampler(
        ScriptedGame, env_kwargs=MIXED, batch_T=9, batch_B=5, max_decorrelation_steps=12, n_slots=3, debug=True
    ) as sampler:
        sampler.initialize(Book(), seed=7, bootstrap_value=True)
        held = []
        for itr in range(5):
            samples, _ = sampler.obtain_samples(itr)
            held.append(samples)
            for back in range(min(3, itr + 1)):
                for (name, left), (_, right) in zip(
                    wanted[itr - back].leaves(), held[itr - back].numpy().leaves(), strict=True
                ):
                    np.testing.assert_array_equal(left, right, err_msg=f"{name}, batch {itr - back} at {itr}")
