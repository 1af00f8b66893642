"""WholeEpisodes: the episodes of a training, beside a plain loop that plays them again."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest

from penstock import (
    AlternatingSampler,
    AsyncSampler,
    ConfigError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    SerialSampler,
    WaitResetCollector,
)
from penstock.envs import BatchedCartPole, NestedEnv
from penstock.envs.seeding import episode_seed
from penstock.learning import WholeEpisode, WholeEpisodes

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here

B, SEED = 4, 3


class Drawing(gym.Env[Any, Any]):
    """Episodes of 1 to 9 steps, some of which are cut."""

    observation_space = gym.spaces.Box(-1e9, 1e9, (2,), np.float64)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.n_left, self.drawn = int(self.np_random.integers(1, 10)), self.np_random.normal()
        return np.array([self.n_left, self.drawn]), {}

    def step(self, action: Any) -> Any:
        self.n_left -= 1
        self.drawn += float(action[0])
        ends, is_cut = self.n_left == 0, self.drawn > 0
        return np.array([self.n_left, self.drawn]), self.drawn, ends and not is_cut, ends and is_cut, {}


def plain(value: Any) -> Any:
    """Observations in the structure of WholeEpisode."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return {f"_{i}": plain(part) for i, part in enumerate(value)} if isinstance(value, tuple) else np.asarray(value)


def rows(tree: Any, t: int) -> Any:
    return {key: rows(part, t) for key, part in tree.items()} if isinstance(tree, dict) else tree[t]


def split(env: Any, action: Any) -> Any:
    if isinstance(env.action_space, gym.spaces.Dict):
        return {key: split_part(action[key]) for key in env.action_space}
    return split_part(action)


def split_part(action: Any) -> Any:
    return int(action) if np.ndim(action) == 0 else action


def played_again(env: Any, episode: WholeEpisode) -> None:
    """A plain loop plays the episode."""
    observation, _ = env.reset(seed=episode.seed, options=episode.options)
    flags = (False, False)
    for t, reward in enumerate(episode.rewards):
        np.testing.assert_equal(rows(episode.observations, t), plain(observation))
        assert flags == (False, False)
        observation, wanted, *flags_now, _ = env.step(split(env, rows(episode.actions, t)))
        flags = tuple(map(bool, flags_now))  # type: ignore[assignment]
        assert reward == np.float32(wanted)
    np.testing.assert_equal(rows(episode.observations, len(episode.rewards)), plain(observation))
    assert flags == (episode.terminated, episode.truncated)


def collected(sampler: Any, n: int, whole: WholeEpisodes, *, seeded: bool = True) -> list[WholeEpisode]:
    found = []
    for itr in range(n):
        samples, _ = sampler.obtain_samples(itr)
        found += whole.add(samples if itr % 2 else sampler.samples_np, sampler.episode if seeded else None)
        samples.env.observation[...] = 0.0 if hasattr(samples.env.observation, "shape") else samples.env.observation
    return found


@pytest.mark.parametrize(
    "cls",
    [
        SerialSampler,
        partial(ParallelSampler, n_workers=2),
        GpuSampler,
        AlternatingSampler,
        partial(ParallelSampler, n_workers=2, collector_cls=WaitResetCollector),
    ],
)
def test_every_episode_is_whole_and_a_plain_loop_plays_it_again(cls: Any) -> None:
    whole = WholeEpisodes()
    with cls(Drawing, batch_T=7, batch_B=B, seed_episodes=True, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent(), seed=SEED)
        episodes = collected(sampler, 12, whole)
    assert whole.n_left_out == 0
    assert max(len(episode.rewards) for episode in episodes) > 7  # over two batches
    for b in range(B):
        own = [episode for episode in episodes if episode.env_rank == b]
        assert [episode.number for episode in own] == list(range(len(own)))
        assert [episode.seed for episode in own] == [episode_seed(SEED, b, k) for k in range(len(own))]
    env = Drawing()
    for episode in episodes:
        played_again(env, episode)
    assert {(episode.terminated, episode.truncated) for episode in episodes} == {(True, False), (False, True)}


def test_batches_that_are_collected_ahead_have_whole_episodes_too() -> None:
    """`sampler.episode` cannot tell of them; the seeds are those of their addresses."""
    whole, counts, env = WholeEpisodes(), [0] * B, Drawing()
    with AsyncSampler(
        Drawing, batch_T=7, batch_B=B, n_workers=2, n_slots=2, seed_episodes=True, max_decorrelation_steps=0
    ) as sampler:
        sampler.initialize(RandomAgent(), seed=SEED)
        sampler.start()
        for episode in collected(sampler, 12, whole, seeded=False):
            seed = episode_seed(SEED, episode.env_rank, counts[episode.env_rank])
            played_again(env, replace(episode, seed=seed))
            counts[episode.env_rank] += 1
    assert min(counts) > 5


def test_nested_spaces_are_dicts_of_arrays() -> None:
    whole = WholeEpisodes()
    with SerialSampler(NestedEnv, batch_T=16, batch_B=2, seed_episodes=True, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent(), seed=SEED)
        episodes = [e for itr in range(8) for e in whole.add(sampler.obtain_samples(itr)[0], sampler.episode)]
    assert len(episodes) > 2
    for episode in episodes:
        assert isinstance(episode.observations, dict)
        again = NestedEnv().reset(seed=episode.seed)[0]
        np.testing.assert_equal(rows(episode.observations, 0), plain(again))


def test_batched_environments_that_reset_in_the_next_step_have_whole_episodes() -> None:
    whole, lengths = WholeEpisodes(), []
    with SerialSampler(BatchedCartPole, batch_T=50, batch_B=3, batched=True, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent(), seed=SEED)
        for itr in range(6):
            samples, traj_infos = sampler.obtain_samples(itr)
            for episode in whole.add(samples):
                lengths.append((episode.env_rank, len(episode.rewards)))
                assert len(episode.observations) == len(episode.actions) + 1
                assert (episode.number, episode.seed, episode.options) == (None, None, None)
            assert sorted(lengths[-len(traj_infos) :]) == sorted((info.env_rank, info.Length) for info in traj_infos)
    assert len(lengths) > 5


def test_episodes_without_a_beginning_are_left_out() -> None:
    whole = WholeEpisodes()
    with SerialSampler(Drawing, batch_T=7, batch_B=B, seed_episodes=True, max_decorrelation_steps=20) as sampler:
        sampler.initialize(RandomAgent(), seed=SEED)
        episodes = collected(sampler, 8, whole)
    assert 0 < whole.n_left_out <= B
    for episode in episodes:
        played_again(Drawing(), episode)


def test_an_episode_that_a_restart_has_cut_is_left_out() -> None:
    whole = WholeEpisodes()
    options = {"on_worker_failure": "restart", "seed_episodes": True, "max_decorrelation_steps": 0}
    with ParallelSampler(Drawing, batch_T=3, batch_B=B, n_workers=2, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=SEED)
        episodes = collected(sampler, 2, whole)  # then episodes run
        os.kill(sampler.worker_pids[0], signal.SIGKILL)
        episodes += collected(sampler, 6, whole)
    assert whole.n_left_out > 0
    for episode in episodes:
        played_again(Drawing(), episode)


class Same(Drawing):
    """All observations are equal."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros_like(super().reset(seed=seed)[0]), {}

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return np.zeros_like(observation), *rest


@pytest.mark.parametrize("env_fn", [Drawing, Same])
def test_a_batch_that_is_missing_is_named(env_fn: Any) -> None:
    whole = WholeEpisodes()
    with SerialSampler(env_fn, batch_T=2, batch_B=B, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent(), seed=SEED)
        whole.add(sampler.obtain_samples(0)[0])
        sampler.obtain_samples(1)
        with pytest.raises(ConfigError, match=r"does not follow the one before it: .*Give every batch"):
            whole.add(sampler.obtain_samples(2)[0])


def test_seeds_of_another_batch_are_refused() -> None:
    """`sampler.episode` tells of the last batch only."""
    whole, kept = WholeEpisodes(), []
    with SerialSampler(Drawing, batch_T=7, batch_B=B, seed_episodes=True, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent(), seed=SEED)
        for itr in range(2):
            kept.append(sampler.obtain_samples(itr)[0].copy())
        with pytest.raises(ConfigError, match="tells of another batch than this"):
            whole.add(kept[0], sampler.episode)


def test_samples_without_last_observations_are_refused() -> None:
    with SerialSampler(Drawing, batch_T=2, batch_B=B, record_final_obs=False) as sampler:
        sampler.initialize(RandomAgent(), seed=SEED)
        with pytest.raises(ConfigError, match="record_final_obs=True"):
            WholeEpisodes().add(sampler.obtain_samples(0)[0])
