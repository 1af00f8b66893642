"""step_timeout: what is slow is no hang. `test_faults.py` says what is."""

import time
from typing import Any

import pytest

from penstock import ParallelSampler, RandomAgent
from penstock.envs import CountingEnv

from ..scale import scaled

pytestmark = [pytest.mark.timeout(scaled(1800, 60)), pytest.mark.slow]


class SlowlyReset(CountingEnv):
    def __init__(self, seconds: float) -> None:
        super().__init__(length=3)
        self.seconds = seconds

    def reset(self, **kwargs: Any) -> Any:
        time.sleep(self.seconds)
        return super().reset(**kwargs)


@pytest.mark.parametrize("start_method", ["forkserver"])
def test_slow_is_not_hung(start_method: str) -> None:
    n_workers, seconds, limit, total = scaled((16, 5.0, 30.0, 600.0), (8, 0.2, 2.0, 3.0))
    arguments: dict[str, Any] = {"batch_T": 4, "batch_B": 2 * n_workers, "n_workers": n_workers}
    sampler = ParallelSampler(
        SlowlyReset, env_kwargs={"seconds": seconds}, step_timeout=limit, max_decorrelation_steps=2, **arguments
    )
    with sampler:
        sampler.initialize(RandomAgent(), seed=0)
        began = time.monotonic()
        itr = 0
        while time.monotonic() - began < total:
            sampler.obtain_samples(itr)
            itr += 1
    assert itr >= 2


def test_each_sign_of_life_counts_and_the_learner_may_take_its_time() -> None:
    """A batch, an evaluation and a break between two calls may each take longer than the limit."""

    class Slow(CountingEnv):
        def step(self, action: Any) -> Any:
            time.sleep(0.025)
            return super().step(action)

    arguments: dict[str, Any] = {"batch_T": 20, "batch_B": 2, "n_workers": 2, "max_decorrelation_steps": 0}
    with ParallelSampler(Slow, step_timeout=0.3, eval_n_envs=2, eval_max_steps=40, **arguments) as sampler:
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
        assert len(sampler.evaluate_agent(0)) == 8
        time.sleep(0.4)
        sampler.start_samples(1)
        time.sleep(0.6)
        sampler.wait_samples()
