"""What macOS would run: the twins of system.py, in a Python without what only Linux has."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import psutil
import pytest

from ..scale import START_METHODS, pairs, scaled
from ..support import BOUND, PROGRAMS
from .support import SLACK, Script, gone_after, note

N_TRIALS = scaled(50, 1)  # of each pair
WITHOUT_LINUX = str(Path(__file__).parents[1] / "without_linux")

pytestmark = [pytest.mark.timeout(scaled(3600, 60)), pytest.mark.slow]


@pytest.fixture(autouse=True)
def _without_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_PORTABLE", "1")
    monkeypatch.setenv("PYTHONPATH", WITHOUT_LINUX, prepend=os.pathsep)


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
    """Nor of their programs, also one in another session. If the supervisor is killed, that one ends with the main
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


DIGESTS = [sys.executable, "-W", "error", str(PROGRAMS / "digests.py")]
KINDS = [
    *("SerialSampler", "ParallelSampler", "GpuSampler", "GpuSampler, server process", "AlternatingSampler"),
    *("AsyncSampler", "AsyncSampler, server process", "agents in lock-step", "agents in turns", "batched"),
    *("ShmVectorEnv", "Sb3VecEnv", "replay in a file", "evaluate"),
]
SAMPLERS = KINDS[: KINDS.index("agents in lock-step")]
CASES = scaled(
    list(product(KINDS, START_METHODS)),
    [*product(KINDS, ["fork"]), ("ParallelSampler", "forkserver"), ("ParallelSampler", "spawn")],
)


@pytest.mark.timeout(scaled(3600, 240))  # 20 s of CPU time
def test_every_kind_gives_the_same_as_where_linux_has_all() -> None:
    """And every sampler the same as `SerialSampler`, with each start method."""
    folders = [folder for folder in os.environ["PYTHONPATH"].split(os.pathsep) if folder != WITHOUT_LINUX]
    usual = {**os.environ, "PENSTOCK_PORTABLE": "", "PYTHONPATH": os.pathsep.join(folders)}
    command: list[str] = [*DIGESTS, json.dumps(CASES)]
    with ExitStack() as both:
        runs = [
            both.enter_context(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
            for env in (usual, os.environ)
        ]
        linux, portable = (run.communicate(timeout=scaled(1800, 200))[0].splitlines() for run in runs)
    assert [line.rpartition(": ")[0] for line in linux] == [", ".join(case) for case in CASES]
    assert portable == linux
    assert len({line.rpartition(": ")[2] for line in linux if line.rsplit(", ", 1)[0] in SAMPLERS}) == 1


def test_code_of_penstock_may_not_open_what_macos_does_not_have() -> None:
    """That of other libraries may."""
    opened = "pathlib.Path('/proc/self/stat').read_text(); open('/dev/null').close()"
    for name, how in (("penstock.games", "os.listdir('/proc')"), ("penstock", opened), ("psutil", opened)):
        code = f"import os, pathlib; exec({how!r}, {{**globals(), '__name__': {name!r}}})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=BOUND)
        assert (f"{name} opens '/proc" in done.stderr) == (name != "psutil") == bool(done.returncode), done.stderr


MACOS = """
import gymnasium, psutil, sys, sysconfig, torch
sysconfig.get_config_vars()  # this and the imports look for what macOS has
sys.platform = "darwin"
from penstock import ParallelSampler, system
from penstock.envs import CountingEnv
from penstock.workers.plan import PoolArguments
import numpy as np
from penstock import SerialSampler
from penstock.agents import RandomAgent
def batches(cls, **options):
    with cls(CountingEnv, batch_T=8, batch_B=4, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=3)
        return [sampler.obtain_samples(itr)[0].env for itr in range(3)]
for ours, theirs in zip(batches(ParallelSampler, n_workers=2), batches(SerialSampler)):
    for name in ("observation", "reward", "done"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
print("same", PoolArguments().start_method, system.PORTABLE)
"""


def test_macos_may_import_penstock_and_starts_new_interpreters_by_default() -> None:
    done = subprocess.run([sys.executable, "-c", MACOS], capture_output=True, text=True, timeout=BOUND)
    assert (done.stdout, done.stderr) == ("same spawn True\n", "")
