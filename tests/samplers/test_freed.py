"""A sampler that is done with is freed at once, without the garbage collector."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import ParallelSampler, RandomAgent, TrajInfo
from penstock.envs import CountingEnv

from ..scale import quick_first
from ..support import Diary


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def memory_files() -> int:
    return sum("memfd" in os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("traj_info_cls", quick_first([TrajInfo, Diary]))
def test_a_sampler_is_part_of_no_cycle(traj_info_cls: type[TrajInfo]) -> None:
    before = memory_files()
    sampler = ParallelSampler(CountingEnv, batch_T=16, batch_B=4, n_workers=2, traj_info_cls=traj_info_cls)
    sampler.initialize(RandomAgent())
    sampler.obtain_samples(0)
    sampler.shutdown()
    del sampler
    assert memory_files() == before


@pytest.mark.usefixtures("_no_collector")
def test_one_that_is_dropped_ends_its_workers_too() -> None:
    before = memory_files()
    sampler = ParallelSampler(CountingEnv, batch_T=16, batch_B=4, n_workers=2)
    sampler.initialize(RandomAgent())
    del sampler
    assert memory_files() == before
