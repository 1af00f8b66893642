"""Evaluation environments from a factory of their own: `eval_env_fn`."""

from functools import partial
from typing import Any

import pytest

from penstock import ConfigError, GpuSampler, ParallelSampler, RandomAgent, SerialSampler, WorkerError
from penstock.envs import BatchedCartPole, CountingEnv, EnvContext, NestedEnv, Purpose

OPTIONS: dict[str, Any] = {"batch_T": 10, "batch_B": 2, "eval_n_envs": 2, "eval_max_steps": 40}


@pytest.mark.parametrize("cls", [ParallelSampler, SerialSampler, GpuSampler])
def test_evaluation_has_its_own_environments(cls: Any) -> None:
    with cls(
        CountingEnv, env_kwargs={"length": 3}, eval_env_fn=partial(CountingEnv, 4), n_workers=2, **OPTIONS
    ) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        _, infos = sampler.obtain_samples(0)
        assert {info.Length for info in infos} == {3}
        assert [info.Length for info in sampler.evaluate_agent(0)] == [4] * 10


def test_it_has_the_forms_and_the_arguments_of_env_fn() -> None:
    def make(context: EnvContext, length: int) -> Any:
        assert context.purpose is Purpose.EVAL
        return CountingEnv(length)

    short_poles = partial(BatchedCartPole, max_episode_steps=5)
    forms: list[tuple[Any, dict[str, Any], set[int]]] = [
        (CountingEnv, {"eval_env_fn": make, "eval_env_kwargs": [{"length": 4}, {"length": 5}]}, {4, 5}),
        (CountingEnv, {"eval_env_fn": [partial(CountingEnv, 6), partial(CountingEnv, 7)]}, {6, 7}),
        (CountingEnv, {"env_kwargs": {"length": 5}}, {5}),
        (BatchedCartPole, {"eval_env_fn": short_poles, "batched": True}, {5}),
    ]
    for env_fn, form, lengths in forms:
        with SerialSampler(env_fn, **OPTIONS, **form) as sampler:
            sampler.initialize(RandomAgent(), seed=0)
            assert {info.Length for info in sampler.evaluate_agent(0)} == lengths
    with SerialSampler("CartPole-v1", eval_env_fn="CartPole-v0", **OPTIONS) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        assert sampler.get_attr("spec", evaluation=True)[0].id == "CartPole-v0"


def test_wrong_ones_are_named() -> None:
    with pytest.raises(ConfigError, match="eval_env_fn needs evaluation environments: give eval_n_envs too"):
        SerialSampler(CountingEnv, batch_T=1, batch_B=1, eval_env_fn=CountingEnv)
    for eval_env_fn, message in (
        (3, "eval_env_fn must be a callable"),
        ([CountingEnv], "eval_env_fn is a list of 1 callables for 2 environments"),
        ("NoSuchEnv-v0", "eval_env_fn='NoSuchEnv-v0' is not a registered"),
    ):
        with (
            SerialSampler(CountingEnv, eval_env_fn=eval_env_fn, **OPTIONS) as sampler,  # type: ignore[arg-type]
            pytest.raises(ConfigError, match=message),
        ):
            sampler.initialize(RandomAgent())
    with (
        SerialSampler(CountingEnv, eval_env_fn=NestedEnv, **OPTIONS) as sampler,
        pytest.raises(WorkerError, match="all environments must have the same spaces"),
    ):
        sampler.initialize(RandomAgent())
