"""A sampler in company: forks, threads, daemons, other samplers and runs, pools, CUDA, and killers."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from penstock import ConfigError, ParallelSampler, RandomAgent, WorkerDiedError
from penstock.envs import CountingEnv

from ..scale import methods, scaled
from ..starter import run
from ..support import BOUND, PROGRAMS
from .support import SLACK, Script, gone_after

pytestmark = [pytest.mark.timeout(scaled(3600, 200)), pytest.mark.slow]


LEFT_SECONDS = 2.0 * SLACK  # until nothing is left of a main process that was killed


FORKS = """
import multiprocessing

def total():
    with ParallelSampler("CartPole-v1", batch_T=5, batch_B=2, n_workers=2, start_method=METHOD) as sampler:
        sampler.initialize(RandomAgent(), seed=3)
        return float(sampler.obtain_samples(0)[0].env.observation.sum())

def own_sampler():
    sys.exit(7 if total() == ours else 1)

def daemon():
    assert multiprocessing.current_process().daemon
    own_sampler()

ours = total()
sampler = ParallelSampler(CountingEnv, batch_T=5, batch_B=2, n_workers=2, start_method=METHOD)
sampler.initialize(RandomAgent())
say(*sampler.worker_pids)
for body in (lambda: sys.exit(7), own_sampler):  # through the interpreter's whole shutdown, with its exit handlers
    child = os.fork()
    if child == 0:
        body()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
child = multiprocessing.get_context("fork").Process(target=daemon, daemon=True)
child.start()
child.join()
assert child.exitcode == 7
for itr in range(20):
    sampler.obtain_samples(itr)
sampler.shutdown()
say("fine")
"""


@methods("forkserver")
def test_forks_and_daemons_may_have_samplers_and_their_end_harms_nobody(tmp_path: Path, start_method: str) -> None:
    """Though the main process has used the same start method, and its supervisor, before."""
    with Script(tmp_path, FORKS, tears_down=True, METHOD=start_method) as script:
        workers = script.pids()
        out, stderr = script.end()
        assert (out, stderr, script.process.returncode) == ("fine\n", "", 0)
        gone_after(workers, time.monotonic(), LEFT_SECONDS)


@methods("fork")
def test_two_samplers_at_once_are_strangers(start_method: str) -> None:
    arguments: dict[str, Any] = {"batch_T": 6, "batch_B": 2, "n_workers": 2, "start_method": start_method}

    def alone() -> Any:
        with ParallelSampler("CartPole-v1", **arguments) as only:
            only.initialize(RandomAgent(), seed=3)
            return [only.obtain_samples(itr)[0].copy() for itr in range(6)][-1]

    with ParallelSampler("CartPole-v1", **arguments) as first, ParallelSampler(CountingEnv, **arguments) as second:
        second.initialize(RandomAgent(), seed=7)
        first.initialize(RandomAgent(), seed=3)
        for itr in range(3):
            first.start_samples(itr)
            second.obtain_samples(itr)
            first.wait_samples()
        psutil.Process(second.worker_pids[0]).kill()
        first.start_samples(3)
        with pytest.raises(WorkerDiedError):
            for itr in range(1000):
                second.obtain_samples(itr)
        first.wait_samples()
        second.shutdown()
        for itr in (4, 5):
            samples, _ = first.obtain_samples(itr)
        np.testing.assert_array_equal(samples.env.observation, alone().env.observation)


@methods("forkserver")
def test_a_sampler_of_a_thread_outlives_the_thread(start_method: str) -> None:
    """The kernel's parent-death signal comes when a thread ends, not a process. A fork is refused in a thread."""
    with (
        ParallelSampler(CountingEnv, batch_T=6, batch_B=2, start_method=start_method) as sampler,
        ThreadPoolExecutor(1) as threads,
    ):
        started = threads.submit(sampler.initialize, RandomAgent())
        if start_method == "fork":
            with pytest.raises(ConfigError, match='start_method="fork" is not safe while this process has other thr'):
                started.result(BOUND)
            return
        assert threads.submit(sampler.obtain_samples, 0).result(BOUND)[0].env.reward.sum() > 0
        threads.shutdown()
        for itr in range(scaled(1000, 50)):
            sampler.obtain_samples(itr)


def test_fork_is_refused_once_cuda_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with (
        ParallelSampler(CountingEnv, batch_T=2, batch_B=1, start_method="fork") as sampler,
        pytest.raises(ConfigError, match=r'start_method="fork" is not possible once CUDA is initialized.*forkserver'),
    ):
        sampler.initialize(RandomAgent())


@methods("forkserver")
@pytest.mark.parametrize("pool", scaled(["spawn", "forkserver", "torch", "loky"], ["spawn"]))
def test_classes_of_the_script_reach_the_workers(tmp_path: Path, pool: str, start_method: str) -> None:
    if pool == "loky":
        pytest.importorskip("joblib")
    if start_method == "fork":
        pytest.skip("a pool's process has threads, so fork is refused")
    # Processes of a pool start supervisors of their own: they must be new interpreters, as for a user.
    done = run(PROGRAMS / "in_a_pool.py", pool, start_method, cwd=tmp_path, seconds=180, forks_supervisor=False)
    assert done.stdout == "[6.0, 6.0]\n", done.stderr


CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"
SECONDS = scaled(600, 3)
MEAN = scaled(2.0, 0.3)  # seconds between signals; in a short run enough of them that some hit a sampler that restarts
#: With this seed, the first two samplers use forkserver. Spawned workers would be killed before they have started.
SEED = scaled([], ["--seed", 13])


def test_chaos(tmp_path: Path) -> None:
    options = ["--seconds", SECONDS, "--mean", MEAN, "--restarts", 1, *SEED]
    done = run(CHAOS, *options, cwd=tmp_path, seconds=SECONDS + 110, forks_supervisor=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {what: int(n.replace(",", "")) for n, what in re.findall(r"(\d[\d,]*) ([\w ]+)", done.stdout)}
    assert counts["batches"], done.stdout
    assert counts["restarts"], done.stdout
    assert counts["signals"], done.stdout
