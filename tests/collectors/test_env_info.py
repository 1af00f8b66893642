"""What environments say in `info`, recorded: chosen by name or example, flagged where it is missing."""

from typing import Any

import numpy as np
import pytest

from penstock import (
    ConfigError,
    ParallelSampler,
    RandomAgent,
    ResetCollector,
    Sampler,
    SerialSampler,
    TrajInfo,
    WaitResetCollector,
    WorkerError,
)
from penstock.envs import CountingEnv

from ..scale import quick_first


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


def sampler_with(cls: type[Sampler] = SerialSampler, **kwargs: Any) -> Sampler:
    kwargs = {"batch_T": 7, "batch_B": 3, "n_workers": 2, "max_decorrelation_steps": 0, **kwargs}
    return cls(Telling, **kwargs)


class Own(TrajInfo):
    pass


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
@pytest.mark.parametrize("collector_cls", [ResetCollector, WaitResetCollector])
@pytest.mark.parametrize("traj_info_cls", quick_first([Own, TrajInfo]))
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
    assert {name for name, _ in info.leaves()} == {
        "count", "_count", "stats.speed", "stats._speed", "stats.fuel.left", "stats.fuel._left",
        "TimeLimit.truncated", "_TimeLimit.truncated",
    }  # fmt: skip
    assert (info.count == samples.env.reward).all()
    assert info["_TimeLimit.truncated"].all()


def test_names_take_their_examples_from_a_step() -> None:
    with sampler_with(env_info=["count", "stats.fuel.left"]) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        samples, _ = sampler.obtain_samples(0)
        assert set(samples.env.env_info.keys()) == {"count", "_count", "stats"}


def test_nothing_is_recorded_unless_it_is_asked_for() -> None:
    with sampler_with() as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        assert "env_info" not in sampler.samples_np.env


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


def test_a_value_that_changes_its_shape_is_named() -> None:
    with (
        sampler_with(ParallelSampler, env_info={"stats.speed": 0.0}) as sampler,
        pytest.raises(WorkerError, match=r"info\['stats.speed'\] of env_rank [02] must have shape \(\) .* got \(2,\)"),
    ):
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
