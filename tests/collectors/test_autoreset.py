"""Batched environments that reset in the next step: what is recorded, what a replay has of it, evaluations."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from penstock import AsyncSampler, ConfigError, ParallelSampler, RandomAgent, SerialSampler, TrajInfo, WorkerError
from penstock.envs import CountingEnv
from penstock.learning import Replay

from ..against_loop import compare
from ..samplers.digest_cases import Plain, Stateful, rows_of
from ..scale import scaled
from ..support import assert_as_plain_loop, assert_same, collect_with, env_seeds, without_infos

pytestmark = pytest.mark.slow

NEXT = AutoresetMode.NEXT_STEP


def synced(env_fn: Any, num_envs: int, mode: AutoresetMode = NEXT) -> Any:
    return SyncVectorEnv([env_fn] * num_envs, autoreset_mode=mode)


def batches(env_fn: Any, cls: Any = SerialSampler, agent: Any = None, **kwargs: Any) -> Any:
    sizes = {"batch_T": 30, "batch_B": 5, "eval_n_envs": 3, "eval_max_steps": 300, "batched": True}
    return collect_with(cls, env_fn, agent, 4, scaled(range(4), (1,)), **{**sizes, **kwargs})


class Own(TrajInfo):
    """Is called at each step."""


@pytest.mark.parametrize("traj_info_cls", [TrajInfo, Own])
def test_a_reset_belongs_to_no_trajectory(traj_info_cls: Any) -> None:
    found = batches(partial(synced, partial(CountingEnv, length=4)), traj_info_cls=traj_info_cls, eval_episodes=7)
    for samples, infos in found:
        assert infos
        assert all((info["Length"], info["Return"]) == (4, 10) for info in infos)
        assert samples is not None or len(infos) == 7


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("agent", [Stateful, Plain])
def test_values_of_final_observations_that_are_not_recorded_are_right(mode: AutoresetMode, agent: Any) -> None:
    sizes = {"batch_T": 20, "batch_B": 3, "n_batches": 4, "batched": True}
    compare(SerialSampler, rows_of(mode), agent, sampler={"record_final_obs": False}, **sizes)


def test_workers_that_write_into_a_replay_leave_the_resets_out() -> None:
    replay = Replay(500, discount=1.0, max_truncations=500, seed=0)
    env_fn = partial(synced, partial(CountingEnv, length=4, truncate=True))
    sizes: dict[str, Any] = {"batch_T": 9, "batch_B": 4, "n_workers": 2, "batched": True}
    with AsyncSampler(env_fn, replay=replay, **sizes) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        sampler.start()
        for _ in range(3):
            batch = replay.sample(300)
            torch.testing.assert_close(batch.next_observation[:, 1], batch.observation[:, 1] + 1)
            torch.testing.assert_close(batch.next_observation[:, 0], batch.observation[:, 0])


class Masked(gym.Env[Any, Any]):
    """One action is legal at each step, and none after the last."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict({"at": spaces.Discrete(6), "mask": spaces.MultiBinary(3)})
        self.action_space = spaces.Discrete(3)

    def _observe(self) -> Any:
        return {"at": self.at, "mask": np.array([self.at < 5 and self.at % 3 == i for i in range(3)], np.int8)}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.at = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        return self._observe(), 1.0, self.at == 5, False, {}


def test_an_observation_that_allows_no_action_may_end_an_episode() -> None:
    agent = RandomAgent(mask_key="observation.mask")
    for samples, infos in batches(partial(synced, Masked), agent=agent):
        assert all(info["Length"] == 5 for info in infos)
        if samples is not None:
            valid = samples.env.valid
            assert not valid.all()
            assert (samples.agent.action[valid] == samples.env.observation.at[valid] % 3).all()


def test_an_environment_id_means_its_batched_environment() -> None:
    """It has one random stream, so only runs with the same number of workers are equal."""
    kwargs: dict[str, Any] = {"env_kwargs": {"max_episode_steps": 25}}
    found = batches("CartPole-v1", **kwargs)
    assert_same(found, batches("CartPole-v1", ParallelSampler, n_workers=1, **kwargs))
    env: Any = gym.make_vec("CartPole-v1", 5, "vector_entry_point", max_episode_steps=25)
    assert assert_as_plain_loop(env, env_seeds(5)[0], without_infos(found)) > 10


def test_an_id_without_a_batched_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"FrozenLake-v1 has no batched environment .*leave batched out"):
        batches("FrozenLake-v1")


def test_an_environment_that_does_not_tell_its_mode_is_refused() -> None:
    def silent(num_envs: int) -> Any:
        env = synced(CountingEnv, num_envs)
        del env.metadata["autoreset_mode"]
        return env

    with (
        SerialSampler(silent, batch_T=2, batch_B=2, batched=True) as sampler,
        pytest.raises(WorkerError, match=r"set metadata\['autoreset_mode'\]"),
    ):
        sampler.initialize(RandomAgent())
