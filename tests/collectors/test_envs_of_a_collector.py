"""A collector reads its environments as a sequence: `self.envs`."""

from typing import Any

import pytest

from penstock import ConfigError, RandomAgent, ResetCollector, SerialSampler, VectorEnvCollector, WorkerError
from penstock.envs import BatchedCartPole, CountingEnv


class Lengthening(ResetCollector):
    def start_envs(self) -> None:
        for b, env in enumerate(self.envs):
            env.length = 2 + b
        assert self.envs[1].length == 3
        super().start_envs()


class Confused(VectorEnvCollector):
    def start_envs(self) -> None:
        list(self.envs)


def test_the_environments_are_iterated_and_indexed() -> None:
    options: dict[str, Any] = {"batch_T": 12, "batch_B": 3, "max_decorrelation_steps": 0}
    with SerialSampler(CountingEnv, collector_cls=Lengthening, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        _, infos = sampler.obtain_samples(0)
        assert {info.Length for info in infos} == {2, 3, 4}


def test_a_batched_environment_says_that_it_has_none() -> None:
    with SerialSampler(BatchedCartPole, batch_T=1, batch_B=2, collector_cls=Confused) as sampler:
        with pytest.raises(WorkerError) as caught:
            sampler.initialize(RandomAgent(), seed=0)
        assert isinstance(caught.value.__cause__, ConfigError)
        assert "self.envs.env is all of them" in str(caught.value.__cause__)
