"""What ParallelSampler promises beside determinism: exact accounting, uneven shares, pinning, parameters."""

import copy
import gc
import itertools
import os
import pickle
import re
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import psutil
import pytest
import threadpoolctl
import torch
from torch import nn

from penstock import (
    Affinity,
    AgentStep,
    AsyncSampler,
    CategoricalPgAgent,
    FunctionAgent,
    GpuSampler,
    NamedArrays,
    ParallelSampler,
    RandomAgent,
    ResetCollector,
    Sampler,
    SamplerStateError,
    SerialSampler,
    TrajInfo,
    WaitResetCollector,
)
from penstock.agents.joint import DelegatingAgent
from penstock.envs import CountingEnv, NestedEnv
from penstock.workers.affinity import usable_cpus

from ..children import descriptors
from ..models import Constant
from ..scale import START_METHODS, methods
from ..support import Diary, assert_same, leaves, sampler_of
from .started import started

both = pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])


class WhereEnv(CountingEnv):
    """Shows in its reward on which CPU it runs, and in its observation the fewest and the most threads that torch and
    the libraries of numpy use there."""

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        (cpu,) = psutil.Process().cpu_affinity()
        libraries = threadpoolctl.threadpool_info()
        assert {"blas", "openmp"} <= {library["user_api"] for library in libraries}
        numbers = [torch.get_num_threads(), *(library["num_threads"] for library in libraries)]
        observation[:] = min(numbers), max(numbers)
        return observation, float(cpu), *rest


@pytest.mark.linux("masks of CPUs")
@pytest.mark.slow
@methods("forkserver")
def test_workers_run_where_the_mask_or_the_caller_says(start_method: str) -> None:
    cpus = usable_cpus()

    def places(affinity: Any, cls: type[Sampler] = ParallelSampler) -> tuple[list[float], set[float]]:
        options: dict[str, Any] = {"cls": cls, "n_workers": 3, "start_method": start_method, "affinity": affinity}
        with started(WhereEnv, batch_T=1, batch_B=3, **options) as sampler:
            sampler.obtain_samples(0)
            samples, _ = sampler.obtain_samples(1)
            return samples.env.reward[0].tolist(), set(samples.env.observation.unique().tolist())

    assert places(None) == ([cpus[i % len(cpus)] for i in range(3)], {1.0})
    last = cpus[-1]
    assert places(Affinity(cpus=[last, last, last], torch_threads=2)) == ([last] * 3, {2.0})
    assert places([last, last, last], GpuSampler) == ([last] * 3, {1.0})


class Unlimited(WhereEnv):
    """Ends all limits, and loads a library of linear algebra."""

    def __init__(self) -> None:
        super().__init__()
        for name in [name for name in os.environ if name.endswith("_NUM_THREADS")]:
            del os.environ[name]
        threadpoolctl.threadpool_limits(3)
        torch.set_num_threads(3)
        import scipy.linalg  # noqa: F401 - it has an OpenBLAS of its own


@pytest.mark.linux("masks of CPUs")
@pytest.mark.slow
def test_libraries_that_an_environment_loads_are_limited_too() -> None:
    pytest.importorskip("scipy")
    with started(Unlimited, cls=ParallelSampler, batch_T=1, batch_B=1) as sampler:
        sampler.obtain_samples(0)  # the next batch begins with the observation of its last step
        assert sampler.obtain_samples(1)[0].env.observation.unique().tolist() == [1.0]


def test_the_threads_and_cpus_of_the_main_process_stay(start_method: str) -> None:
    before = torch.get_num_threads(), threadpoolctl.threadpool_info(), usable_cpus()
    with started(CountingEnv, cls=ParallelSampler, start_method=start_method):
        assert (torch.get_num_threads(), threadpoolctl.threadpool_info(), usable_cpus()) == before


class Threads(nn.Module):
    """Its value is the most threads that the process may use in which it acts."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 3)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n = max(torch.get_num_threads(), *(library["num_threads"] for library in threadpoolctl.threadpool_info()))
        return self.head(observation), torch.full((len(observation),), float(n))


@pytest.mark.slow
@methods("fork", "forkserver")
def test_the_server_process_uses_as_many_threads_as_torch_does_here(start_method: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        options: dict[str, Any] = {"server": "process", "start_method": start_method}
        with started(CountingEnv, CategoricalPgAgent(Threads), GpuSampler, **options) as sampler:
            assert sampler.obtain_samples(0)[0].agent.agent_info.value.unique().tolist() == [1.0]
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@both
def test_one_agent_may_serve_two_samplers(cls: type[Sampler]) -> None:
    agent = CategoricalPgAgent(Constant)
    with started(CountingEnv, agent, cls, batch_B=1) as first, started(CountingEnv, agent, cls, batch_B=1) as second:
        with torch.no_grad():
            agent.model.weight.fill_(4.0)
        agent.sync_shared_memory()
        for sampler in (first, second):
            assert (sampler.obtain_samples(0)[0].agent.agent_info.value == 4.0).all()
    agent.sync_shared_memory()  # with no one left to hear it


def scripted(parameters: Any, observation: Any) -> Any:
    return np.zeros(len(observation), np.int64)


AGENTS: dict[str, Any] = {
    "torch": partial(CategoricalPgAgent, Constant),
    "fused": partial(CategoricalPgAgent, Constant),
    "delegating": lambda: DelegatingAgent(CategoricalPgAgent(Constant)),
    "numpy": lambda: FunctionAgent(scripted, parameters=np.zeros(2)),
}


def train(kind: str, agent: Any) -> None:
    if kind == "numpy":
        agent.parameters += 1.0
        return
    model = getattr(agent, "agent", agent).model
    model(torch.ones(2, 2))[1].sum().backward()
    torch.optim.Adam(model.parameters(), fused=kind == "fused").step()


UNPUBLISHED = r"parameters of agent have changed.* 5 batches.*: call agent\.sync_shared_memory\(\)"


def batches(sampler: Any, then: Any, n: int = 12, first: int = 0) -> Any:
    """The numbers of the batches whose call warns, while `then` is called after each."""
    for itr in range(first, first + n):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            sampler.obtain_samples(itr)
        for warning in found:
            assert re.search(UNPUBLISHED, str(warning.message))
            assert warning.filename == __file__
            yield itr
        then()


@pytest.mark.parametrize(
    ("kind", "cls"),
    [*product(AGENTS, [SerialSampler]), ("torch", ParallelSampler), ("numpy", GpuSampler), ("torch", AsyncSampler)],
)
def test_parameters_that_are_never_published_are_noticed_once(kind: str, cls: Any) -> None:
    agent = AGENTS[kind]()
    with started(CountingEnv, agent, cls, batch_T=2, n_workers=1) as sampler:
        # Batch 0 has the right parameters, the batches 1 to 5 have not.
        assert list(batches(sampler, partial(train, kind, agent), 40)) == [5]


@pytest.mark.parametrize("kind", AGENTS)
def test_who_publishes_or_does_not_train_is_not_warned(kind: str) -> None:
    agent = AGENTS[kind]()
    with started(CountingEnv, agent, eval_n_envs=1, eval_episodes=1) as sampler:

        def publish_sometimes() -> None:
            train(kind, agent)
            if next(count) % 5 == 4:
                agent.sync_shared_memory()

        count = itertools.count()
        assert not list(batches(sampler, lambda: None, 20)), "a frozen agent"
        assert not list(batches(sampler, publish_sometimes, 20, 20))
        for itr in range(20):
            sampler.evaluate_agent(itr)
        assert list(batches(sampler, partial(train, kind, agent), 40, 40)), "from now on it is forgotten"


def test_running_statistics_are_no_training() -> None:
    class Statistics(Constant):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, observation: Any) -> Any:
            return super().forward(self.norm(observation))

    agent = CategoricalPgAgent(Statistics)
    with started(CountingEnv, agent) as sampler:
        assert not list(batches(sampler, lambda: agent.model.train()(torch.rand(4, 2))))
        assert agent.model.norm.num_batches_tracked == 12


def test_a_copy_of_an_agent_in_use_is_an_agent_of_its_own() -> None:
    agent = CategoricalPgAgent(Constant)
    with started(CountingEnv, agent, ParallelSampler):
        target = copy.deepcopy(agent)
        with torch.no_grad():
            target.model.weight.fill_(4.0)
        assert float(agent.model.weight.detach().max()) == 0.0
        assert float(pickle.loads(pickle.dumps(target)).model.weight.detach().min()) == 4.0
        with pytest.raises(SamplerStateError, match="belongs to no sampler yet"):
            target.sync_shared_memory()
        agent.sync_shared_memory()


@both
def test_samples_are_views_of_one_memory_and_a_copy_is_not(cls: type[Sampler]) -> None:
    with cls(CountingEnv, batch_T=3, batch_B=2) as sampler:
        example = sampler.initialize(RandomAgent(), bootstrap_value=True)
        samples, _ = sampler.obtain_samples(0)
        kept = samples.copy()
        assert samples.env.observation.data_ptr() == sampler.samples_np.env.observation.ctypes.data
        sampler.obtain_samples(1)
        assert not torch.equal(kept.env.observation, samples.env.observation)
        recorded = {name for name, _ in samples.leaves()}
        assert {name for name, _ in example.leaves()} == recorded
        assert example.env.observation.shape == (2,)
        assert example.agent.bootstrap_value.shape == ()


def test_stats_add_up() -> None:
    with started(CountingEnv, cls=ParallelSampler, batch_T=50, batch_B=4, n_workers=2) as sampler:
        for itr in range(3):
            sampler.obtain_samples(itr)
        stats = sampler.stats()
    assert [w.steps for w in stats.workers] == [300, 300]
    assert [w.batches for w in stats.workers] == [3, 3]
    for worker in stats.workers:
        assert min(worker.stepping, worker.acting, worker.resetting, worker.waiting) > 0
    assert stats.bytes_shared > sampler.samples_np.env.observation.nbytes
    assert stats.valid_share == 1
    assert "valid" not in repr(stats)


class SlowToReset(CountingEnv):
    def reset(self, **kwargs: Any) -> Any:
        time.sleep(0.01)
        return super().reset(**kwargs)


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
@pytest.mark.parametrize("waits", [False, True])
def test_slow_resets_are_told_from_steps_and_from_waiting(cls: type[Sampler], waits: bool) -> None:
    collector = WaitResetCollector if waits else ResetCollector
    with cls(SlowToReset, batch_T=10, batch_B=2, n_workers=1, collector_cls=collector) as sampler:
        began = time.monotonic()
        sampler.initialize(RandomAgent(), seed=0)
        first = sampler.stats().workers[0].first_resets
        for itr in range(4):
            sampler.obtain_samples(itr)
        (own,), passed = sampler.stats().workers, time.monotonic() - began
        assert sum((own.acting, own.stepping, own.resetting, own.waiting)) <= passed, "nothing is counted twice"
        assert own.first_resets == first >= 0.02
        assert own.resetting >= (3 if waits else 4) * 0.02, "the last resets between batches may not have begun"
        assert own.resets_between == (own.resetting if waits else 0)
        # An episode has 5 steps, and with random steps before the first batch that batch has fewer.
        valid = sampler.stats().valid_share
        assert valid == pytest.approx(0.5, abs=0.1) if waits else valid == 1
        assert ("rows are valid" in repr(sampler.stats())) == waits


@pytest.mark.slow
@methods(*START_METHODS)
def test_workers_see_todays_environment_variables(start_method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Variables(CountingEnv):
        def variables(self) -> Any:
            return [os.environ.get(name) for name in ("PENSTOCK_TEST", "OMPI_RANK")]

    monkeypatch.setenv("PENSTOCK_TEST", "7")
    monkeypatch.setenv("OMPI_RANK", "1")  # MPI variables are hidden, so that nothing takes a worker for a rank
    with started(Variables, cls=ParallelSampler, batch_B=1, start_method=start_method) as sampler:
        assert sampler.call("variables") == [["7", None]]
    assert os.environ["OMPI_RANK"] == "1"


class Telling(RandomAgent):
    """Reports what it was given."""

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        size = np.full(len(prev_reward), sum(leaf.dtype.itemsize for leaf in leaves(observation)))
        action, _ = super().step(observation, prev_action, prev_reward)
        return AgentStep(action, NamedArrays(given=observation.copy(), size=size))


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler, GpuSampler])
@pytest.mark.parametrize(("env_fn", "dtype"), [("CartPole-v1", np.float16), (NestedEnv, None)])
def test_an_agent_acts_on_observations_as_they_are_recorded(cls: type[Sampler], env_fn: Any, dtype: Any) -> None:
    with started(env_fn, Telling(), cls, observation_dtype=dtype, n_workers=2) as sampler:
        sampler.obtain_samples(0)
        info, observation = sampler.samples_np.agent.agent_info, sampler.samples_np.env.observation
        assert_same(info.given, observation)
        assert (info.size == sum(leaf.dtype.itemsize for leaf in leaves(observation))).all()
        assert dtype is None or observation.dtype == dtype


# ---- what it costs, and what is left -------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "batch_T", "n_batches", "most"), [(GpuSampler, 128, 4, 100 * 4 * 128), (ParallelSampler, 1, 50, 150 * 50)]
)
def test_the_main_process_calls_few_functions(cls: type[Sampler], batch_T: int, n_batches: int, most: int) -> None:
    """For each row of central sampling, and for each short batch."""
    calls: list[str] = []
    with started(CountingEnv, cls=cls, batch_T=batch_T, batch_B=4, n_workers=2) as sampler:
        sampler.obtain_samples(0)
        sys.setprofile(lambda frame, event, argument: calls.append(event))
        try:
            for itr in range(n_batches):
                sampler.obtain_samples(itr)
        finally:
            sys.setprofile(None)
    assert calls.count("call") <= most


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize(("is_shut_down", "traj_info_cls"), [(True, TrajInfo), (True, Diary), (False, Diary)])
def test_a_sampler_that_is_done_with_is_freed_at_once(is_shut_down: bool, traj_info_cls: type[TrajInfo]) -> None:
    """It is part of no cycle. One that is dropped ends its workers too."""

    def memory_files() -> int:
        return sum(what[0] == "0" for what in descriptors().values())

    before = memory_files()
    sampler = sampler_of(ParallelSampler, traj_info_cls=traj_info_cls)
    sampler.initialize(RandomAgent())
    sampler.obtain_samples(0)
    if is_shut_down:
        sampler.shutdown()
    del sampler
    assert memory_files() == before
