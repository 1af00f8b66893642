"""state_dict and load_state_dict: N batches, a new sampler, and N more are the same as 2N."""

import io
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils import EzPickle

from penstock import (
    Agent,
    AgentStep,
    AlternatingSampler,
    AsyncSampler,
    CategoricalPgAgent,
    ConfigError,
    DeterministicPgAgent,
    EpsilonGreedyAgent,
    FunctionAgent,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    RecurrentGaussianPgAgent,
    ResetCollector,
    ResumeReport,
    Sampler,
    SamplerStateError,
    SerialSampler,
    SquashedGaussianAgent,
    TrajInfo,
    WaitResetCollector,
)
from penstock.envs import CountingEnv, NestedEnv
from penstock.samplers.resuming import described
from penstock.testing import DelegatingAgent, Fault, faulty_env

from .. import support
from ..models import Lstm, Net
from ..scale import FULL, pairs
from ..support import Batch, Diary, assert_same

pytestmark = pytest.mark.slow

N = 4


def draws(observation: Any, rngs: Any) -> Any:
    return np.array([rng.integers(2) for rng in rngs])


PENDULUM = partial(gym.make, "Pendulum-v1", max_episode_steps=50)


class Rebuilt(gym.Wrapper[Any, Any, Any, Any], EzPickle):
    """Cannot be pickled in its state, but is deterministic."""

    def __init__(self) -> None:
        EzPickle.__init__(self)
        gym.Wrapper.__init__(self, PENDULUM())


def resumable_sampler(env_fn: Any = "CartPole-v1", cls: type[Sampler] = SerialSampler, **kwargs: Any) -> Sampler:
    arguments = {"batch_T": 9, "batch_B": 5, "n_workers": 2, "max_decorrelation_steps": 15}
    return cls(env_fn, **{**arguments, **kwargs})


def collect(sampler: Sampler, first: int, last: int) -> list[Batch]:
    """After every second batch an evaluation, if there are environments for it."""
    evaluate = range(1, last, 2) if sampler.config.eval_n_envs else ()
    return support.collect(sampler, range(first, last), evaluate)


def started(sampler: Sampler, agent: Agent) -> Sampler:
    sampler.initialize(agent, seed=3, bootstrap_value=isinstance(agent, RandomAgent | CategoricalPgAgent))
    return sampler


def through_a_file(state: Any) -> Any:
    """As torch saves and loads it by default: without code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(make_agent: Any, cls: type[Sampler], other_cls: type[Sampler], **kwargs: Any) -> ResumeReport:
    """Check that N + N batches are the same as 2N; returns what `load_state_dict` has said."""
    with started(resumable_sampler(cls=cls, **kwargs), make_agent()) as sampler:
        expected = collect(sampler, 0, 2 * N)
    with started(resumable_sampler(cls=cls, **kwargs), make_agent()) as sampler:
        found = collect(sampler, 0, N)
        state = through_a_file(sampler.state_dict())
        assert_same(collect(sampler, N, 2 * N), expected[len(found) :])  # saving changes nothing
    with started(resumable_sampler(cls=other_cls, **{**kwargs, "n_workers": 3}), make_agent()) as sampler:
        report = sampler.load_state_dict(state)
        found += collect(sampler, N, 2 * N)
        assert sampler.samples_np is not None
        assert sampler.obtain_samples(2 * N)[0].batch == 2 * N
    assert_same(found, expected, rtol=1e-6)
    return report


class Interrupting(ResetCollector):
    """Drops the running episodes after each batch."""

    is_due = False

    def end_batch(self) -> None:
        super().end_batch()
        self.is_due = True

    def reset_if_needed(self) -> None:
        if self.is_due:
            self.is_due = False
            self.reset_now(range(len(self.columns.env_ranks)))

    def column_state(self, e: int) -> Any:
        return super().column_state(e)

    def load_column_state(self, e: int, state: Any) -> None:
        super().load_column_state(e, state)


EVALUATED = {"eval_n_envs": 2, "eval_max_steps": 60}
CONTINUOUS = {"env_fn": PENDULUM}
OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "random": (RandomAgent, EVALUATED),
    "wait reset": (RandomAgent, {"collector_cls": WaitResetCollector, **EVALUATED}),
    "interrupted": (RandomAgent, {"collector_cls": Interrupting}),
    "nested": (RandomAgent, {"env_fn": NestedEnv}),
    "in place": (RandomAgent, {"env_fn": partial(CountingEnv, 40)}),
    "slots": (RandomAgent, {"n_slots": 3, "debug": True}),
    "traj info": (RandomAgent, {"traj_info_cls": Diary, "env_fn": partial(CountingEnv, 40)}),
    "env info": (RandomAgent, {"env_info": ["count"], "env_fn": CountingEnv}),
    "seeded episodes": (RandomAgent, {"seed_episodes": True}),
    "replayed": (RandomAgent, {"seed_episodes": True, "env_fn": Rebuilt, "batch_T": 15}),
    "categorical": (lambda: CategoricalPgAgent(lambda: Net(4, 2, 0)), EVALUATED),
    "epsilon greedy": (lambda: EpsilonGreedyAgent(lambda: Net(4, 2), epsilon=0.3), {"batch_T": 20}),
    "recurrent": (lambda: RecurrentGaussianPgAgent(lambda: Lstm(3, 1)), CONTINUOUS),
    "noise with drift": (lambda: DeterministicPgAgent(lambda: Net(3, 1), noise="ou", warmup_random_itrs=3), CONTINUOUS),
    "squashed": (lambda: SquashedGaussianAgent(lambda: Net(3, 1, 1), warmup_random_itrs=3), CONTINUOUS),
    "function": (lambda: FunctionAgent(draws), {}),
}


#: Daily these run with workers only.
WITH_WORKERS = ("random", "wait reset", "traj info", "replayed", "recurrent", "slots", "noise with drift")
#: Two of these in each row: the numbers of workers differ.
FIRST_AND_SECOND: dict[str, tuple[type[Sampler], type[Sampler], dict[str, Any]]] = {
    "serial": (SerialSampler, SerialSampler, {}),
    "parallel": (ParallelSampler, ParallelSampler, {}),
    "serial, parallel": (SerialSampler, ParallelSampler, {}),
    "central, first-ready": (GpuSampler, GpuSampler, {"min_ready": 1}),
    "central, alternating": (GpuSampler, AlternatingSampler, {}),
}
RUNS = [
    *((name, "serial") for name in OPTIONS if FULL or name not in WITH_WORKERS),
    *pairs(["random", "wait reset", "traj info", "replayed", "recurrent"], ["parallel", "serial, parallel"]),
    *pairs(["slots", "recurrent", "noise with drift"], ["central, first-ready", "central, alternating"]),
]


@pytest.mark.parametrize(("name", "samplers"), RUNS)
def test_a_run_continues_exactly(name: str, samplers: str) -> None:
    (make_agent, kwargs), (first, second, more) = OPTIONS[name], FIRST_AND_SECOND[samplers]
    report = resumed(make_agent, first, second, **kwargs, **more)
    assert (report.exact, report.reseeded) == ((0, 1, 2, 3, 4), {})
    assert str(report) == "5 environments continue exactly, 0 began new episodes"


# ---- reseeded ------------------------------------------------------------------------------


def saved(n_batches: int = N, agent: Any = None, env_state: Any = "auto", state: Any = None, **kwargs: Any) -> Any:
    """The state after some batches, and these batches."""
    with started(resumable_sampler(**kwargs), agent or RandomAgent()) as sampler:
        if state is not None:
            sampler.load_state_dict(state)
        batches = collect(sampler, 0, n_batches)
        return sampler.state_dict(env_state=env_state), batches


def first_observations(batches: list[Batch]) -> set[bytes]:
    """Where episodes begin, by their bytes: in CartPole no two are alike."""
    return {
        row.tobytes() for batch, _ in batches if batch is not None for row in batch.env.observation[batch.env.prev_done]
    }


@pytest.mark.parametrize("seed_episodes", [False, True])
def test_new_episodes_never_repeat_old_ones(seed_episodes: bool) -> None:
    kwargs = {"batch_T": 80, "max_decorrelation_steps": 0, "env_state": "never", "seed_episodes": seed_episodes}
    state, batches = saved(**kwargs)
    again, other = (saved(state=state, **kwargs) for _ in range(2))
    assert_same(again[1], other[1])  # what begins again depends on nothing but the state
    third = saved(state=again[0], **kwargs)
    parts = [first_observations(each) for each in (batches, again[1], third[1])]
    assert all(len(part) > 20 for part in parts)
    assert len(set.union(*parts)) == sum(map(len, parts))
    actions = [each[0][0].agent.action.tobytes() for each in (batches, again[1], third[1])]
    assert len(set(actions)) == 3, "the noise of the actions does not repeat either"


@pytest.mark.parametrize("cls", [ParallelSampler, GpuSampler])
def test_exact_and_reseeded_environments_side_by_side(cls: type[Sampler]) -> None:
    kwargs = {"env_fn": [PENDULUM, Rebuilt, PENDULUM, Rebuilt, Rebuilt], "cls": cls, "batch_T": 15}
    with started(resumable_sampler(**kwargs), RandomAgent()) as sampler:
        expected = collect(sampler, 0, 4)
    state, _ = saved(2, **kwargs)
    runs = []
    for n_workers in (1, 3):
        with started(resumable_sampler(**kwargs | {"n_workers": n_workers}), RandomAgent()) as sampler:
            report = sampler.load_state_dict(state)
            runs.append(collect(sampler, 2, 4))
    assert report.exact == (0, 2)
    assert list(report.reseeded) == [1, 3, 4]
    assert "2 environments continue exactly, 3 began new episodes: env_rank 1, 3, 4: Rebuilt is an Ez" in str(report)
    assert_same(*runs)
    for (ours, _), (theirs, _) in zip(runs[0], expected[2:], strict=True):
        for name in ("observation", "reward", "prev_done"):
            a, b = ours.env[name], theirs.env[name]
            assert np.array_equal(a[:, [0, 2]], b[:, [0, 2]])
            assert name == "prev_done" or not np.array_equal(a[:, 1], b[:, 1])


def test_a_worker_that_is_replaced_later_gets_new_streams() -> None:
    kwargs = {"cls": ParallelSampler, "on_worker_failure": "restart", "batch_T": 80, "max_decorrelation_steps": 0}
    env_fn = faulty_env("CartPole-v1", Fault("raise", at=200))
    runs, state = [], None
    for _ in range(3):
        with started(resumable_sampler(env_fn, **kwargs), RandomAgent()) as sampler:
            if state is not None:
                sampler.load_state_dict(state)
            runs.append(first_observations(collect(sampler, 0, 4)))
            assert sampler.stats().restarts > 0
            state = sampler.state_dict(env_state="never")
    assert len(set.union(*runs)) == sum(map(len, runs)), "no episode begins twice"


def test_an_environment_that_does_not_repeat_its_episode_is_reseeded() -> None:
    class Drifts(Rebuilt):
        """Another process adds something else to its rewards."""

        drift = 0.0

        def step(self, action: Any) -> Any:
            observation, reward, *rest = super().step(action)
            return observation, float(reward) + Drifts.drift, *rest

    state, _ = saved(env_fn=Drifts, seed_episodes=True)
    assert {column["kind"] for column in state["columns"].values()} == {"repeat"}
    Drifts.drift = 1.0
    with started(resumable_sampler(Drifts, seed_episodes=True), RandomAgent()) as sampler:
        report = sampler.load_state_dict(state)
        assert report.exact == ()
        assert "env_rank 0 differs from the recording of its" in report.reseeded[0]
        collect(sampler, 0, 2)


class Sticky(ResetCollector):
    """Keeps something per column, and does not say so."""

    def collect_batch(self, itr: int) -> None:
        self.last = self.prev_action
        super().collect_batch(itr)


class Trusted(Sticky):
    loaded: ClassVar[list[int]] = []

    def column_state(self, column: int) -> dict[str, Any]:
        return {**super().column_state(column), "last": int(self.last[column])}

    def load_column_state(self, column: int, state: Any) -> None:
        super().load_column_state(column, state)
        self.loaded.append(column)


class Own(Agent):
    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        return AgentStep(np.zeros(len(prev_reward), np.int64))


class Around(DelegatingAgent):
    """Keeps nothing, but the agents that it has may."""

    def __init__(self, agent: Agent, second: Agent | None = None) -> None:
        super().__init__(agent)
        self.second = second


def test_classes_that_may_keep_more_are_not_trusted() -> None:
    class Unpicklable(TrajInfo):
        def __init__(self) -> None:
            super().__init__()
            self.handle = (i for i in range(3))

        def terminate(self, final_observation: Any) -> None:
            del self.handle

    for kwargs, why in (
        ({"collector_cls": Sticky}, "Sticky does not define column_state and load_column_state"),
        ({"agent": Own()}, "Own does not define column_state"),
        ({"agent": DelegatingAgent(Own())}, "Own does not define column_state"),
        ({"agent": DelegatingAgent(DelegatingAgent(Own()))}, "Own does not define column_state"),
        ({"agent": Around(RandomAgent(), Own())}, "Own does not define column_state"),
        ({"traj_info_cls": Unpicklable}, "its state cannot be pickled: TypeError"),
    ):
        state, _ = saved(2, **kwargs)
        assert all(column["kind"] == "reseeded" and why in column["why"] for column in state["columns"].values())
        with pytest.raises(ConfigError, match=f'env_state="require".*env_rank 0, 1, 2, 3, 4: {why}'):
            saved(2, env_state="require", **kwargs)
    saved(2, env_state="require", agent=DelegatingAgent(RandomAgent()))
    state, _ = saved(2, env_state="require", collector_cls=Trusted)
    with started(resumable_sampler(collector_cls=Trusted), RandomAgent()) as sampler:
        assert len(sampler.load_state_dict(state).exact) == 5
        assert sorted(Trusted.loaded) == [*range(5)]


# ---- what cannot be resumed ----------------------------------------------------------------


def test_samplers_that_cannot_be_saved_say_so() -> None:
    for sampler, error, message in (
        (resumable_sampler(cls=AsyncSampler), ConfigError, r"load_state_dict\(\) and AsyncSampler do not go together"),
        (resumable_sampler(cls=GpuSampler, server="process"), ConfigError, 'or server="caller"'),
    ):
        with started(sampler, RandomAgent()):
            with pytest.raises(error, match=message):
                sampler.state_dict()
            with pytest.raises(error, match=message):
                sampler.load_state_dict({"format": 1, **described(sampler.run)})


def test_a_state_of_another_run_is_refused() -> None:
    state, _ = saved(1)
    for sampler, seed, message in (
        (resumable_sampler(), 4, r"the state has seed=3, this sampler has 4: initialize\(agent, seed=3\)"),
        (resumable_sampler(batch_B=6), 3, r"the state has env_ranks=\[0, 1, 2, 3, 4\], this sampler has"),
        (
            resumable_sampler("FrozenLake-v1"),
            3,
            r"the state has environments=\['make\[CartPole-v1, max_episode_steps=500",
        ),
        (
            resumable_sampler(env_kwargs={"sutton_barto_reward": True}),
            3,
            r"this sampler has .*sutton_barto_reward: True",
        ),
        (resumable_sampler(collector_cls=WaitResetCollector), 3, "the state has classes="),
        (resumable_sampler(seed_episodes=True), 3, "the state has seed_episodes=False"),
        (resumable_sampler(cls=GpuSampler), 3, "that of a SerialSampler or ParallelSampler, this is a GpuSampler"),
    ):
        with sampler, pytest.raises(ConfigError, match=message):
            sampler.initialize(RandomAgent(), seed=seed)
            sampler.load_state_dict(state)
    with started(resumable_sampler(), RandomAgent()) as sampler:
        for other in ({}, None, {**state, "format": 0}):
            with pytest.raises(ConfigError, match="needs what state_dict has returned"):
                sampler.load_state_dict(other)
        damaged = {name: part for name, part in state.items() if name not in ("columns", "seed")}
        with pytest.raises(ConfigError, match="this state is damaged: it has no seed, columns"):
            sampler.load_state_dict(damaged)
        with pytest.raises(ConfigError, match="batches of the state must be an integer of at least 0, got None"):
            sampler.load_state_dict({**state, "batches": None})
        with pytest.raises(ConfigError, match="env_state must be one of auto, require, never"):
            sampler.state_dict(env_state="always")
        sampler.obtain_samples(0)
        with pytest.raises(SamplerStateError, match="after initialize, before the first batch"):
            sampler.load_state_dict(state)


def test_a_run_that_is_saved_before_its_first_batch_and_again_as_soon_as_it_was_loaded() -> None:
    with started(resumable_sampler(), RandomAgent()) as sampler:
        state = sampler.state_dict()
        expected = collect(sampler, 0, 3)
    for _ in range(2):
        with started(resumable_sampler(), RandomAgent()) as sampler:
            sampler.load_state_dict(state)
            state = sampler.state_dict()
            assert_same(collect(sampler, 0, 3), expected)


def test_the_version_of_the_parameters_continues() -> None:
    versions, state = [], None
    for n_batches in (4, 2):
        agent = CategoricalPgAgent(Net(4, 2, 0))
        with started(resumable_sampler(), agent) as sampler:
            if state is not None:
                sampler.load_state_dict(state)
            for itr in range(n_batches):
                agent.sync_shared_memory()
                sampler.obtain_samples(itr)
                versions.append(int(sampler.samples_np.agent.policy_version[0, 0]))
            state = sampler.state_dict()
    assert versions == [2, 3, 4, 5, 6, 7]
