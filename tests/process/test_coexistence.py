"""A sampler in company: forks, threads, daemons, other samplers, test runners, MPI and CUDA."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from penstock import ConfigError, ParallelSampler, RandomAgent, WorkerDiedError
from penstock.envs import CountingEnv

from ..scale import methods, scaled
from ..support import BOUND
from .support import SLACK, Script, gone_after, python_path

LEFT_SECONDS = 2.0 * SLACK  # until nothing is left of a main process that was killed

pytestmark = [pytest.mark.timeout(scaled(3600, 60)), pytest.mark.slow]


@methods("forkserver")
def test_a_fork_that_ends_by_itself_harms_nobody(tmp_path: Path, start_method: str) -> None:
    body = """
    sampler = ParallelSampler(CountingEnv, batch_T=5, batch_B=2, n_workers=2, start_method=METHOD)
    sampler.initialize(RandomAgent())
    say(*sampler.worker_pids)
    child = os.fork()
    if child == 0:
        sys.exit(7)  # through the interpreter's whole shutdown, with its exit handlers
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    for itr in range(20):
        sampler.obtain_samples(itr)
    sampler.shutdown()
    say("fine")
    """
    with Script(tmp_path, body, METHOD=start_method) as script:
        workers = script.pids()
        out, stderr = script.end()
        assert (out, script.process.returncode) == ("fine\n", 0)
        gone_after(workers, time.monotonic(), LEFT_SECONDS)
        assert stderr == ""


@methods("forkserver")
def test_a_fork_may_have_a_sampler_of_its_own(tmp_path: Path, start_method: str) -> None:
    """Though the main process has used the same start method, and its supervisor, before."""
    body = """
    def total(seed):
        with ParallelSampler("CartPole-v1", batch_T=5, batch_B=2, n_workers=2, start_method=METHOD) as sampler:
            sampler.initialize(RandomAgent(), seed=seed)
            return float(sampler.obtain_samples(0)[0].env.observation.sum())
    ours = total(3)
    child = os.fork()
    if child == 0:
        os._exit(7 if total(3) == ours else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    """
    with Script(tmp_path, body, METHOD=start_method) as script:
        _, stderr = script.end()
        assert (stderr, script.process.returncode) == ("", 0)


@methods("forkserver")
def test_a_daemonic_parent_may_have_workers(tmp_path: Path, start_method: str) -> None:
    body = """
    import multiprocessing
    def body(results):
        with ParallelSampler(CountingEnv, batch_T=5, batch_B=2, n_workers=2, start_method=METHOD) as sampler:
            sampler.initialize(RandomAgent())
            samples, _ = sampler.obtain_samples(0)
            results.send((multiprocessing.current_process().daemon, float(samples.env.reward.sum())))
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    parent = context.Process(target=body, args=(writer,), daemon=True)
    parent.start()
    assert reader.poll(20)
    daemonic, rewards = reader.recv()
    assert daemonic and rewards > 0
    parent.join()
    assert parent.exitcode == 0
    """
    with Script(tmp_path, body, METHOD=start_method) as script:
        _, stderr = script.end()
        assert (stderr, script.process.returncode) == ("", 0)


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
def test_a_sampler_in_a_thread(start_method: str) -> None:
    results: list[Any] = []

    def body() -> None:
        try:
            with ParallelSampler(CountingEnv, batch_T=6, batch_B=2, start_method=start_method) as sampler:
                sampler.initialize(RandomAgent())
                results.append(float(sampler.obtain_samples(0)[0].env.reward.sum()))
        except ConfigError as error:
            results.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(BOUND)
    (result,) = results
    if start_method == "fork":
        assert 'start_method="fork" is not safe while this process has other threads' in str(result)
    else:
        assert result > 0


@methods("forkserver")
def test_workers_outlive_the_thread_that_started_them(start_method: str) -> None:
    """The kernel's parent-death signal comes when a thread ends, not a process."""
    if start_method == "fork":
        pytest.skip("fork refuses to start workers from a thread")
    with ParallelSampler(CountingEnv, batch_T=6, batch_B=2, start_method=start_method) as sampler:
        thread = threading.Thread(target=sampler.initialize, args=(RandomAgent(),))
        thread.start()
        thread.join(BOUND)
        for itr in range(scaled(1000, 50)):
            sampler.obtain_samples(itr)


def test_inside_pytest_xdist(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    n = scaled(2, 1)
    (tmp_path / "test_inside.py").write_text(
        "import pytest\n"
        "from penstock import ParallelSampler, RandomAgent\n"
        f"@pytest.mark.parametrize('i', range({n}))\n"
        "def test_it(i):\n"
        "    with ParallelSampler('CartPole-v1', batch_T=5, batch_B=1, start_method='spawn') as sampler:\n"
        "        sampler.initialize(RandomAgent())\n"
        "        sampler.obtain_samples(0)\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "1",
        "-p",
        "no:cacheprovider",
        "-W",
        "error",
        "test_inside.py",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=BOUND,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{n} passed" in done.stdout
    assert done.stderr == ""


def test_fork_is_refused_once_cuda_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with (
        ParallelSampler(CountingEnv, batch_T=2, batch_B=1, start_method="fork") as sampler,
        pytest.raises(ConfigError, match=r'start_method="fork" is not possible once CUDA is initialized.*forkserver'),
    ):
        sampler.initialize(RandomAgent())
