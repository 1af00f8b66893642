"""step_timeout: what is slow is no hang, and who waits is not overdue. `test_faults.py` says what is a hang."""

import threading
import time
from typing import Any

import pytest

from penstock import AgentStep, AlternatingSampler, AsyncSampler, GpuSampler, ParallelSampler, RandomAgent
from penstock.envs import CountingEnv, SlowEnv

from ..scale import scaled
from ..support import sampler_of
from .support import Talkative, check_counting, pause

LIMIT = scaled(2.0, 0.4)

pytestmark = [pytest.mark.timeout(scaled(1800, 60)), pytest.mark.slow]


class Slow(SlowEnv):
    """A batch, an evaluation, and the resets together take longer than the limit."""

    def __init__(self) -> None:
        super().__init__(seconds=LIMIT / 16)

    def reset(self, **kwargs: Any) -> Any:
        time.sleep(LIMIT / 8)
        return super().reset(**kwargs)


class Pausing(RandomAgent):
    """Takes longer over some steps than a worker may."""

    calls = 0

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        type(self).calls += 1
        if type(self).calls % 12 == 0:
            threading.Event().wait(1.5 * LIMIT)
        return super().step(observation, prev_action, prev_reward)


EVALUATION: dict[str, Any] = {"eval_n_envs": 2, "eval_max_steps": 2 * 15}
#: Many workers: some have not woken up yet when the main process looks at them again.
MANY: dict[str, Any] = {"batch_B": 8, "n_workers": 8}
#: One worker is at work all the time. The other, and the server, have nothing to do for longer than they may.
ONE_SLOW: dict[str, Any] = {"env_fn": [CountingEnv] * 3 + [lambda: SlowEnv(seconds=0.6 * LIMIT)], "batch_T": 3}
SCENES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "environments": (ParallelSampler, RandomAgent, {"env_fn": Slow, "batch_T": 20, "batch_B": 2, **EVALUATION}),
    "an agent": (GpuSampler, Pausing, MANY),
    "an agent, no overlap": (AlternatingSampler, Pausing, {**MANY, "overlap": False}),
    "one environment": (GpuSampler, RandomAgent, {**ONE_SLOW, "server": "process", "min_ready": 1}),
    "a learner": (AsyncSampler, RandomAgent, {}),
    "a learner, with a full pipe": (AsyncSampler, RandomAgent, {"batch_T": 16, "traj_info_cls": Talkative}),
}


@pytest.mark.parametrize("who", SCENES)
def test_slow_is_not_hung(who: str) -> None:
    """Nor is a learner that takes its time between two calls, and in the middle of a batch."""
    cls, agent_cls, options = SCENES[who]
    with sampler_of(cls, step_timeout=LIMIT, **options) as sampler:
        sampler.initialize(agent_cls(), seed=0)
        is_async = cls is AsyncSampler
        if is_async:
            sampler.start()
        for itr in range(3 if is_async else 2):
            if itr and not is_async:
                sampler.start_samples(itr)
                pause(1.5 * LIMIT)
                samples, infos = sampler.wait_samples()
            else:
                samples, infos = sampler.obtain_samples(itr)
            check_counting(samples.env.observation, samples.env.reward, samples.env.done, 5)
            assert len(infos) == int(samples.env.done.sum())
            pause(1.5 * LIMIT)
            if sampler.config.eval_n_envs:
                assert len(sampler.evaluate_agent(itr)) == 6
        if is_async:
            sampler.pause()
            pause(1.5 * LIMIT)
            sampler.resume()
            sampler.obtain_samples(3)
