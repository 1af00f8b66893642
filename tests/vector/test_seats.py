"""ShmVectorEnv on environments of several agents: who sits where, ends, idle stretches, late rewards, failures."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from hypothesis import given
from hypothesis import strategies as st

from penstock import ConfigError, SamplerStateError, SpaceError, WorkerError
from penstock.envs import CountingEnv, ScriptedGame
from penstock.vector import ShmVectorEnv

from ..scale import examples, scaled

FIELDS = ("observation", "reward", "terminated", "truncated", "final_obs", "valid", "alive", "late_reward")
DIES = [{}, {"a0": "die"}, {"a0": "late"}, {"a0": "join", "a1": "cut"}, {}]


def row_of_zeros(k: int) -> dict[str, Any]:
    row: dict[str, Any] = {name: np.zeros(k) for name in ("reward", "late_reward")}
    row |= {name: np.zeros(k, bool) for name in ("terminated", "truncated", "valid", "alive")}
    return row | {name: np.zeros((k, 4), np.float32) for name in ("observation", "final_obs")}


class Plain:
    """What the seats of one ScriptedGame must show, step by step, in plain Python."""

    def __init__(self, game: Any) -> None:
        self.game, self.seats = game, game.possible_agents

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        row = row_of_zeros(len(self.seats))
        self._begin(row, seed)
        return row

    def _begin(self, row: dict[str, Any], seed: int | None = None) -> None:
        observations, _ = self.game.reset(seed=seed)
        self._show(row, observations)

    def _show(self, row: dict[str, Any], observations: Any) -> None:
        for i, agent in enumerate(self.seats):
            row["alive"][i] = agent in self.game.agents
            row["observation"][i] = observations[agent] if row["alive"][i] else 0

    def step(self, actions: Any) -> dict[str, Any]:
        row, acting = row_of_zeros(len(self.seats)), list(self.game.agents)
        given = {agent: int(action) for agent, action in zip(self.seats, actions, strict=True) if agent in acting}
        observations, rewards, terminated, truncated, _ = self.game.step(given)
        for i, agent in enumerate(self.seats):
            row["valid"][i] = agent in acting
            row["reward" if agent in acting else "late_reward"][i] = rewards.get(agent, 0.0)
            row["terminated"][i] = agent in acting and terminated[agent]
            row["truncated"][i] = agent in acting and truncated[agent]
            if row["terminated"][i] or row["truncated"][i]:
                row["final_obs"][i] = observations[agent]
        if self.game.agents:
            self._show(row, observations)
        else:
            self._begin(row)
        row["truncated"] |= ~row["valid"] & row["alive"]  # an idle stretch ends
        return row


def joined(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: np.concatenate([row[name] for row in rows]) for name in FIELDS}


def shown(envs: ShmVectorEnv, results: Any) -> dict[str, Any]:
    observation, reward, terminated, truncated, infos = results
    final_obs = np.zeros_like(observation)
    for i in np.flatnonzero(infos.get("_final_obs", ())):
        final_obs[i] = infos["final_obs"][i]
    assert np.array_equal(infos.get("_final_obs", np.zeros(envs.num_envs, bool)), terminated | truncated)
    states = [infos[name] for name in FIELDS[5:]]
    values = (observation, reward, terminated, truncated, final_obs, *states)
    return dict(zip(FIELDS, values, strict=True))


def assert_rows(got: dict[str, Any], wanted: dict[str, Any], t: int) -> None:
    for name in FIELDS:
        assert got[name].dtype == wanted[name].dtype, name
        np.testing.assert_array_equal(got[name], wanted[name], err_msg=f"{name} of step {t}")


def run_beside_plain(games: list[Any], n_steps: int, seed: int = 3, **kwargs: Any) -> dict[str, Any]:
    """All steps equal those of `Plain`. Returns the sums of the rewards in cells and late, and of the ledgers."""
    plain, rng = [Plain(game()) for game in games], np.random.default_rng(seed)
    sums = {"cells": 0.0, "late": 0.0}
    with ShmVectorEnv(games, **kwargs) as envs:
        observation, infos = envs.reset(seed=seed)
        wanted = joined([one.reset(seed + e) for e, one in enumerate(plain)])
        np.testing.assert_array_equal(observation, wanted["observation"])
        np.testing.assert_array_equal(infos["alive"], wanted["alive"])
        assert not infos["valid"].any()
        first = np.cumsum([0, *(len(one.seats) for one in plain)])
        for t in range(n_steps):
            actions = rng.integers(0, 3, envs.num_envs)
            got = shown(envs, envs.step(actions))
            own = [actions[first[e] : first[e + 1]] for e in range(len(plain))]
            assert_rows(got, joined([one.step(part) for one, part in zip(plain, own, strict=True)]), t)
            assert not got["reward"][~got["valid"]].any()
            sums["cells"] += got["reward"].sum()
            sums["late"] += got["late_reward"].sum()
        sums["ledger"] = sum(envs.get_attr("ledger"))
    return sums


# ---- rows ------------------------------------------------------------------------------------


def test_a_game_with_a_death_a_late_reward_and_a_return() -> None:
    with ShmVectorEnv([partial(ScriptedGame, 2, DIES)], n_workers=1) as envs:
        assert envs.seats == [(0, "a0"), (0, "a1")]
        assert (envs.num_envs, envs.autoreset_mode) == (2, AutoresetMode.SAME_STEP)
        assert envs.observation_space.shape == (2, 4)
        envs.reset(seed=0)
        rows = [shown(envs, envs.step(np.array([1, 2]))) for _ in range(5)]
    column = {name: [row[name][0].tolist() for row in rows] for name in FIELDS}
    assert column["reward"] == [2, 3, 0, 0, 6]
    assert column["terminated"] == [False, True, False, False, False]
    assert column["truncated"] == [False, False, False, True, True]  # it joins in step 3; the game is over in step 4
    assert column["valid"] == [True, True, False, False, True]
    assert column["alive"] == [True, False, False, True, True]
    assert column["late_reward"] == [0, 0, 0.5, 0, 0]
    assert column["observation"][1] == column["observation"][2] == [0, 0, 0, 0]
    assert column["final_obs"][1][:3] == [1, 2, 2]
    assert column["final_obs"][3] == [0, 0, 0, 0]
    assert column["final_obs"][4][:3] == [1, 5, 1]
    assert [row["truncated"][1] for row in rows] == [False, False, False, True, True]
    # a1 was idle until the reset in the last step, which returned its first observation
    assert [row["valid"][1] for row in rows] == [True, True, True, True, False]


@pytest.mark.slow
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 2**31), st.sampled_from([1, 2, 3, 5]))
@examples(6, 60)
def test_random_games_equal_a_plain_loop_and_lose_no_reward(ks: list[int], seed: int, n_workers: int) -> None:
    makers = {k: partial(ScriptedGame, k) for k in ks}
    sums = run_beside_plain([makers[k] for k in ks], scaled(150, 60), seed, n_workers=n_workers)
    assert sums["cells"] + sums["late"] == pytest.approx(sums["ledger"], abs=0)
    assert sums["cells"] > 0


# ---- whole environments ------------------------------------------------------------------------


def test_send_and_recv_name_environments() -> None:
    with ShmVectorEnv([partial(ScriptedGame, k, [{}] * 9) for k in (2, 3, 1)], n_workers=2) as envs:
        envs.reset(seed=4)
        envs.send([2, 0, 1], [2, 0])  # the rows of environment 2, then those of environment 0
        observation, reward, *_, infos = envs.recv(min_ready=2)
        assert infos["env_id"].tolist() == [0, 2]
        assert infos["seat_id"].tolist() == [0, 1, 5]
        assert reward.tolist() == [1 + 0, 1 + 1, 1 + 2]
        assert observation[:, :2].tolist() == [[1, 1], [2, 1], [1, 1]]
        assert infos["valid"].tolist() == infos["alive"].tolist() == [True] * 3
        envs.send([0, 0], [0])
        with pytest.raises(SamplerStateError, match=r"environments \[0\] have not been received yet"):
            envs.send([0, 0], [0])
        with pytest.raises(ConfigError, match="env_ids must be different indices from 0 to 2"):
            envs.send([0], [3])


def test_resets_of_some_environments_and_their_seeds() -> None:
    with ShmVectorEnv([partial(ScriptedGame, 2, [{}] * 9)] * 3, n_workers=2) as envs:
        first = envs.reset(seed=[7, 8, 7])[0]
        assert np.array_equal(first[:2], first[4:])
        assert not np.array_equal(first[:2], first[2:4])
        assert np.array_equal(envs.reset(seed=7)[0][:4], first[:4])
        with pytest.raises(ConfigError, match="seed must be a list of 3 seeds, one for each environment, got 6"):
            envs.reset(seed=[1] * 6)
        envs.step(np.zeros(6, int))
        observation, infos = envs.reset(options={"reset_mask": np.array([False, True, False])})
        assert observation[:, 1].tolist() == [1, 1, 0, 0, 1, 1]
        assert infos["alive"].all()
        with pytest.raises(ConfigError, match="must be a numpy array of 3 bools"):
            envs.reset(options={"reset_mask": np.ones(6, bool)})


class Quiet(ScriptedGame):
    """Has attributes and a picture."""

    render_mode = "rgb_array"
    level = 1

    def render(self) -> Any:
        return np.full((2, 3, 3), self.level, np.uint8)

    def twice(self, x: int) -> int:
        return 2 * x * self.level


def test_calls_go_to_environments() -> None:
    with ShmVectorEnv([partial(Quiet, 3)] * 2) as envs:
        envs.reset(seed=0)
        assert envs.call("twice", 4) == (8, 8)
        envs.set_attr("level", [1, 5])
        assert envs.get_attr("level") == (1, 5)
        assert envs.call_some([1], "twice", 4) == (40,)
        envs.broadcast({"level": 7}, [0])
        assert envs.apply(lambda game: (type(game).__name__, game.level)) == (("Quiet", 7), ("Quiet", 5))
        assert envs.render_mode == "rgb_array"
        # One for each row, as Gymnasium's RecordVideo asserts.
        assert [int(frame.max()) for frame in envs.render() or ()] == [7] * 3 + [5] * 3
        assert envs.render_tiled().shape == (2, 6, 3)
        with pytest.raises(ConfigError, match="set_attr needs one value, or 2 of them"):
            envs.set_attr("level", [1] * 6)


class Telling(ScriptedGame):
    """Infos of every kind, in dicts that are used again."""

    def _infos(self) -> Any:
        shared: dict[str, Any] = {}
        for agent in self._own:
            shared[agent] = {"t": self.t} if agent != "a1" else {}
        shared["nobody"] = {"t": -1}
        return shared


def test_infos_of_ordinary_steps_ends_and_resets() -> None:
    with ShmVectorEnv([partial(Telling, 3, [{}, {"a0": "die"}, {}])] * 2, n_workers=1) as envs:
        _, infos = envs.reset(seed=0)
        assert infos["t"].tolist() == [0, 0, 0] * 2
        assert infos["_t"].tolist() == [True, False, True] * 2
        infos = envs.step(np.zeros(6, int))[-1]
        assert infos["_t"].tolist() == [True, False, True] * 2
        infos = envs.step(np.zeros(6, int))[-1]
        assert infos["final_info"]["_t"].tolist() == [True, False, False] * 2
        assert infos["_t"].tolist() == [False, False, True] * 2
        infos = envs.step(np.zeros(6, int))[-1]
        assert infos["final_info"]["_t"].tolist() == [False, False, True] * 2
        assert infos["final_info"]["t"].tolist()[2] == 3
        assert infos["_t"].tolist() == [True, False, True] * 2  # of the reset
        assert infos["t"].tolist() == [0] * 6


# ---- refusals ------------------------------------------------------------------------------------


class Unlike(ScriptedGame):
    """Two agents with different spaces."""

    def __init__(self, kind: str) -> None:
        super().__init__(2)
        self.kind = kind

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-1, 1, (3 + (self.kind == "observation") * int(agent[1:]),))

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3 + (self.kind == "action") * int(agent[1:]))


class Texts(ScriptedGame):
    def observation_space(self, agent: str) -> Any:
        return spaces.Text(4)


class Turns(ScriptedGame):
    def agent_iter(self) -> None:
        """As AECEnv has it."""


class Varying(ScriptedGame):
    """As many agents as its environment's number, plus one."""

    def __init__(self, context: Any) -> None:
        super().__init__(1 + context.env_rank)


UNLIKE = "{0}_space of agent 'a1' is .*, that of agent 'a0' is .*pad"


@pytest.mark.parametrize(
    ("env_fns", "error", "problem"),
    [
        ([partial(Unlike, "observation")] * 2, SpaceError, UNLIKE.format("observation")),
        ([partial(Unlike, "action")] * 2, SpaceError, UNLIKE.format("action")),
        ([ScriptedGame, partial(Unlike, "neither")], WorkerError, "of env_rank 1 is .*must have the same spaces"),
        ([ScriptedGame, CountingEnv], ConfigError, r"env_fns\[1\] returns CountingEnv, an environment of one agent"),
        ([CountingEnv, ScriptedGame], WorkerError, r"several agents, but env_fns\[0\] returns an environment"),
        ([Texts], SpaceError, "observation has a Text space"),
        ([Turns], ConfigError, r"is played in turns .*: give a ParallelEnv"),
        pytest.param([Varying] * 2, WorkerError, "env_rank 1 are .*different functions", marks=pytest.mark.slow),
    ],
)
def test_environments_that_do_not_fit_are_refused(env_fns: Any, error: Any, problem: str) -> None:
    with pytest.raises(error, match=problem):
        ShmVectorEnv(env_fns)


def test_other_modes_and_given_spaces_are_refused() -> None:
    for mode in ("NEXT_STEP", AutoresetMode.DISABLED):
        with pytest.raises(ConfigError, match=r'must be "SAME_STEP", which is their default: .*nobody is left'):
            ShmVectorEnv([ScriptedGame], autoreset_mode=mode)
    one = CountingEnv()
    with pytest.raises(WorkerError, match="leave `spaces` out"):
        ShmVectorEnv([ScriptedGame], spaces=(one.observation_space, one.action_space))


# ---- bad data --------------------------------------------------------------------------------


class Bad(ScriptedGame):
    """Something is wrong with one agent's part of what its second step returns. By then a0 has died."""

    def __init__(self, part: int, agent: str, value: Any) -> None:
        super().__init__(3, [{"a0": "die"}, *[{}] * 5])
        self.wrong = part, agent, value

    def step(self, actions: Any) -> Any:
        result, (part, agent, value) = super().step(actions), self.wrong
        if self.t == 2:
            result[part][agent] = value
        return result


NANS = np.full(4, np.nan, np.float32)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ((0, "stranger", NANS), WorkerError, "env_rank 1, agent 'stranger' is not one of possible_agents"),
        ((0, "a1", NANS), SpaceError, "observation of env_rank 1, agent 'a1' must be finite"),
        ((1, "a2", np.nan), SpaceError, "reward of env_rank 1, agent 'a2' must be finite"),
        ((1, "a0", np.nan), SpaceError, "late_reward of env_rank 1, agent 'a0' must be finite"),
    ],
)
def test_bad_data_name_environment_and_agent(wrong: Any, error: Any, words: str) -> None:
    with ShmVectorEnv(
        [partial(ScriptedGame, 3, [{}] * 6), partial(Bad, *wrong)], n_workers=1, check_finite=True
    ) as envs:
        envs.reset(seed=0)
        envs.step(np.zeros(6, int))
        with pytest.raises(SpaceError, match="action must have shape"):
            envs.step(np.zeros(5, int))
        with pytest.raises(error, match=words):
            envs.step(np.zeros(6, int))


# ---- failures --------------------------------------------------------------------------------


def test_a_killed_worker_is_replaced_and_its_seats_are_cut_off() -> None:
    games = [partial(ScriptedGame, 3, DIES)] * 2
    with ShmVectorEnv(games, n_workers=2, on_worker_failure="restart") as envs:
        envs.reset(seed=0)
        for _ in range(2):
            before = envs.step(np.zeros(6, int))[0]
        os.kill(envs.worker_pids[1], signal.SIGKILL)
        observation, reward, terminated, truncated, infos = envs.step(np.zeros(6, int))
        assert envs.n_restarts == 1
        assert truncated.tolist() == [False] * 3 + [True] * 3
        assert not terminated.any()
        assert reward[3:].tolist() == [0, 0, 0]
        assert infos["valid"].tolist() == [False, True, True] + [False] * 3
        assert infos["alive"].tolist() == [False, True, True] + [True] * 3
        assert infos["final_info"]["worker_restarted"].tolist() == [False] * 3 + [True] * 3
        for row in range(3, 6):
            assert np.array_equal(infos["final_obs"][row], before[row])  # zeros for the seat that was idle
        assert observation[3:, 1].tolist() == [0, 0, 0]  # a new episode
        again = envs.step(np.zeros(6, int))
        assert again[1][3:].tolist() == [1, 1, 1]
        assert again[-1]["valid"][3:].all()
        assert not again[3][3:].any()


@pytest.mark.slow
def test_a_replacement_while_environments_step_one_by_one() -> None:
    with ShmVectorEnv([partial(ScriptedGame, 2, [{}] * 9)] * 3, n_workers=1, on_worker_failure="restart") as envs:
        envs.reset(seed=0)
        envs.step(np.zeros(6, int))
        os.kill(envs.worker_pids[0], signal.SIGKILL)
        envs.send(np.zeros(4, int), [2, 0])
        *_, truncated, infos = envs.recv(min_ready=2)
        assert infos["env_id"].tolist() == [0, 2]
        assert infos["final_info"]["worker_restarted"].all()
        assert truncated.all()
        envs.send(np.zeros(6, int))
        _, reward, _, truncated, infos = envs.recv(min_ready=3)
        assert reward.tolist() == [1, 1, 0, 0, 1, 1]  # now environment 1 is cut off
        assert truncated.tolist() == [False, False, True, True, False, False]
        assert infos["valid"].tolist() == [True, True, False, False, True, True]


@pytest.mark.slow
def test_a_reset_after_a_replacement_begins_a_game() -> None:
    with ShmVectorEnv([partial(ScriptedGame, 2, [{}] * 5)], on_worker_failure="restart") as envs:
        first = envs.reset(seed=3)[0]
        os.kill(envs.worker_pids[0], signal.SIGKILL)
        assert np.array_equal(envs.reset(seed=3)[0], first)
        results = envs.step([0, 0])
        assert results[1].tolist() == [1, 1]
        assert not results[3].any()
