"""Batches are the same whether Gymnasium's wrappers are flattened or not."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from penstock import GpuSampler, ParallelSampler, RandomAgent, SerialSampler, WorkerError
from penstock.envs import CountingEnv
from penstock.envs.direct_steps import flat_step_of

from ..scale import quick_first
from .started import started

CASES: list[tuple[Any, str, dict[str, Any]]] = [
    (SerialSampler, "CartPole-v1", {}),
    (SerialSampler, "CartPole-v1", {"max_episode_steps": 7, "disable_env_checker": True}),
    (SerialSampler, "MountainCarContinuous-v0", {"max_episode_steps": 1}),
    (ParallelSampler, "CartPole-v1", {"max_episode_steps": 13}),
    (GpuSampler, "Pendulum-v1", {"max_episode_steps": 11}),
]


def sample(sampler_cls: Any, env_fn: Any, **kwargs: Any) -> list[Any]:
    """Everything that the sampler returns, as bytes and text, and the attributes of the wrappers."""
    found: list[Any] = []
    kwargs = {"batch_T": 30, "batch_B": 4, "n_workers": 2, "eval_n_envs": 2, "eval_max_steps": 60, **kwargs}
    with sampler_cls(env_fn, **kwargs) as sampler:
        sampler.initialize(RandomAgent(), seed=5)
        for itr in range(3):
            _, infos = sampler.obtain_samples(itr)
            infos = [*infos, *sampler.evaluate_agent(itr)]
            found += [(name, leaf.tobytes()) for name, leaf in sampler.samples_np.leaves()]
            found.append(repr([vars(info) for info in infos]))
            found.append([sampler.get_attr(name) for name in ("_elapsed_steps", "_has_reset", "has_reset")])
    return found


@pytest.mark.parametrize(("cls", "env_id", "kwargs"), quick_first(CASES, 2))
def test_batches_are_equal_bit_for_bit(cls: Any, env_id: str, kwargs: dict[str, Any]) -> None:
    env_fn = partial(gym.make, env_id, **kwargs)
    env = env_fn()
    assert flat_step_of(env) != env.step
    assert sample(cls, env_fn) == sample(SerialSampler, env_fn, flatten_wrappers=False)


@pytest.mark.parametrize("flatten_wrappers", [True, False])
def test_attributes_of_the_wrappers_can_be_read_and_set(flatten_wrappers: bool) -> None:
    """Between two batches a user changes the limit and the count, and resets and renders."""
    env_fn = partial(_limited, 50)
    with started(env_fn, flatten_wrappers=flatten_wrappers, batch_T=8) as sampler:
        samples, _ = sampler.obtain_samples(0)
        assert sampler.get_attr("_elapsed_steps") == [8, 8]
        assert not samples.env.truncated.any()
        sampler.set_attr("_elapsed_steps", [45, 30])
        samples, _ = sampler.obtain_samples(1)
        assert samples.env.truncated.nonzero().tolist() == [[4, 0]]
        assert sampler.get_attr("_elapsed_steps") == [3, 38]
        sampler.set_attr("_max_episode_steps", 2)
        samples, _ = sampler.obtain_samples(2)
        assert samples.env.truncated.sum(0).tolist() == [4, 4]
        sampler.call("reset", seed=3)
        assert sampler.get_attr("_elapsed_steps") == [0, 0]
        assert sampler.call("render") == [None, None]
        sampler.set_attr("_has_reset", False)
        with pytest.raises(WorkerError, match=r"Cannot call env\.step.. before calling env.reset") as caught:
            sampler.obtain_samples(3)
        assert isinstance(caught.value.__cause__, ResetNeeded)


class Endless(CountingEnv):
    def __init__(self) -> None:
        super().__init__(length=10**9)

    def render(self) -> Any:
        return None


def _limited(n: int) -> Any:
    return OrderEnforcing(TimeLimit(Endless(), n))


def test_an_environment_that_is_put_in_its_place_is_stepped() -> None:
    with started(partial(_limited, 50), batch_T=6, batch_B=1) as sampler:
        sampler.obtain_samples(0)
        other = TimeLimit(CountingEnv(length=2), 10)
        other.reset()
        sampler.set_attr("env", [other])
        samples, _ = sampler.obtain_samples(1)
        assert samples.env.terminated[:, 0].tolist() == [False, True] * 3
