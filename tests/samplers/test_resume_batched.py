"""state_dict and load_state_dict of batched environments: compared with a run that goes on, and with a plain loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from penstock import (
    AlternatingSampler,
    ConfigError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    RecurrentCategoricalPgAgent,
    ResumeReport,
    Sampler,
    SerialSampler,
    TrajInfo,
)
from penstock.envs import BatchedCartPole, CountingEnv, EnvContext

from ..models import Memory
from ..scale import scaled, with_start_methods
from ..support import Batch, assert_as_plain_loop, assert_same, collect, env_seeds, without_infos

pytestmark = pytest.mark.slow

N, B = 2, 6
SAME, NEXT, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED
SIZES: dict[str, Any] = {"batch_T": 17, "batch_B": B, "n_workers": 2, "batched": True}
EVALUATED = {"eval_n_envs": 2, "eval_max_steps": 60}

cartpole = partial(gym.make, "CartPole-v1", max_episode_steps=25)


def synced(num_envs: int, mode: AutoresetMode, copy: bool = True, env_fn: Any = cartpole) -> Any:
    """Without `copy`, it returns the same array at each step."""
    return SyncVectorEnv([env_fn] * num_envs, autoreset_mode=mode, copy=copy)


class Saved(SyncVectorEnv):
    """Cannot be pickled, but saved."""

    def __init__(self, num_envs: int, env_fns: Any = None) -> None:
        super().__init__(env_fns or [cartpole] * num_envs, autoreset_mode=SAME, copy=False)
        self.handle = (i for i in range(3))

    def get_state(self) -> Any:
        return {name: value for name, value in vars(self).items() if name != "handle"}

    def set_state(self, state: Any) -> None:
        vars(self).update(state)


def wrapped(num_envs: int) -> Any:
    return RecordEpisodeStatistics(Saved(num_envs))


def recurrent(record_state: Any) -> Any:
    return RecurrentCategoricalPgAgent(Memory, record_state=record_state)


def started(cls: type[Sampler], env_fn: Any, agent: Any, **kwargs: Any) -> Sampler:
    sampler = cls(env_fn, **{**SIZES, **kwargs})
    sampler.initialize(agent or RandomAgent(), seed=7, bootstrap_value=True)
    return sampler


def resumed(
    cls: type[Sampler], env_fn: Any, make_agent: Any = RandomAgent, **kwargs: Any
) -> tuple[list[Batch], ResumeReport]:
    """Check that N + N batches are the same as 2N. Returns all, and what `load_state_dict` has said."""
    make, evaluate = partial(started, cls, env_fn, **kwargs), range(0, 2 * N if "eval_n_envs" in kwargs else 0, 2)
    with make(agent=make_agent()) as sampler:
        expected = collect(sampler, 2 * N, evaluate)
    with make(agent=make_agent()) as sampler:
        found = collect(sampler, N, evaluate)
        state = sampler.state_dict(env_state="require")
        going_on = collect(sampler, range(N, 2 * N), evaluate)
    assert_same(going_on, expected[len(found) :])  # saving changes nothing
    with make(agent=make_agent()) as sampler:
        report = sampler.load_state_dict(state)
        found += collect(sampler, range(N, 2 * N), evaluate)
    assert_same(found, expected)
    return found, report


KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "CartPole, SAME_STEP": (partial(synced, mode=SAME, copy=False), RandomAgent, EVALUATED),
    "CartPole, NEXT_STEP": (partial(synced, mode=NEXT, copy=False), RandomAgent, EVALUATED),
    "CartPole, DISABLED": (partial(synced, mode=DISABLED, copy=False), RandomAgent, EVALUATED),
    "batched CartPole": (partial(BatchedCartPole, max_episode_steps=25), RandomAgent, EVALUATED),
    # Its episodes end in the last step before it is saved: N * batch_T is 4 more than a multiple of 5.
    "a reset is due": (
        partial(synced, mode=NEXT, env_fn=partial(CountingEnv, 4)),
        RandomAgent,
        {"env_info": {"count": 0}},
    ),
    "get_state": (Saved, RandomAgent, {}),
    "wrapped": (wrapped, RandomAgent, {}),
    "state, NEXT_STEP": (partial(synced, mode=NEXT), partial(recurrent, "step"), {}),
    "state of a batch": (partial(synced, mode=SAME), partial(recurrent, "batch"), {"n_slots": 2}),
    "three rows": (Saved, RandomAgent, {"rows_per_env": 3, "debug": True}),
}


def check(kind: str, cls: type[Sampler], **kwargs: Any) -> None:
    env_fn, make_agent, options = KINDS[kind]
    found, report = resumed(cls, env_fn, make_agent, **options, **kwargs)
    assert (report.exact, report.reseeded) == (tuple(range(B)), {})
    assert assert_as_plain_loop(env_fn(B), env_seeds(B, small=False), without_infos(found)) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_continues_as_a_plain_loop_goes_on(kind: str) -> None:
    check(kind, SerialSampler)


@with_start_methods("kind", scaled([*KINDS], ["CartPole, SAME_STEP", "a reset is due", "get_state", "three rows"]))
def test_a_run_with_workers_continues_as_a_plain_loop_goes_on(kind: str, start_method: str) -> None:
    check(kind, ParallelSampler, start_method=start_method)


@pytest.mark.parametrize("cls", [GpuSampler, AlternatingSampler])
def test_a_run_with_central_inference_continues(cls: type[Sampler]) -> None:
    check("state, NEXT_STEP", cls)


# ---- how it is saved -----------------------------------------------------------------------------


def saved(env_fn: Any, cls: type[Sampler] = SerialSampler, env_state: Any = "auto", **kwargs: Any) -> dict[str, Any]:
    with started(cls, env_fn, None, **kwargs) as sampler:
        collect(sampler, 2)
        return sampler.state_dict(env_state=env_state)


def test_each_worker_saves_its_environment_once() -> None:
    for env_fn, kind in ((partial(synced, mode=SAME), "pickle"), (Saved, "get_state")):
        columns = saved(env_fn, ParallelSampler)["columns"]
        assert [column["kind"] for column in columns.values()] == [kind, "row", "row"] * 2


class Counted(BatchedCartPole):
    made = gone = 0

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        Counted.made += 1

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state)
        Counted.made += 1

    def close(self, **kwargs: Any) -> None:
        Counted.gone += not self.closed
        self.closed = True


def test_what_was_set_continues_and_each_environment_is_closed() -> None:
    Counted.made = Counted.gone = 0
    with started(SerialSampler, Counted, None) as sampler:
        sampler.set_attr("gravity", 3.5)
        state = sampler.state_dict(env_state="require")
    with started(SerialSampler, Counted, None) as sampler:
        sampler.load_state_dict(state)
        assert sampler.get_attr("gravity") == [3.5]
    assert Counted.made == Counted.gone > 6, "that of the state's check too"


# ---- what cannot be saved ------------------------------------------------------------------------


class Unsaved(SyncVectorEnv):
    def __init__(self, num_envs: int) -> None:
        super().__init__([cartpole] * num_envs)
        self.handle = (i for i in range(3))


class Rebuilt(gym.Wrapper[Any, Any, Any, Any], gym.utils.EzPickle):
    def __init__(self) -> None:
        gym.utils.EzPickle.__init__(self)
        gym.Wrapper.__init__(self, gym.make("CartPole-v1"))


def rebuilt(num_envs: int) -> Any:
    return SyncVectorEnv([Rebuilt] * num_envs)


class Forgets(Saved):
    """The copy draws other numbers."""

    def set_state(self, state: Any) -> None:
        super().set_state(state)
        for env in self.envs:
            env.unwrapped.np_random = np.random.default_rng()


NOT_SAVED = {
    "a handle": (Unsaved, r"Unsaved\(num_envs=2\) cannot be saved: TypeError: cannot pickle .*\. Give Unsaved"),
    "rebuilt": (rebuilt, r"Rebuilt is an EzPickle: .* loses its state\. Give SyncVectorEnv\(num_envs=2\) get_st"),
    "forgets": (Forgets, "does not continue alike after it was saved and loaded: observation of step"),
}


@pytest.mark.parametrize(("env_fn", "why"), NOT_SAVED.values(), ids=NOT_SAVED)
def test_an_environment_that_cannot_be_saved_begins_again(env_fn: Any, why: str) -> None:
    sizes = {"batch_B": 2, "batch_T": 20, "n_workers": 1}
    with pytest.raises(ConfigError, match=rf'state_dict\(env_state="require"\): env_rank 0, 1: .*{why}'):
        saved(env_fn, env_state="require", **sizes)
    state = saved(env_fn, **sizes)
    assert [column["kind"] for column in state["columns"].values()] == ["reseeded"] * 2
    runs = []
    for n_workers in (1, 2):  # whose rows need not be those of the saved run
        with started(ParallelSampler, env_fn, None, **sizes | {"n_workers": n_workers}) as sampler:
            assert list(sampler.load_state_dict(state).reseeded) == [0, 1]
            runs.append(collect(sampler, range(2, 4)))
    assert_same(runs[1], runs[0])


class Unpicklable(TrajInfo):
    """That of env_rank 4."""

    def step(self, observation: Any, *rest: Any) -> None:
        super().step(observation, *rest)
        self.handle = (i for i in range(3)) if observation[0] == 4 else None

    def terminate(self, *rest: Any) -> None:
        super().terminate(*rest)
        self.handle = None


class Ranked(CountingEnv):
    """Its episode has the number of its env_rank."""

    def __init__(self, env_rank: int) -> None:
        super().__init__()
        self.rank = env_rank

    def reset(self, **kwargs: Any) -> Any:
        self.episode = self.rank - 1
        return super().reset(**kwargs)


def ranked(num_envs: int, context: EnvContext) -> Any:
    return Saved(num_envs, [partial(Ranked, context.env_rank + i) for i in range(num_envs)])


def test_rows_of_one_environment_continue_together_or_not_at_all() -> None:
    state = saved(ranked, ParallelSampler, traj_info_cls=Unpicklable)
    assert [column["kind"] for column in state["columns"].values()] == ["get_state", "row", "row", *["reseeded"] * 3]
    with started(ParallelSampler, ranked, None, traj_info_cls=Unpicklable) as sampler:
        report = sampler.load_state_dict(state)
        assert report.exact == (0, 1, 2)
        assert all("its state cannot be pickled" in why for why in report.reseeded.values())
        collect(sampler, 2)


def test_the_state_of_other_rows_is_refused() -> None:
    state, single = saved(BatchedCartPole, ParallelSampler), saved("CartPole-v1", batched=False)
    others = r"begin at env_rank \[0, 3\], those of this sampler at \[0\], and .* use n_workers and rows_per_env as in"
    for env_fn, other, message in (
        (BatchedCartPole, state, others),
        ("CartPole-v1", single, "the state has batched=False, this sampler has True: give batched as in the saved run"),
    ):
        with started(SerialSampler, env_fn, None) as sampler, pytest.raises(ConfigError, match=message):
            sampler.load_state_dict(other)
