"""Recurrent states and exploration rates across batches and workers."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from penstock import (
    Agent,
    EpsilonGreedyAgent,
    ParallelSampler,
    RecurrentGaussianPgAgent,
    Sampler,
    SerialSampler,
)
from penstock.envs import CountingEnv

from ..models import Lstm, Net
from ..scale import scaled
from ..support import collect_with, without_infos

pytestmark = pytest.mark.slow

PENDULUM = partial(gym.make, "Pendulum-v1", max_episode_steps=12)
COUNTING = partial(CountingEnv, truncate=True)


def recorded(agent: Agent, env_fn: Any) -> list[Any]:
    """Five batches, with an evaluation between them."""
    sizes = {"batch_T": 20, "batch_B": 5, "eval_n_envs": 2, "eval_max_steps": 60}
    return without_infos(collect_with(SerialSampler, env_fn, agent, 5, (2,), **sizes))


def test_a_state_recorded_once_a_batch_is_that_of_its_first_row() -> None:
    found = recorded(RecurrentGaussianPgAgent(lambda: Lstm(3, 1), record_state="batch"), PENDULUM)
    for itr, batch in enumerate(found):
        for leaf in batch.agent.agent_info.prev_rnn_state:
            assert (leaf[1:] == 0).all()
            assert np.any(leaf[0] != 0) == (itr > 0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"epsilon": [0.5, 0.4, 0.3, 0.2, 0.1]}, [0.5, 0.4, 0.3, 0.2, 0.1]),
        ({"epsilon": 0.4, "spread": 7}, [0.4 ** (1 + 7 * i / 4) for i in range(5)]),
        ({"epsilon": lambda itr: [0.1 * itr * i for i in range(5)]}, [0.0, 0.1, 0.2, 0.3, 0.4]),
    ],
    ids=["list", "spread", "schedule of lists"],
)
def test_each_environment_has_its_own_epsilon_whichever_worker_has_it(options: Any, expected: list[float]) -> None:
    def batch(cls: type[Sampler], **kwargs: Any) -> Any:
        with cls(COUNTING, batch_T=7, batch_B=5, eval_n_envs=2, eval_max_steps=20, **kwargs) as sampler:
            sampler.initialize(EpsilonGreedyAgent(lambda: Net(2, 3), **options), seed=0)
            sampler.evaluate_agent(0)
            sampler.obtain_samples(1)
            return sampler.samples_np.agent.copy()

    reference = batch(SerialSampler)
    np.testing.assert_allclose(reference.agent_info.epsilon, np.tile(expected, (7, 1)), rtol=1e-6)
    for n_workers in scaled((2, 3), (3,)):
        parallel = batch(ParallelSampler, n_workers=n_workers)
        np.testing.assert_array_equal(parallel.agent_info.epsilon, reference.agent_info.epsilon)
        np.testing.assert_array_equal(parallel.action, reference.action)


def test_a_spread_goes_over_the_environments_of_all_machines() -> None:
    with SerialSampler(COUNTING, batch_T=2, batch_B=2) as sampler:
        sampler.initialize(EpsilonGreedyAgent(lambda: Net(2, 3), epsilon=0.4, spread=7), seed=0, rank=1, world_size=2)
        sampler.obtain_samples(0)
        epsilon = sampler.samples_np.agent.agent_info.epsilon
    np.testing.assert_allclose(epsilon[0], [0.4 ** (1 + 7 * i / 3) for i in (2, 3)], rtol=1e-6)
