"""Arguments of the wrong kind or size: one line that names them, whatever they are; numpy's scalars are fine."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from penstock import ConfigError, ParallelSampler, RandomAgent, Sampler, SerialSampler, TrajInfo
from penstock.arguments import seconds
from penstock.errors import brief

from ..support import sampler_of

INTEGERS = (
    "batch_T", "batch_B", "n_workers", "max_decorrelation_steps", "eval_n_envs", "eval_max_steps", "eval_episodes",
    "eval_max_trajectories", "max_restarts",
)  # fmt: skip
NO_INTEGERS = [
    1.0, "3", None, True, np.float64(3), np.array(3), np.array([3]), np.array([3, 4]), torch.tensor(3), [2], 10**30, -1
]  # fmt: skip


@pytest.mark.parametrize("value", NO_INTEGERS, ids=brief)
@pytest.mark.parametrize("name", INTEGERS)
def test_what_is_no_integer_is_refused_by_name(name: str, value: Any) -> None:
    if value is None and name in ("n_workers", "eval_episodes", "eval_max_trajectories"):
        return  # which leaves it to penstock
    with pytest.raises(ConfigError, match=rf"\A{name} must be (an integer of at least \d|at most [\d,]+), got .*\Z"):
        sampler_of(SerialSampler, **{"eval_n_envs": 2, name: value})


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
def test_numpys_scalars_are_numbers(cls: type[Sampler]) -> None:
    numbers = {name: np.int64(2) for name in INTEGERS if name != "eval_max_trajectories"}
    with sampler_of(cls, **{**numbers, "eval_max_steps": np.uint16(20), "step_timeout": np.float32(60)}) as sampler:
        assert type(sampler.batch_T) is type(sampler.config.batch_B) is int
        sampler.initialize(RandomAgent(), seed=np.int64(3), rank=np.int64(1), world_size=np.int64(2))  # type: ignore[arg-type]
        assert sampler.seed == 3
        sampler.obtain_samples(np.int32(5))  # type: ignore[arg-type]
        assert len(sampler.evaluate_agent(np.int64(5))) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["1", float("nan"), True, 0, np.array(3.0), None], ids=brief)
def test_what_is_no_time_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match="start_timeout must be a positive number of seconds, got"):
        sampler_of(SerialSampler, start_timeout=value)


def test_a_time_may_be_zero_if_its_meaning_allows_it() -> None:
    assert (seconds("max_delay", 0, zero=True), seconds("max_delay", np.float32(0.5), zero=True)) == (0.0, 0.5)
    for value in ("1", float("nan"), -1, True, None):
        with pytest.raises(ConfigError, match="max_delay must be a number of seconds, 0 or more, got"):
            seconds("max_delay", value, zero=True)


@pytest.mark.parametrize("value", [1.5, "x", None, 10**30, -(10**30), np.array([1]), True], ids=brief)
def test_an_itr_that_is_no_integer_is_refused_and_harms_nobody(value: Any) -> None:
    with sampler_of(SerialSampler, eval_n_envs=1) as sampler:
        sampler.initialize(RandomAgent())
        for call in (sampler.obtain_samples, sampler.start_samples, sampler.evaluate_agent):
            with pytest.raises(ConfigError, match=r"itr must be (an integer|at (most|least) -?[0-9,]+), got"):
                call(value)
        sampler.obtain_samples(-1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": np.array([1, 2])}, "seed must be an integer of at least 0, got array"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"rank": 1.0, "world_size": 2}, "rank must be an integer, got 1.0"),
        ({"world_size": 10**30}, "world_size must be at most 2,147,483,648, got"),
        ({"traj_info_kwargs": 3}, "traj_info_kwargs must be a dict of arguments for traj_info_cls, got 3"),
        ({"traj_info_kwargs": [1]}, r"traj_info_kwargs must be a dict .* got \[1\]"),
        ({"traj_info_kwargs": {"discount": "x"}}, "TrajInfo.* discount must be a number, got 'x'"),
        ({"traj_info_kwargs": {"discount": None}}, "TrajInfo.* discount must be a number, got None"),
    ],
)
def test_arguments_of_initialize_are_told_by_name(arguments: dict[str, Any], message: str) -> None:
    with sampler_of(SerialSampler) as sampler, pytest.raises(ConfigError, match=message):
        sampler.initialize(RandomAgent(), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env_info": 3}, "env_info must be True, False, a list of names or a dict of examples, got 3"),
        ({"env_info": "count"}, "env_info must be True, False, a list of names .* got 'count'"),
        ({"env_info": [3]}, r"env_info must be .* got \[3\]"),
        ({"eval_env_kwargs": {"length": 3}}, "eval_env_kwargs needs evaluation environments: give eval_n_envs too"),
        (
            {"eval_n_envs": 2, "eval_max_steps": 1},
            "eval_max_steps must be at least eval_n_envs=2, one step for each .* 1",
        ),
    ],
)
def test_arguments_of_the_constructor_are_told_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sampler_of(SerialSampler, **arguments)


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
@pytest.mark.parametrize("size", [{"batch_T": 10**12}, {"batch_T": 2**62}])
def test_a_batch_that_no_machine_holds_is_told_with_its_size(cls: type[Sampler], size: dict[str, int]) -> None:
    with (
        sampler_of(cls, **size) as sampler,
        pytest.raises(ConfigError, match=r"needs [\d,.]+ TiB .* [MG]iB are free: free some memory"),
    ):
        sampler.initialize(RandomAgent())


def test_a_batched_environment_is_told_where_it_belongs() -> None:
    def batched() -> Any:
        return gym.make_vec("CartPole-v1", 2)

    with sampler_of(SerialSampler, env_fn=batched) as sampler, pytest.raises(ConfigError, match="with batched=True"):
        sampler.initialize(RandomAgent())


def test_a_discount_may_be_any_real_number() -> None:
    for discount in (1, 0.5, np.float32(0.5)):
        info = TrajInfo(discount)  # type: ignore[arg-type]
        for _ in range(2):
            info.step(None, None, 1.0, False, False, None, {})
        assert info.DiscountedReturn == 1 + discount
