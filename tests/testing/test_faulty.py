"""Faults in their places: with every sampler and start method, only the chosen call fails."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
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
    WorkerDiedError,
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

from ..scale import FULL, pairs, scaled
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
    + (pairs(PICKLED, ("fork", "spawn")) if FULL else [("env step", "fork")])
    + [(where, "serial") for where in PLACES if where != "sending"],
)
def test_an_exception_from_every_place_in_a_worker_or_in_this_process(where: str, start_method: str) -> None:
    place, words = PLACES[where]
    cls: Any = SerialSampler if start_method == "serial" else partial(ParallelSampler, start_method=start_method)
    with pytest.raises(WorkerError, match=f"(?s)InjectedFault.*{words}.*raise at call 1") as caught:
        last_batch_and_evaluation(cls, **place(Fault("raise")))
    assert isinstance(caught.value.__cause__, InjectedFault)


@pytest.mark.parametrize("where", scaled(list(PLACES), ["env init", "agent reset_one", "collect_batch", "sending"]))
def test_a_kill_in_every_place(where: str) -> None:
    place, words = PLACES[where]
    with pytest.raises(WorkerDiedError, match=f"(?s)SIGKILL.*{words}"):
        last_batch_and_evaluation(ParallelSampler, **place(Fault("kill", spare_pid=os.getpid())))


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


def test_an_environment_that_fails_to_close_is_one_warning() -> None:
    fault = Fault("raise", spare_pid=os.getpid())
    sampler = ParallelSampler(faulty_env("CartPole-v1", fault, "close"), batch_T=2, batch_B=1)
    sampler.initialize(RandomAgent())
    with pytest.warns(RuntimeWarning, match="InjectedFault"):
        sampler.shutdown()


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


@pytest.mark.parametrize("at", [(9, 2), (2, 9)])
def test_two_faults_in_one_collector(at: tuple[int, int]) -> None:
    cls: Any = ResetCollector
    for call in at:
        cls = faulty_collector(cls, Fault("raise", at=call))
    with pytest.raises(WorkerError, match=r"itr=1.*at call 2"):
        last_batch_and_evaluation(SerialSampler, batches=3, collector_cls=cls)


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


# ---- an agent inside another ---------------------------------------------------------------


class Weighted(RandomAgent):
    """An agent with a parameter and a state per column; no two copies may share the state."""

    recurrent = True

    def __init__(self) -> None:
        self.weight = np.ones(2)

    def seed_columns(self, rngs: Any) -> None:
        super().seed_columns(rngs)
        self.age = np.zeros(len(rngs))

    def reset_one(self, column: int) -> None:
        self.age[column] = 0

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        return (self.age + self.weight.sum()).astype(np.float32)

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        self.age += 1
        return super().step(observation, prev_action, prev_reward)

    def read_parameters(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def write_parameters(self, parameters: Any) -> None:
        self.weight = parameters["weight"].copy()


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
def test_a_delegating_agent_acts_like_the_agent_inside(cls: type[Sampler]) -> None:
    def values(wrap: Callable[[Any], Any]) -> list[Any]:
        inner = Weighted()
        agent, seen = wrap(inner), []
        with cls(CountingEnv, batch_T=7, batch_B=3, n_workers=2, eval_n_envs=2, eval_max_steps=9) as sampler:
            sampler.initialize(agent, seed=0, bootstrap_value=True)
            for itr in range(4):
                sampler.evaluate_agent(itr)
                samples, _ = sampler.obtain_samples(itr)
                seen += [samples.agent.bootstrap_value.tolist(), samples.agent.action.tolist()]
                agent.load_state_dict({"weight": np.full(2, 10.0 * itr)})
                agent.sync_shared_memory()
            assert agent.state_dict()["weight"].tolist() == [30.0, 30.0]
            assert agent.recurrent
        return seen

    plain = values(lambda inner: inner)
    assert values(DelegatingAgent) == plain
    assert values(lambda inner: FaultyAgent(inner, Fault("raise", at=1000), "value")) == plain


def test_copies_of_a_delegating_agent_share_no_state() -> None:
    agent = FaultyAgent(Weighted(), Fault("raise", at=2), "step")
    env = CountingEnv()
    agent.initialize(env.observation_space, env.action_space)
    streams = [[np.random.default_rng(b) for b in range(2)] for _ in range(2)]
    first, second = (agent.runtime.worker_copy().runtime.column_copy(rngs) for rngs in streams)
    first.step(np.zeros((2, 2)), np.zeros(2), np.zeros(2, np.float32))
    inner: Any = second.agent
    assert inner.age.tolist() == [0, 0]
    assert inner is not agent.agent
    assert not hasattr(agent.agent, "age"), "the learner's agent has no columns"
