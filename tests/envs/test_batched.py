"""Batched environments that reset within the step: seeds, streams, results at an episode's end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from penstock.envs import BatchedCartPole, BatchedEnvPool, SameStep
from penstock.errors import ConfigError

from ..support import assert_same

pytestmark = pytest.mark.slow


def stepped(env: Any, n: int, seed: Any, columns: Any = slice(None), width: int = 4) -> list[Any]:
    """`n` steps with the actions of `width` columns; `env` has `columns` of them."""
    actions = np.random.default_rng(0).integers(0, 2, (n, width))[:, columns]
    seen = [env.reset(seed=seed)[0].copy()]
    for row in actions:
        observation, reward, terminated, truncated, infos = env.step(row)
        final = np.where((terminated | truncated)[:, None], infos.get("final_obs", observation), 0)
        seen.append(np.column_stack([observation, reward, terminated, truncated, final]))
    return seen


def cartpole(n: int) -> Any:
    return BatchedCartPole(n, max_episode_steps=30)


def envpool(n: int) -> Any:
    pytest.importorskip("envpool")
    return BatchedEnvPool("CartPole-v1", n, max_episode_steps=30)


both = pytest.mark.parametrize("make", [cartpole, envpool])


@both
def test_a_row_depends_only_on_its_seed(make: Any) -> None:
    seeds = [2**32 - 1, 7, 0, 2**31]
    env, part = make(4), make(2)
    whole = stepped(env, 200, seeds)
    assert_same(whole, stepped(env, 200, seeds))
    assert_same([row[1:3] for row in whole], stepped(part, 200, seeds[1:3], slice(1, 3)))
    assert_same(stepped(make(4), 5, 7), stepped(make(4), 5, [7, 8, 9, 10]))
    assert not np.array_equal(whole[0][0], whole[0][1])


@both
def test_without_a_seed_the_streams_continue_and_differ(make: Any) -> None:
    env = make(3)
    first, second = env.reset(seed=1)[0].copy(), env.reset()[0].copy()
    assert len({row.tobytes() for row in (*first, *second)}) == 6
    unseeded = make(3).reset()[0]
    assert len({row.tobytes() for row in unseeded}) == 3
    env.close()
    env.close()


@both
def test_a_row_is_reset_in_the_step_that_ends_its_episode(make: Any) -> None:
    env = make(4)
    env.reset(seed=0)
    length, ends = np.zeros(4, int), 0
    for t in range(300):
        observation, reward, terminated, truncated, infos = env.step(np.full(4, (t // 2) % 2))
        length += 1
        done = terminated | truncated
        assert (reward == 1).all()
        assert ("final_obs" in infos) == done.any()
        if done.any():
            assert (infos["_final_obs"] == done).all()
            assert (infos["_final_info"] == done).all()
            assert (np.abs(observation[done]) <= 0.05).all()
            out = (np.abs(infos["final_obs"][:, [0, 2]]) > (2.4, 12 * np.pi / 180)).any(axis=1)
            assert (out[terminated]).all()
            assert (length[truncated] == 30).all()
        length[done] = 0
        ends += int(done.sum())
    assert ends > 20
    env.close()


@both
def test_a_list_with_the_wrong_length_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="list of 3, got a list of 2"):
        make(3).reset(seed=[1, 2])


def test_the_bounds_of_cartpoles_starts_can_be_set() -> None:
    env = BatchedCartPole(100)
    observation, _ = env.reset(seed=0, options={"low": 0.1, "high": 0.2})
    assert observation.min() >= 0.1
    assert 0.19 < observation.max() <= 0.2


@pytest.mark.parametrize(
    ("task", "kwargs", "message"),
    [
        ("NoSuchTask-v9", {}, "no task 'NoSuchTask-v9'"),
        ("CartPole-v1", {"batch_size": 1}, "leave batch_size"),
        ("CartPole-v1", {"max_num_players": 2}, "max_num_players"),
    ],
)
def test_unsupported_modes_of_envpool_are_refused(task: str, kwargs: Any, message: str) -> None:
    pytest.importorskip("envpool")
    with pytest.raises(ConfigError, match=message):
        BatchedEnvPool(task, 3, **kwargs)


def test_without_envpool_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "envpool", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[envpool\]'"):
        BatchedEnvPool("CartPole-v1")


class Pairs(SameStep):
    """Two rows, whose observations are a dict in a tuple: row b counts from 10 * b, and ends at its step b + 1."""

    num_envs = 2
    single_observation_space = spaces.Tuple([spaces.Dict(at=spaces.Discrete(99)), spaces.Box(0, 99, (2,))])
    single_action_space = spaces.Discrete(2)

    def observe(self, rows: Any) -> Any:
        count = (10 * np.arange(2) + self.count)[rows]
        return {"at": count}, np.stack([count, count + 1], 1).astype(np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.count = np.zeros(2, np.int64)
        return self.observe([0, 1]), {}

    def reset_rows(self, rows: Any) -> Any:
        self.count[rows] = 0
        return self.observe(rows), {}

    def advance(self, actions: Any) -> Any:
        self.count += 1
        return self.observe([0, 1]), np.ones(2), self.count > np.arange(2), np.zeros(2, bool), {}


def test_nested_observations_are_returned_and_written_alike() -> None:
    returning, writing = Pairs(), Pairs()
    for env in (returning, writing):
        env.reset()
    out = {"at": np.zeros(2, np.int64)}, np.zeros((2, 2), np.float32)
    for counts in ([0, 11], [0, 10], [0, 11]):
        (at, box), *_, infos = returning.step([0, 0])
        writing.step_into(out, [0, 0])
        assert at["at"].tolist() == out[0]["at"].tolist() == counts
        assert box.tolist() == out[1].tolist() == [[count, count + 1] for count in counts]
        assert infos["final_obs"][0]["at"][0] == 1, "the last observation of row 0, which ends in each step"
    with pytest.raises(ValueError, match=r"the observation must have shape \(2, 3\), got \(2, 2\)"):
        writing.step_into((out[0], np.zeros((2, 3))), [0, 0])
