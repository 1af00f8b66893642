"""AsyncSampler when something fails: while the learner is in its own code, in a call, or in the learner itself."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock import AsyncSampler, RandomAgent, WorkerDiedError, WorkerTimeoutError
from penstock.envs import CountingEnv, SlowEnv
from penstock.testing import faulty_env

from ..scale import scaled
from ..support import until
from .support import SLACK, Notebook, note, pause

N_WORKERS, B, T = 3, 6, 16
LOG_SECONDS = 0.2 * SLACK

pytestmark = [pytest.mark.timeout(scaled(3600, 60)), pytest.mark.slow]


def async_sampler(env_fn: Any = CountingEnv, **kwargs: Any) -> AsyncSampler:
    arguments = {"batch_T": T, "batch_B": B, "n_workers": N_WORKERS, "max_decorrelation_steps": 0, **kwargs}
    return AsyncSampler(env_fn, **arguments)


def begin(sampler: AsyncSampler) -> None:
    sampler.initialize(RandomAgent(), seed=1)
    sampler.start()


def awaiting_credit(sampler: AsyncSampler, rank: int) -> bool:
    return sampler.run.memory.control.has_arrived(rank)


# ---- deaths --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_idle", [False, True], ids=["collecting", "waiting for a slot"])
def test_a_death_is_logged_while_the_learner_is_in_its_own_code(
    is_idle: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with async_sampler(CountingEnv if is_idle else SlowEnv) as sampler:
        begin(sampler)
        sampler.obtain_samples(0)
        if is_idle:
            until(lambda: awaiting_credit(sampler, 1))
        pid = sampler.worker_pids[1]
        began = time.time()
        os.kill(pid, signal.SIGKILL)
        until(lambda: caplog.records)
        (record,) = caplog.records
        note("async, death to log line, s", record.created - began, LOG_SECONDS)
        assert record.getMessage().startswith(f"worker 1 (pid {pid}, env_rank 2 to 3) has ended while ")
        assert record.getMessage().endswith(": the next call on the sampler will report it")
        for call in (lambda: sampler.obtain_samples(1), sampler.poll_samples, lambda: sampler.evaluate_agent(0)):
            with pytest.raises(WorkerDiedError, match=f"^worker 1 .pid {pid}"):
                call()


def test_a_fork_while_another_sampler_runs(caplog: pytest.LogCaptureFixture) -> None:
    """The thread that watches the workers stands still meanwhile, and continues."""
    forked: dict[str, Any] = {"start_method": "fork"}
    with async_sampler(**forked, n_workers=2) as first, async_sampler(**forked, n_workers=2) as second:
        begin(first)
        begin(second)
        for itr in range(3):
            for sampler in (first, second):
                assert sampler.obtain_samples(itr)[0].batch == itr
        os.kill(first.worker_pids[1], signal.SIGKILL)
        until(lambda: any("has ended while" in record.getMessage() for record in caplog.records))
        with pytest.raises(WorkerDiedError):
            first.obtain_samples(3)
        second.obtain_samples(3)


def test_the_end_of_a_sampler_logs_no_death(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(scaled(50, 3)):
        with async_sampler() as sampler:
            begin(sampler)
            sampler.obtain_samples(0)
    assert caplog.records == []


@pytest.mark.parametrize("server", [None, "process"], ids=["workers act", "server acts"])
def test_publishing_reports_a_death_of_a_worker_that_it_waits_for(server: Any) -> None:
    """With lag=1, the second `sync_shared_memory` overwrites parameters that the next batch is pinned to."""
    agent = RandomAgent()
    with async_sampler(lag=1, server=server) as sampler:
        sampler.initialize(agent, seed=1)
        sampler.start()
        sampler.obtain_samples(0)
        agent.sync_shared_memory()
        until(lambda: all(awaiting_credit(sampler, rank) for rank in range(len(sampler.worker_pids))))
        reader = sampler.worker_pids[-1 if server else 0]
        os.kill(reader, signal.SIGSTOP)
        try:
            sampler.obtain_samples(1)  # the next batch is pinned to version 2
            agent.sync_shared_memory()
            killed = threading.Timer(0.05, os.kill, (reader, signal.SIGKILL))
            killed.start()
            with pytest.raises(WorkerDiedError, match="sync_shared_memory"):
                agent.sync_shared_memory()
            killed.join()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(reader, signal.SIGCONT)


# ---- exceptions and hangs --------------------------------------------------------------------


def test_a_hang_while_the_learner_is_in_its_own_code_is_reported_by_the_next_call(tmp_path: Path) -> None:
    limit = 0.5
    notebook = Notebook(tmp_path)
    fns = [*[CountingEnv] * 5, faulty_env(CountingEnv, notebook.fault("hang", at=20))]
    with async_sampler(fns, step_timeout=limit) as sampler:
        begin(sampler)
        control = sampler.run.memory.control
        until(lambda: all(control.has_arrived(rank) for rank in (0, 1)))
        until((tmp_path / "note").exists)
        pause(2 * limit + 0.3)  # the learner trains
        began = time.monotonic()
        with pytest.raises(WorkerTimeoutError, match=f"worker 2 .* made no progress for {limit:g} s"):
            sampler.obtain_samples(0)
        note("async, call after a hang to error, s", time.monotonic() - began, limit + 0.5)


# ---- the main process ------------------------------------------------------------------------


def test_workers_that_wait_for_a_slot_use_no_cpu() -> None:
    seconds = scaled(10.0, 1.0)
    with async_sampler() as sampler:
        begin(sampler)
        sampler.obtain_samples(0)
        until(lambda: all(awaiting_credit(sampler, rank) for rank in range(N_WORKERS)))
        processes = [psutil.Process(pid) for pid in sampler.worker_pids]
        pause(0.3)  # the last one may still have spun
        before = [sum(process.cpu_times()[:2]) for process in processes]
        pause(seconds)
        used = [sum(process.cpu_times()[:2]) - then for process, then in zip(processes, before, strict=True)]
    note("async, CPU share of a worker that waits for a slot", max(used) / seconds, 0.02)
