"""A batched environment in a worker: the same batches as single ones, of which it is made."""

import re
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from penstock import (
    ConfigError,
    ParallelSampler,
    RandomAgent,
    Sampler,
    SerialSampler,
    SpaceError,
    WorkerError,
)
from penstock.envs import BatchedCartPole, CountingEnv

from ..scale import scaled, some
from ..support import Batch, assert_same, collect_with

pytestmark = pytest.mark.slow


def batched(env_fn: Any, mode: AutoresetMode, num_envs: int) -> Any:
    return SyncVectorEnv([env_fn] * num_envs, autoreset_mode=mode)


def batches(cls: type[Sampler], env_fn: Any, **kwargs: Any) -> list[Batch]:
    sizes = {"batch_T": 30, "batch_B": 5, "max_decorrelation_steps": 0, "eval_n_envs": 3, "eval_max_steps": 300}
    found = collect_with(cls, env_fn, None, 4, scaled(range(4), (1,)), **{**sizes, **kwargs})
    # A batched environment that resets itself has no seeds for the further episodes of an evaluation.
    return [(own, [i for i in infos if own is not None or i["episode"] == 0]) for own, infos in found]


def of_batches(env_fn: Any, **kwargs: Any) -> Sampler:
    return SerialSampler(env_fn, batch_T=12, batch_B=2, batched=True, **kwargs)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda result: result[:4], r"env\.step of env_rank 0 must return five values"),
        (lambda result: None, r"env\.step of env_rank 0 must return five values"),
        (lambda result: (*result[:4], None), "the info that env.step of env_rank 0 returned must be a dict, got None"),
    ],
)
def test_what_is_no_step_of_a_batch_is_refused(spoil: Any, error: str) -> None:
    def spoilt(num_envs: int) -> Any:
        env = batched(CountingEnv, AutoresetMode.SAME_STEP, num_envs=num_envs)
        step = env.step
        env.step = lambda actions: spoil(step(actions))  # type: ignore[method-assign]
        return env

    with of_batches(spoilt) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        with pytest.raises(WorkerError) as caught:
            sampler.obtain_samples(0)
    assert isinstance(caught.value.__cause__, SpaceError)
    assert re.search(error, str(caught.value.__cause__))


def test_what_is_no_batched_environment_is_refused() -> None:
    def one(num_envs: int) -> Any:
        return CountingEnv()

    with pytest.raises(ConfigError, match="VectorEnv of 1 environments, got CountingEnv"):
        of_batches(one).initialize(RandomAgent())


class Seeded(SyncVectorEnv):
    """Notes the seeds of its resets. `fails` says which of them raise: (number of the reset, its seed) -> error."""

    seeds: list[Any]
    fails: Any

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        Seeded.seeds.append(seed)
        if (error := Seeded.fails(len(Seeded.seeds), seed)) is not None:
            raise error
        return super().reset(seed=seed, options=options)


def seeded(num_envs: int) -> Any:
    return Seeded([CountingEnv] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


@pytest.fixture
def _fails() -> Any:
    Seeded.seeds = []
    yield
    Seeded.fails = None


def of_seeded(fails: Any, **kwargs: Any) -> Sampler:
    Seeded.fails = staticmethod(fails)
    return of_batches(seeded, **kwargs)


@pytest.mark.usefixtures("_fails")
def test_an_environment_that_takes_a_list_of_seeds_is_reset_once() -> None:
    with of_seeded(lambda n, seed: None, eval_n_envs=2) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        assert [len(seed) for seed in Seeded.seeds] == [2]
        sampler.obtain_samples(0)
        sampler.evaluate_agent(0)
        sampler.evaluate_agent(0)
    assert [len(seed) for seed in Seeded.seeds] == [2] * 3


def is_per_column(seed: Any) -> bool:
    return isinstance(seed, list | np.ndarray)


@pytest.mark.usefixtures("_fails")
@pytest.mark.parametrize("error", some([gym.error.Error("list"), TypeError("list"), ValueError("list")], 1), ids=repr)
def test_an_environment_that_takes_one_seed_gets_the_first_and_a_warning(error: Exception, caplog: Any) -> None:
    with of_seeded(lambda n, seed: error if is_per_column(seed) else None, eval_n_envs=2) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        assert "does not take a list of seeds" in caplog.text
        assert Seeded.seeds[-1] == Seeded.seeds[0][0] % 2**31
        sampler.obtain_samples(0)
        sampler.evaluate_agent(0)
        n = len(Seeded.seeds)
        sampler.evaluate_agent(0)
        assert [type(seed) for seed in Seeded.seeds[n:]] == [int]


class Picky(BatchedCartPole):
    """Takes seeds as `accepts` says, as engines in C do."""

    def __init__(self, num_envs: int, accepts: str) -> None:
        super().__init__(num_envs, max_episode_steps=20)
        self.accepts = accepts

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        array, most = np.asarray(seed), 2**31 if "small" in self.accepts else 2**32
        if not isinstance(seed, np.ndarray if "array" in self.accepts else list):
            raise TypeError("Unsupported seed type")
        if array.dtype != np.int64 or (array >= most).any():
            raise OverflowError("too large")
        return super().reset(seed=array.tolist())


@pytest.mark.parametrize("accepts", ["list", "array", "small array", "small list"])
def test_one_seed_per_column_gives_one_batch_whatever_the_workers(accepts: str, caplog: Any) -> None:
    env_fn = partial(Picky, accepts=accepts)
    found = batches(SerialSampler, env_fn, batched=True)
    for n_workers in scaled((1, 2, 3), (3,)):
        assert_same(found, batches(ParallelSampler, env_fn, batched=True, n_workers=n_workers))
    assert "depend on the number of workers" not in caplog.text


@pytest.mark.usefixtures("_fails")
@pytest.mark.parametrize("cls", [TypeError, ValueError, gym.error.Error])
@pytest.mark.parametrize(
    "fails", [lambda n, seed: True, lambda n, seed: n == 1], ids=["at every reset", "at the first reset"]
)
def test_an_environments_own_error_in_its_first_reset_comes_through(cls: Any, fails: Any) -> None:
    with (
        of_seeded(lambda n, seed: cls(f"broken at reset {n}") if fails(n, seed) else None) as sampler,
        pytest.raises(WorkerError, match="broken at reset 1") as caught,
    ):
        sampler.initialize(RandomAgent(), seed=0)
    assert type(caught.value.__cause__) is cls


@pytest.mark.usefixtures("_fails")
@pytest.mark.parametrize("cls", some([gym.error.Error, TypeError, ValueError], 1))
def test_an_environments_own_error_in_a_later_reset_comes_through(cls: Any) -> None:
    with of_seeded(lambda n, seed: cls("broken") if n == 3 else None, eval_n_envs=2) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        sampler.obtain_samples(0)
        sampler.evaluate_agent(0)
        with pytest.raises(WorkerError, match="broken"):
            sampler.evaluate_agent(0)
    assert len(Seeded.seeds) == 3


def test_an_env_fn_for_single_environments_is_told_how_it_is_called() -> None:
    with (
        SerialSampler(CountingEnv, batch_T=2, batch_B=2, batched=True) as sampler,
        pytest.raises(ConfigError, match=r"TypeError: .*'num_envs'.* calls env_fn\(num_envs=n\), which must return"),
    ):
        sampler.initialize(RandomAgent())
