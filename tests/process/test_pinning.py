"""Several runs of one machine at a time: each pins its workers to CPUs of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock import AlternatingSampler, ParallelSampler, RandomAgent
from penstock.envs import CountingEnv
from penstock.vector import ShmVectorEnv
from penstock.workers.affinity import usable_cpus

from .support import Script

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(len(usable_cpus()) < 2, reason="one CPU is not enough for two runs"),
    pytest.mark.slow,
]

RUN = """
with ParallelSampler(CountingEnv, batch_T=2, batch_B=1) as sampler:
    sampler.initialize(RandomAgent())
    say(*sampler.stats().workers[0].cpus)
    sys.stdin.readline()
"""


def test_a_second_run_takes_another_cpu_and_says_so(tmp_path: Path) -> None:
    mask = usable_cpus()
    with Script(tmp_path, RUN.replace("sys.stdin.readline()", "time.sleep(600)")) as script:
        assert script.line() == [str(mask[0])]
        with ParallelSampler(CountingEnv, batch_T=2, batch_B=1) as sampler:
            sampler.initialize(RandomAgent())
            assert sampler.stats().workers[0].cpus == (mask[1],)
            assert f"1 worker, on CPUs {mask[1]}" in repr(sampler)
        with ShmVectorEnv([CountingEnv]) as envs:
            assert os.sched_getaffinity(envs.worker_pids[0]) == {mask[1]}
        for cls in (ParallelSampler, AlternatingSampler):
            with cls(CountingEnv, batch_T=2, batch_B=2 * len(mask), n_workers=2 * len(mask)) as sampler:
                sampler.initialize(RandomAgent())
                assert {worker.cpus for worker in sampler.stats().workers} == {()}, "too few CPUs are left"
                assert "not pinned" in repr(sampler)
                assert all(os.sched_getaffinity(pid) == set(mask) for pid in sampler.worker_pids)
                sampler.obtain_samples(0)
    with ParallelSampler(CountingEnv, batch_T=2, batch_B=1) as sampler:
        sampler.initialize(RandomAgent())
        assert sampler.stats().workers[0].cpus == (mask[0],)
