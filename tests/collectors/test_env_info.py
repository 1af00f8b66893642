"""What environments say in `info`, recorded: chosen by name or example, flagged where it is missing."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from penstock import (
    AlternatingSampler,
    ConfigError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    ResetCollector,
    Sampler,
    SerialSampler,
    TrajInfo,
    WaitResetCollector,
    WorkerError,
)
from penstock.envs import CountingEnv, ScriptedGame

from ..support import sampler_of


class Telling(CountingEnv):
    """`count` at every step, `lives` at even ones, nested figures, and what cannot be recorded."""

    def step(self, action: Any) -> Any:
        *result, info = super().step(action)
        info["stats"] = {"speed": np.array([self.count, -1.0], np.float32), "fuel": {"left": 10 - self.count}}
        info["name"] = "text"
        info["TimeLimit.truncated"] = False
        if self.count % 2 == 0:
            info["lives"] = self.count
        return *result, info


def sampler_with(cls: type[Sampler] = SerialSampler, **kwargs: Any) -> Any:
    return sampler_of(cls, **{"env_fn": Telling, "batch_T": 7, "batch_B": 3, **kwargs})


class Own(TrajInfo):
    pass


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
@pytest.mark.parametrize("collector_cls", [ResetCollector, WaitResetCollector])
@pytest.mark.parametrize("traj_info_cls", [Own, TrajInfo])
def test_entries_are_recorded_and_missing_ones_flagged(
    cls: type[Sampler], collector_cls: Any, traj_info_cls: type[TrajInfo]
) -> None:
    wanted = {"lives": 0, "stats.speed": np.zeros(2, np.float32), "stats.fuel.left": 0.0}
    with sampler_with(cls, env_info=wanted, collector_cls=collector_cls, traj_info_cls=traj_info_cls) as sampler:
        example = sampler.initialize(RandomAgent(), seed=0)
        assert example.env.env_info.lives.dtype == np.int64
        for itr in range(3):
            _, infos = sampler.obtain_samples(itr)
            env = sampler.samples_np.env
            count = np.where(env.valid, env.reward, 0).astype(int)
            even = env.valid & (count % 2 == 0)
            np.testing.assert_array_equal(env.env_info["_lives"], even)
            np.testing.assert_array_equal(env.env_info.lives, np.where(even, count, 0))
            np.testing.assert_array_equal(env.env_info.stats.speed[..., 0], count)
            np.testing.assert_array_equal(env.env_info.stats.fuel.left, np.where(env.valid, 10 - count, 0))
            np.testing.assert_array_equal(env.env_info.stats.fuel["_left"], env.valid)
            assert len(infos) == env.done.sum()


def test_a_key_with_dots_of_its_own_is_found_by_example_too() -> None:
    with sampler_with(env_info={"TimeLimit.truncated": True, "stats.fuel.left": 0}) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        samples, _ = sampler.obtain_samples(0)
    assert samples.env.env_info.TimeLimit["_truncated"].all()
    assert not samples.env.env_info.TimeLimit.truncated.any()
    assert samples.env.env_info.stats.fuel["_left"].all()


def test_true_finds_what_is_numeric_and_lists_the_rest_once() -> None:
    with sampler_with(env_info=True) as sampler:
        with pytest.warns(UserWarning, match=r"not numeric and not recorded: \['name'\]") as caught:
            sampler.initialize(RandomAgent(), seed=0)
        samples, _ = sampler.obtain_samples(0)
    assert len(caught) == 1
    info = samples.env.env_info
    names = "count stats.speed stats.fuel.left TimeLimit.truncated"
    flags = "_count stats._speed stats.fuel._left _TimeLimit.truncated"
    assert {name for name, _ in info.leaves()} == {*names.split(), *flags.split()}
    assert (info.count == samples.env.reward).all()
    assert info["_TimeLimit.truncated"].all()


def test_what_is_asked_for_by_name_is_recorded_and_no_more() -> None:
    for wanted, fields in ((["count", "stats.fuel.left"], {"count", "_count", "stats"}), (False, set())):
        with sampler_with(env_info=wanted) as sampler:
            sampler.initialize(RandomAgent(), seed=0)
            env = sampler.samples_np.env
            assert (set(env.env_info.keys()) if "env_info" in env else set()) == fields


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (["lives"], r"asks for 'lives'; the info of an example step has \['TimeLimit.truncated', 'count', .*0.0"),
        ({"name": "text"}, "cannot record 'name': 'text' is not numeric"),
        (["name"], "cannot record 'name'"),
    ],
)
def test_what_cannot_be_recorded_is_named(wanted: Any, message: str) -> None:
    with sampler_with(env_info=wanted) as sampler, pytest.raises(ConfigError, match=message):
        sampler.initialize(RandomAgent())


class Informing(CountingEnv):
    """Its info has `n`: `first`, and from its third step on `later`."""

    def __init__(self, first: Any, later: Any) -> None:
        super().__init__(length=100)
        self.first, self.later, self.n_steps = first, later, 0

    def step(self, action: Any) -> Any:
        self.n_steps += 1
        *result, _ = super().step(action)
        return (*result, {"n": self.first if self.n_steps < 3 else self.later})


@pytest.mark.parametrize(
    ("first", "later", "dtypes"),
    [
        (np.int8(1), 300, "int8, as the example, .* int64 300"),
        (np.float32(0), 1e300, r"float32, as the example, .* float64 1e\+300"),
        (0, 0.5, "int64, as the example, .* float64 0.5"),
        (0, "text", "int64"),
        (0.0, np.zeros(2), r"float64, as the example, got \(2,\)"),
    ],
)
def test_a_value_that_does_not_fit_is_named(first: Any, later: Any, dtypes: str) -> None:
    factories = [partial(Informing, first, later if b == 2 else first) for b in range(3)]
    with sampler_with(env_fn=factories, env_info=["n"]) as sampler:
        sampler.initialize(RandomAgent())
        misfit = rf"info\['n'\] of env_rank 2 must have shape \(\) and dtype {dtypes}"
        with pytest.raises(WorkerError, match=rf"while stepping env_rank 2, t=\d \(.*\): {misfit}"):
            sampler.obtain_samples(0)


class Keeping(CountingEnv):
    """Episodes of three steps. The info is one dict, with one array and one list, which `reset` changes too."""

    def __init__(self) -> None:
        super().__init__()
        self.info = {"at": np.zeros(2), "parts": {"trail": [0]}}

    def show(self, count: int) -> Any:
        self.count = count
        self.info["at"][:] = self.info["n"] = self.info["parts"]["trail"][0] = count
        return np.full(2, count, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.show(0), self.info

    def step(self, action: Any) -> Any:
        return self.show(self.count + 1), float(self.count), self.count == 3, False, self.info


class KeepingGame(ScriptedGame):
    """Two agents, each with an info that it keeps. Both end after three steps."""

    def __init__(self) -> None:
        super().__init__(2, [{}] * 3)
        self.told = {agent: Keeping() for agent in self.possible_agents}

    def _infos(self) -> Any:
        for each in self.told.values():
            each.show(self.t)
        return {agent: self.told[agent].info for agent in self._own}


class KeepingBatch(SyncVectorEnv):
    """The same for rows of a batched environment, which the caller resets."""

    def __init__(self, num_envs: int) -> None:
        super().__init__([Keeping] * num_envs, autoreset_mode=AutoresetMode.DISABLED)
        self.n = np.zeros(num_envs, np.int64)
        self.info = {"n": self.n, "at": np.zeros((num_envs, 2)), "parts": {"trail": np.zeros((num_envs, 1), np.int64)}}

    def tell(self) -> Any:
        self.n[:] = self.get_attr("count")
        self.info["at"][:] = self.info["parts"]["trail"][:] = self.n[:, None]
        return self.info

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0], self.tell()

    def step(self, actions: Any) -> Any:
        return *super().step(actions)[:4], self.tell()


@pytest.mark.parametrize(
    ("cls", "env_fn", "how"),
    [
        (SerialSampler, Keeping, {}),
        (SerialSampler, KeepingGame, {}),
        (ParallelSampler, Keeping, {"traj_info_cls": Own}),
        (ParallelSampler, Keeping, {"collector_cls": WaitResetCollector}),
        (ParallelSampler, KeepingBatch, {"batched": True}),
        (ParallelSampler, KeepingGame, {"traj_info_cls": Own}),
        (GpuSampler, Keeping, {}),
        (AlternatingSampler, KeepingGame, {}),
    ],
)
def test_what_a_reset_changes_is_recorded_as_the_last_step_returned_it(cls: Any, env_fn: Any, how: Any) -> None:
    wanted = {"n": 0, "at": np.zeros(2), "parts.trail": [0]}
    with sampler_with(cls, env_fn=env_fn, batch_B=4, env_info=wanted, **how) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for itr in range(2):
            sampler.obtain_samples(itr)
            env, action = sampler.samples_np.env, sampler.samples_np.agent.action
            count = env.reward - action if env_fn is KeepingGame else env.reward
            if itr == 0 and how.get("collector_cls") is not WaitResetCollector:
                assert count[:, 0].tolist() == [1, 2, 3, 1, 2, 3, 1]
            assert env.done.any()
            for value in (env.env_info.n, env.env_info.at[..., 1], env.env_info.parts.trail[..., 0]):
                np.testing.assert_array_equal(value, count)
            assert (env.env_info["_n"] == env.valid).all()
