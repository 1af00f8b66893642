"""What macOS would run: the twins of system.py, in a Python without what only Linux has."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ..scale import START_METHODS, pairs, scaled
from ..support import BOUND
from .support import SLACK, Script, gone_after, note

N_TRIALS = scaled(50, 1)  # of each pair

pytestmark = [pytest.mark.timeout(scaled(3600, 60)), pytest.mark.slow]


@pytest.fixture(autouse=True)
def _without_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_PORTABLE", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "without_linux"), prepend=os.pathsep)


HOLDING = """
from penstock.vector import ShmVectorEnv
class Holding(CountingEnv):
    def reset(self, **kwargs):
        command = "sleep", ["sleep", "600"], os.environ
        self.pids = os.getpid(), os.posix_spawnp(*command), os.posix_spawnp(*command, setsid=True)
        return super().reset(**kwargs)
    def step(self, action):
        sum(range(10**12))
envs = ShmVectorEnv([Holding] * 3, n_workers=3, context=method)
envs.reset()
pids = envs.get_attr("pids")
say(psutil.Process(pids[0][0]).ppid(), *(pid for own in pids for pid in own))
try:
    envs.step([0] * 3)
except WorkerDiedError as error:
    say(error)
signal.pause()
"""


@pytest.mark.parametrize(("method", "victim"), pairs(("forkserver", "spawn"), ("supervisor", "main")))
def test_nothing_is_left_of_workers_whose_c_code_holds_the_interpreter_lock(
    tmp_path: Path, method: str, victim: str
) -> None:
    """Nor of their programs, one of which is in a session of its own: that of a killed supervisor ends with the main
    process."""
    for trial in range(N_TRIALS):
        with Script(tmp_path, f"import psutil\n{HOLDING}", new=True, method=method) as script:
            supervisor, *pids = script.pids()
            time.sleep(random.Random(trial).uniform(0.0, 0.2))  # to come at any moment
            began = time.monotonic()
            os.kill(supervisor if victim == "supervisor" else script.pid, signal.SIGKILL)
            seconds = gone_after(pids[::3], began, 1.0 * SLACK)
            note(f"{victim} killed to no worker left, s", seconds, 1.0 * SLACK)
            if victim == "supervisor":
                assert "ended with the supervisor" in " ".join(script.line())
                began = time.monotonic()
                script.process.kill()
            gone_after([supervisor, *pids], began, 2.0 * SLACK)


NESTED = """
from penstock.vector import ShmVectorEnv
from penstock.workers import launcher
class Outer(CountingEnv):
    def reset(self, **kwargs):
        self.program = os.posix_spawnp("sleep", ["sleep", "600"], os.environ, setsid=True)
        with ShmVectorEnv([CountingEnv] * 2, n_workers=2, context="forkserver") as inner:
            inner.reset()
            inner.step([0, 0])
        launcher._close_supervisors()
        return super().reset(**kwargs)
with ShmVectorEnv([CountingEnv, Outer], n_workers=2) as envs:
    envs.reset()
    envs.step([0, 0])
    say(envs.apply(lambda env: getattr(env, "program", 0))[1])
    sys.stdin.readline()
"""


def test_a_pool_inside_of_a_worker_ends_only_what_is_its_own(tmp_path: Path) -> None:
    """Its supervisor has the variable of the outer one too."""
    with Script(tmp_path, NESTED, new=True) as script:
        (program,) = script.pids()
        assert psutil.Process(program).status() == psutil.STATUS_SLEEPING
        began = time.monotonic()
        script.process.kill()
        gone_after([program], began, 2.0 * SLACK)


SAME = """
import numpy as np
from penstock import SerialSampler
from penstock.agents import RandomAgent
def batches(cls, **options):
    with cls(CountingEnv, batch_T=8, batch_B=4, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=3)
        return [sampler.obtain_samples(itr)[0].env for itr in range(3)]
expected = batches(SerialSampler)
for method in methods:
    for ours, theirs in zip(batches(ParallelSampler, n_workers=2, start_method=method), expected):
        for name in ("observation", "reward", "done"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
say("same")
"""


MACOS = """
import gymnasium, psutil, sys, sysconfig, torch
sysconfig.get_config_vars()  # this and the imports look for what macOS has
sys.platform = "darwin"
from penstock import ParallelSampler, system
from penstock.envs import CountingEnv
from penstock.workers.plan import PoolArguments
methods, say = [PoolArguments().start_method], print
"""


def test_macos_may_import_penstock_and_starts_new_interpreters_by_default() -> None:
    code = MACOS + SAME.replace("start_method=method", "") + "print(methods, system.PORTABLE)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=BOUND)
    assert (done.stdout, done.stderr) == ("same\n['spawn'] True\n", "")


def test_each_start_method_gives_the_batches_of_a_serial_sampler(tmp_path: Path) -> None:
    with Script(tmp_path, SAME, new=True, methods=START_METHODS) as script:
        output, errors = script.end()
    assert output == "same\n", errors
