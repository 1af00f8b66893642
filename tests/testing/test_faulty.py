"""Faults in their places: with every sampler and start method, only the chosen call fails."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from penstock import (
    ConfigError,
    EvalCollector,
    ParallelSampler,
    RandomAgent,
    ResetCollector,
    Sampler,
    SerialSampler,
    TrajInfo,
    WorkerError,
)
from penstock.envs import CountingEnv
from penstock.testing import (
    DelegatingAgent,
    Fault,
    FaultyAgent,
    FaultyEnv,
    InjectedFault,
    faulty_collector,
    faulty_env,
    faulty_eval_collector,
    faulty_traj_info,
)

from ..scale import pairs, scaled
from ..support import assert_same, sampler_of

pytestmark = pytest.mark.slow

# For each place: the sampler's arguments, and a part of the error message.
Place = Callable[[Fault], dict[str, Any]]
PLACES: dict[str, tuple[Place, str]] = {
    "env init": (lambda f: {"env_fn": [CountingEnv, faulty_env(CountingEnv, f, "init")]}, "building env_rank 1"),
    "env reset": (lambda f: {"env_fn": [CountingEnv, faulty_env(CountingEnv, f, "reset")]}, "resetting env_rank 1"),
    "env step": (lambda f: {"env_fn": [CountingEnv, faulty_env(CountingEnv, f, "step")]}, "stepping env_rank 1, t=0"),
    "agent step": (lambda f: {"agent": FaultyAgent(RandomAgent(), f, "step")}, "acting, t=0"),
    "agent value": (lambda f: {"agent": FaultyAgent(RandomAgent(), f, "value")}, r"\(itr=0\)"),
    "agent reset_one": (lambda f: {"agent": FaultyAgent(RandomAgent(), f, "reset_one")}, "env_rank 0, t=4"),
    "agent sample_mode": (lambda f: {"agent": FaultyAgent(RandomAgent(), f, "sample_mode")}, r"\(itr=0\)"),
    "start_envs": (lambda f: {"collector_cls": faulty_collector(ResetCollector, f, "start_envs")}, "start-up"),
    "collect_batch": (lambda f: {"collector_cls": faulty_collector(ResetCollector, f)}, r"\(itr=0\)"),
    "reset_if_needed": (
        lambda f: {"collector_cls": faulty_collector(ResetCollector, f, "reset_if_needed")},
        "waiting for the next command",
    ),
    "end_batch": (lambda f: {"collector_cls": faulty_collector(ResetCollector, f, "end_batch")}, r"t=5 \(itr=0\)"),
    "evaluation": (lambda f: {"eval_collector_cls": faulty_eval_collector(EvalCollector, f)}, r"t=0 \(evaluation"),
    "terminate": (lambda f: {"traj_info_cls": faulty_traj_info(TrajInfo, f)}, "t=4"),
    "sending": (lambda f: {"traj_info_cls": faulty_traj_info(TrajInfo, f, "sending")}, "sending results"),
}


def last_batch_and_evaluation(
    cls: type[Sampler], env_fn: Any = CountingEnv, agent: Any = None, batches: int = 1, **arguments: Any
) -> Any:
    """One worker with two environments; a batch in which an episode ends, and an evaluation."""
    sizes = {"batch_T": 6, "batch_B": 2, "n_workers": 1, "eval_n_envs": 1, "eval_max_steps": 12}
    with sampler_of(cls, env_fn, **sizes, **arguments) as sampler:
        sampler.initialize(agent or RandomAgent(), seed=0, bootstrap_value=True)
        for itr in range(batches):
            sampler.obtain_samples(itr)
        infos = sampler.evaluate_agent(batches)
        return sampler.samples_np.copy(), infos


# One for each object that is pickled for the worker.
PICKLED = ("env step", "agent step", "collect_batch", "evaluation", "terminate", "sending")


@pytest.mark.parametrize(
    ("where", "start_method"),
    [(where, "forkserver") for where in PLACES]
    + pairs(PICKLED, scaled(("fork", "spawn"), ("fork",)))
    + [(where, "serial") for where in PLACES if where != "sending"],
)
def test_an_exception_from_every_place_in_a_worker_or_in_this_process(where: str, start_method: str) -> None:
    place, words = PLACES[where]
    cls: Any = SerialSampler if start_method == "serial" else partial(ParallelSampler, start_method=start_method)
    with pytest.raises(WorkerError, match=f"(?s)InjectedFault.*{words}.*raise at call 1") as caught:
        last_batch_and_evaluation(cls, **place(Fault("raise")))
    assert isinstance(caught.value.__cause__, InjectedFault)


@pytest.mark.parametrize(
    ("cls", "where"),
    [(SerialSampler, where) for where in PLACES]
    + [(ParallelSampler, where) for where in scaled((*PICKLED, "env init"), ("env init", "agent step", "terminate"))],
)
def test_a_fault_that_never_fires_changes_nothing(cls: type[Sampler], where: str) -> None:
    late = Fault("raise", at=1 if where in ("env init", "start_envs") else 1000, spare_pid=os.getpid())
    if where in ("env init", "start_envs") and cls is ParallelSampler:
        late = Fault("delay", seconds=0)
    samples, infos = last_batch_and_evaluation(cls, **PLACES[where][0](late))
    plain, plain_infos = last_batch_and_evaluation(SerialSampler)
    assert_same(samples, plain)
    assert [info.Length for info in infos] == [info.Length for info in plain_infos]


@pytest.mark.parametrize("how", ["unpicklable", "unprintable"])
@pytest.mark.parametrize("where", ["env step", "sending"])
def test_unusual_exceptions_are_reported(how: str, where: str) -> None:
    with pytest.raises(WorkerError, match=how.capitalize()):
        last_batch_and_evaluation(ParallelSampler, **PLACES[where][0](Fault(how)))


# ---- which call, in which process ----------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "at", "words"),
    [
        ("env step", 4, "stepping env_rank 1, t=3"),
        ("agent step", 3, "acting, t=2"),
        ("collect_batch", 3, r"\(itr=2\)"),
        ("reset_if_needed", 2, r"waiting for the next command \(itr=1\)"),
        ("terminate", 2, "env_rank 1, t=4"),
        ("sending", 3, r"\(itr=1\)"),
        ("evaluation", 8, r"t=7 \(evaluation, itr=3\)"),
    ],
)
def test_only_the_chosen_call_fails(where: str, at: int, words: str) -> None:
    with pytest.raises(WorkerError, match=f"(?s)InjectedFault.*{words}.*at call {at}"):
        last_batch_and_evaluation(ParallelSampler, batches=3, **PLACES[where][0](Fault("raise", at=at)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: FaultyEnv(CountingEnv(), Fault("raise"), "stop"),
        lambda: faulty_env(CountingEnv, Fault("raise"), "render"),
        lambda: faulty_env(CountingEnv, Fault("raise", at=2), "init"),
        lambda: FaultyAgent(RandomAgent(), Fault("raise"), "act"),
        lambda: faulty_collector(ResetCollector, Fault("raise"), "act"),
        lambda: faulty_collector(ResetCollector, Fault("raise", at=2), "start_envs"),
        lambda: faulty_traj_info(TrajInfo, Fault("raise"), "step"),
        lambda: faulty_env("NoSuchEnv-v0", Fault("raise")),
        lambda: DelegatingAgent("no agent"),  # type: ignore[arg-type]
    ],
)
def test_unknown_places_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=r"must be|at=1|not a registered"):
        make()
