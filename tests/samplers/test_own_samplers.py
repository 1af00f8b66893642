"""Samplers of one's own: with another schedule, or other workers. The classes are those of docs/subclassing.md."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest

from penstock import (
    AsyncSampler,
    ConfigError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    Sampler,
    SamplerState,
    SamplerStateError,
    SerialSampler,
    WorkerError,
)
from penstock.envs import CountingEnv
from penstock.samplers import OnDemand, Run, Schedule, WorkersAct
from penstock.samplers.refusals import ASYNC

from ..docs.test_pages import blocks
from ..support import assert_same, collect_with, crashing_env
from .started import started

SIZE = {"batch_T": 5, "batch_B": 4, "n_workers": 2, "eval_n_envs": 2, "eval_max_steps": 40}


@cache
def documented() -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks("subclassing.md"):
        if "EagerSampler" in block or "WideSampler" in block:
            exec(compile(block, "subclassing.md", "exec"), namespace)
    for name in ("sampler", "samples", "traj_infos"):  # they keep memory
        del namespace[name]
    return namespace


@pytest.mark.parametrize("evaluate", [(), range(5)])
@pytest.mark.parametrize("name", ["EagerSampler", "WideSampler"])
def test_a_sampler_of_the_page_collects_the_same_batches(name: str, evaluate: Any) -> None:
    found = collect_with(documented()[name], CountingEnv, evaluate=evaluate, n_slots=2, **SIZE)
    assert_same(found, collect_with(SerialSampler, CountingEnv, evaluate=evaluate, **SIZE))


def test_the_eager_one_samples_while_the_learner_trains() -> None:
    with started(CountingEnv, cls=documented()["EagerSampler"], n_slots=2, **SIZE) as sampler:
        first, _ = sampler.obtain_samples(0)
        assert sampler.state is SamplerState.READY
        before = first.copy()
        sampler.run.pool.wait("the test")
        assert [worker.batches for worker in sampler.stats().workers] == [2, 2]
        assert_same(first.numpy(), before.numpy())
        sampler.start_samples(1)
        assert sampler.state is SamplerState.SAMPLING
        second, _ = sampler.wait_samples()
        assert sampler.state is SamplerState.READY
        assert (first.is_current, second.is_current) == (False, True)  # batch 2 has begun, in the memory of batch 0
        assert sampler.get_attr("length") == [5] * 4


def test_the_wide_one_has_a_worker_for_each_environment() -> None:
    with started(CountingEnv, cls=documented()["WideSampler"], **SIZE) as sampler:
        assert [list(worker.env_ranks) for worker in sampler.stats().workers] == [[0], [1], [2], [3]]


def test_an_error_of_a_worker_comes_out_of_a_schedule_of_ones_own() -> None:
    options: dict[str, Any] = {"env_kwargs": {"at": 7, "spare_pid": os.getpid()}, "n_slots": 2}
    with started(crashing_env, cls=documented()["EagerSampler"], batch_T=5, **options) as sampler:
        with pytest.raises(WorkerError):
            for itr in range(4):
                sampler.obtain_samples(itr)
        assert sampler.state is SamplerState.BROKEN


def test_what_a_part_refuses_names_its_reason() -> None:
    class Busy(OnDemand):
        refused_as = ASYNC

    class BusySampler(ParallelSampler):
        def schedule(self) -> Schedule:
            return Busy()

    with started(CountingEnv, cls=BusySampler) as sampler:
        with pytest.raises(
            ConfigError, match=r"state_dict\(\) and load_state_dict\(\) and AsyncSampler do not go together"
        ):
            sampler.state_dict()
        sampler.obtain_samples(0)


def test_each_hook_is_called_once() -> None:
    calls = list[str]()

    class Counted(ParallelSampler):
        def acting(self) -> Any:
            calls.append("acting")
            return WorkersAct()

        def schedule(self) -> Any:
            calls.append("schedule")
            return OnDemand()

    collect_with(Counted, CountingEnv, evaluate=range(2), **SIZE)
    assert sorted(calls) == ["acting", "schedule"]


@pytest.mark.parametrize("cls", [SerialSampler, AsyncSampler])
def test_there_is_no_run_before_initialize(cls: type[Sampler]) -> None:
    sampler = cls(CountingEnv, **SIZE)
    with pytest.raises(SamplerStateError, match=r"run was called before initialize: call sampler.initialize\(agent\)"):
        _ = sampler.run
    with pytest.raises(SamplerStateError, match="server_stats was called before initialize"):
        _ = GpuSampler(CountingEnv, **SIZE).server_stats
    assert (sampler.policy_version, sampler.n_workers, sampler.worker_pids) == (None, 0, [])
    sampler.initialize(RandomAgent(), seed=1)
    assert isinstance(sampler.run, Run)
    sampler.shutdown()
    assert sampler.worker_pids == []
