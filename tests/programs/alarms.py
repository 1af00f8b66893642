"""Samples while a signal handler raises at any moment. Says how often it did, and how often a new sampler was needed.

`what`: the class that is interrupted. `n`: batches, at least.
"""

import json
import random
import signal
import sys
from functools import partial
from typing import Any

from penstock import (
    EnvCallError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    SamplerBrokenError,
    SamplerState,
    SerialSampler,
)
from penstock.envs import CountingEnv
from penstock.vector import ShmVectorEnv

given = json.loads(sys.argv[1])
ENDLESS = 10**9  # steps of an episode
CLASSES: dict[str, Any] = {
    "serial": SerialSampler,
    "parallel": ParallelSampler,
    "gpu": GpuSampler,
    "server": partial(GpuSampler, server="process"),
}


class Alarm(BaseException):  # as pytest-timeout's
    pass


def on_alarm(*_: object) -> None:
    raise Alarm


class OfSampler:
    def __init__(self) -> None:
        sizes = {"batch_T": 2, "batch_B": 4, "n_workers": 2, "max_decorrelation_steps": 0}
        how = {"env_kwargs": {"length": ENDLESS}, "start_method": given["start_method"]}
        self._sampler = CLASSES[given["what"]](CountingEnv, **sizes, **how)
        self._sampler.initialize(RandomAgent(), seed=0)
        self.close = self._sampler.shutdown

    def rows(self, itr: int) -> Any:
        """`[T, B, 2]`, from the batch that was interrupted, or from the next one."""
        sampler = self._sampler
        is_sampling = sampler.state is SamplerState.SAMPLING
        samples, _ = sampler.wait_samples() if is_sampling else sampler.obtain_samples(itr)
        return samples.env.observation


class OfVectorEnv:
    def __init__(self) -> None:
        self._envs = ShmVectorEnv([partial(CountingEnv, ENDLESS)] * 4, n_workers=2, context=given["start_method"])
        self._envs.reset()
        self.close = self._envs.close

    def rows(self, itr: int) -> Any:
        is_stepping = self._envs._guard.state.name == "STEPPING"
        return (self._envs.step_wait() if is_stepping else self._envs.step([0] * 4))[0][None]


make: Any = OfVectorEnv if given["what"] == "vector" else OfSampler
signal.signal(signal.SIGALRM, on_alarm)
rng = random.Random(0)
n_alarms = n_broken = itr = 0
made = make()
while itr < given["n"] or n_alarms < given["n"] // 16:  # on a fast machine most batches end before the alarm
    itr += 1
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 1e-3))
            observation = made.rows(itr)
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert (observation == observation[:, :1]).all(), "a column is ahead of the others"
        except SamplerBrokenError as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if "interrupted" not in str(error) and not ("raised Alarm" in str(error) and make is OfSampler):
                raise
            made.close()
            n_broken += 1
            made = make()
        except EnvCallError as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if make is OfSampler or "is lost: an exception of a signal handler" not in str(error):
                raise
    except Alarm:  # also in the clauses above
        n_alarms += 1
made.close()
print(n_alarms, n_broken, flush=True)
