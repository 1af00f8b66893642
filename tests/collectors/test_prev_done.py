"""`env.prev_done`: where episodes begin, from the first row of the first batch on."""

from __future__ import annotations

import numpy as np
import pytest

from penstock import Collector, ParallelSampler, RandomAgent, ResetCollector, Sampler, SerialSampler, WaitResetCollector

from ..scale import quick_first
from ..support import sampler_of


@pytest.mark.parametrize("max_decorrelation_steps", quick_first([12, 0]))
@pytest.mark.parametrize("collector_cls", [ResetCollector, WaitResetCollector])
@pytest.mark.parametrize("sampler_cls", [SerialSampler, ParallelSampler])
def test_an_episode_begins_where_prev_done_says(
    sampler_cls: type[Sampler], collector_cls: type[Collector], max_decorrelation_steps: int
) -> None:
    how = {"collector_cls": collector_cls, "max_decorrelation_steps": max_decorrelation_steps}
    env_kwargs = [{"length": 3 + b} for b in range(6)]
    with sampler_of(sampler_cls, batch_B=6, env_kwargs=env_kwargs, **how) as sampler:
        sampler.initialize(RandomAgent(), seed=1)
        for itr in range(6):
            env = sampler.obtain_samples(itr)[0].env.numpy()
            begins = (env.observation[..., 1] == 0) & env.valid
            np.testing.assert_array_equal(env.prev_done & env.valid, begins)
            np.testing.assert_array_equal(env.prev_done[1:], env.done[:-1])
            assert env.valid[0].all()
