"""A signal handler that raises at any moment: `signal.alarm`, pytest-timeout, a second Ctrl-C."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..scale import methods, scaled
from .support import Script

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

HEAD = """
import random
from functools import partial
from penstock import EnvCallError, GpuSampler, SamplerBrokenError, SamplerState, SerialSampler
from penstock.vector import ShmVectorEnv

class Alarm(BaseException):  # as pytest-timeout's
    pass

def on_alarm(*_):
    raise Alarm

signal.signal(signal.SIGALRM, on_alarm)
rng = random.Random(0)
n_alarms = n_broken = 0
"""

BODY = """
def new_sampler():
    sampler = CLS(
        CountingEnv, env_kwargs={"length": 10**9}, batch_T=2, batch_B=4, n_workers=2, max_decorrelation_steps=0,
        start_method=METHOD, **OPTIONS,
    )
    sampler.initialize(RandomAgent(), seed=0)
    return sampler

def batch(sampler, itr):
    if sampler.state is SamplerState.SAMPLING:
        return sampler.wait_samples()[0].env.observation
    return sampler.obtain_samples(itr)[0].env.observation

CLS = {"parallel": ParallelSampler, "gpu": GpuSampler, "server": GpuSampler, "serial": SerialSampler}[WHAT]
OPTIONS = {"server": "process"} if WHAT == "server" else {}
sampler = new_sampler()
itr = 0
while itr < N or n_alarms < N // 16:  # on a fast machine most batches end before the alarm
    itr += 1
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 1e-3))
            observation = batch(sampler, itr)
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert (observation == observation[:, :1]).all(), "a column is ahead of the others"
        except SamplerBrokenError as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert "interrupted" in str(error) or "raised Alarm" in str(error), error
            sampler.shutdown()
            n_broken += 1
            sampler = new_sampler()
    except Alarm:  # also in the clause above
        n_alarms += 1
sampler.shutdown()
say(n_alarms, n_broken)
"""

VECTOR = """
def new_envs():
    envs = ShmVectorEnv([partial(CountingEnv, length=10**9)] * 4, n_workers=2, context=METHOD)
    envs.reset()
    return envs

def step(envs):
    return envs.step_wait() if envs._guard.state.name == "STEPPING" else envs.step([0] * 4)

envs = new_envs()
itr = 0
while itr < N or n_alarms < N // 16:
    itr += 1
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 1e-3))
            observation = step(envs)[0]
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert (observation == observation[:1]).all(), "an environment is ahead of the others"
        except SamplerBrokenError as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert "interrupted" in str(error), error
            envs.close()
            n_broken += 1
            envs = new_envs()
    except EnvCallError as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert "is lost: an exception of a signal handler" in str(error), error
    except Alarm:  # also in the clause above
        n_alarms += 1
envs.close()
say(n_alarms, n_broken)
"""


@methods("forkserver")
@pytest.mark.parametrize("what", ["serial", "parallel", "gpu", "server", "vector"])
def test_no_call_is_locked_and_no_column_is_ahead(tmp_path: Path, what: str, start_method: str) -> None:
    body = HEAD + (VECTOR if what == "vector" else BODY)
    with Script(tmp_path, body, METHOD=start_method, WHAT=what, N=scaled(20_000, 400)) as script:
        output, errors = script.end(scaled(500, 100))
    assert output, errors
    n_alarms, n_broken = map(int, output.split())
    assert n_alarms >= scaled(1250, 25)
    assert n_broken < n_alarms or what == "serial"
