"""How much Python the main process runs for one row of central sampling, and for one short batch."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from penstock import GpuSampler, ParallelSampler, RandomAgent
from penstock.envs import CountingEnv


def calls_of(sampler: Any, n_batches: int) -> int:
    """How many Python functions this thread calls in so many batches."""
    n_calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal n_calls
        n_calls += event == "call"

    sampler.initialize(RandomAgent(), seed=0)
    sampler.obtain_samples(0)
    sys.setprofile(count)
    try:
        for itr in range(n_batches):
            sampler.obtain_samples(itr)
    finally:
        sys.setprofile(None)
    return n_calls


def test_a_row_of_central_sampling_takes_few_calls() -> None:
    with GpuSampler(CountingEnv, batch_T=128, batch_B=4, n_workers=2) as sampler:
        assert calls_of(sampler, 4) <= 100 * 4 * 128


@pytest.mark.slow
def test_a_batch_of_one_row_takes_few_calls() -> None:
    with ParallelSampler(CountingEnv, batch_T=1, batch_B=4, n_workers=2) as sampler:
        assert calls_of(sampler, 50) <= 150 * 50
