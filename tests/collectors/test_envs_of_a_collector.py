"""A collector reads its environments as a sequence: `self.envs`."""

from typing import Any

from penstock import RandomAgent, ResetCollector, SerialSampler
from penstock.envs import BatchedCartPole, CountingEnv


class Lengthening(ResetCollector):
    def start_envs(self) -> None:
        for b, env in enumerate(self.envs):
            env.length = 2 + b
        assert self.envs[1].length == 3
        super().start_envs()


class Built(ResetCollector):
    def start_envs(self) -> None:
        (env,) = self.envs
        assert env.num_envs == len(self.columns.env_ranks) == 2
        super().start_envs()


def test_the_environments_are_iterated_and_indexed() -> None:
    options: dict[str, Any] = {"batch_T": 12, "batch_B": 3, "max_decorrelation_steps": 0}
    with SerialSampler(CountingEnv, collector_cls=Lengthening, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        _, infos = sampler.obtain_samples(0)
        assert {info.Length for info in infos} == {2, 3, 4}


def test_a_batched_environment_is_one_of_them() -> None:
    with SerialSampler(BatchedCartPole, batch_T=1, batch_B=2, batched=True, collector_cls=Built) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        sampler.obtain_samples(0)
