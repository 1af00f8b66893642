"""Calls on the environments between batches, what their factories are told, and results that nobody can read."""

import os
import re
from functools import partial
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from penstock import (
    AlternatingSampler,
    ConfigError,
    EnvCallError,
    GpuSampler,
    ParallelSampler,
    Sampler,
    SamplerState,
    SamplerStateError,
    SerialSampler,
    TrajInfo,
)
from penstock.envs import BatchedCartPole, CountingEnv, EnvContext, Purpose

from ..support import Diary
from .started import started

both = pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
with_central = pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler, GpuSampler, AlternatingSampler])


class Unreadable:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return eval, ("1/0",)


class Point:
    """A class of the user's script, which workers cannot import."""

    def __init__(self, x: int) -> None:
        self.x, self.double = x, lambda: 2 * x


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Levelled(CountingEnv):
    def __init__(self, context: EnvContext, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.context, self.level = context, 0

    def add(self, n: int, factor: int = 1) -> tuple[int, int]:
        self.level += n * factor
        return self.context.env_rank, self.level

    def fail_on(self, env_rank: int) -> None:
        if self.context.env_rank == env_rank:
            raise ArithmeticError("not here")

    def unpicklable(self) -> Any:
        return (i for i in range(3))

    def point(self) -> Any:
        return Point(self.context.env_rank)

    def unreadable(self) -> Any:
        return Unreadable()

    def unspeakable(self) -> None:
        raise Unspeakable

    def named(self, name: str) -> str:
        return name

    def big(self) -> bytes:
        return bytes(300_000)


def wrapped(context: EnvContext) -> gym.Env[Any, Any]:
    return TimeLimit(Levelled(context), 50)


def begin(cls: type[Sampler], **kwargs: Any) -> Any:
    sizes: dict[str, Any] = {"batch_T": 6, "batch_B": 5, "n_workers": 2, "eval_n_envs": 3, "eval_max_steps": 60}
    return started(wrapped, cls=cls, **sizes, **kwargs)


@with_central
@pytest.mark.parametrize("traj_info_cls", [TrajInfo, Diary])
def test_methods_and_attributes_are_reached_through_wrappers_in_order(cls: type[Sampler], traj_info_cls: Any) -> None:
    with begin(cls, traj_info_cls=traj_info_cls) as sampler:
        for itr in range(2):
            samples, infos = sampler.obtain_samples(itr)
            assert len(infos) == samples.env.done.sum()
            assert sampler.call("add", 2, factor=itr) == [(b, 2 * itr) for b in range(5)]
            assert len(sampler.evaluate_agent(itr)) == 3 * 4
        assert sampler.call("add", 1, evaluation=True) == [(b, 1) for b in range(3)]
        sampler.set_attr("level", 7)
        assert sampler.get_attr("level") == [7] * 5
        sampler.set_attr("level", [10, 11, 12, 13, 14])
        assert sampler.get_attr("level") == [10, 11, 12, 13, 14]
        assert sampler.get_attr("level", evaluation=True) == [1] * 3
        sampler.set_attr("length", 2)
        samples, _ = sampler.obtain_samples(9)
        assert samples.env.done.sum() >= 2 * 5, "episodes have become short"
        assert sampler.call("big") == [bytes(300_000)] * 5


def test_a_result_may_be_of_a_class_of_the_script(start_method: str) -> None:
    with begin(ParallelSampler, start_method=start_method) as sampler:
        found = sampler.call("point")
        assert [type(point) for point in found] == [Point] * 5
        assert [(point.x, point.double()) for point in found] == [(b, 2 * b) for b in range(5)]
        sampler.set_attr("level", found)
        assert [point.x for point in sampler.get_attr("level")] == list(range(5))


@both
def test_an_exception_names_its_environment_and_harms_nobody(cls: type[Sampler]) -> None:
    refused: list[tuple[type[Exception], tuple[Any, ...], str]] = [
        (EnvCallError, ("fail_on", 3), "call 'fail_on' on env_rank 3 raised ArithmeticError: not here"),
        (EnvCallError, ("unpicklable",), r"^the result of .* on env_rank 0, a generator, cannot be pickled: Ty"),
        (EnvCallError, ("unreadable",), r"^the result of call .* on env_rank 0, a Unr.*, cannot be unpickled: Z"),
        (EnvCallError, ("unspeakable",), r"on env_rank 0 raised .*Unspeakable: .its message could not be formatted"),
        (ConfigError, (3,), "call needs the name of a method or an attribute, got 3"),
        (ConfigError, ("add", (i for i in range(3))), "arguments for 'add' cannot be pickled"),
    ]
    with begin(cls) as sampler:
        for error, arguments, message in refused:
            with pytest.raises(error, match=message) as caught:
                sampler.call(*arguments)
            if arguments[0] == "fail_on":
                assert isinstance(caught.value.__cause__, ArithmeticError)
                line = rf'File "{__file__}", line \d+, in fail_on\n    raise ArithmeticError\("not here"\)\n'
                assert re.search(line, str(caught.value.__cause__.__cause__))
        with pytest.raises(EnvCallError, match="get_attr 'nothing' on env_rank 0 raised AttributeError"):
            sampler.get_attr("nothing")
        with pytest.raises(ConfigError, match=r"set_attr\('level'\) got 2 values for 5 environments"):
            sampler.set_attr("level", [1, 2])
        assert sampler.call("named", name="x") == ["x"] * 5, "an argument may be called name"
        assert sampler.call("add", 1) == [(b, 1) for b in range(5)]
        sampler.obtain_samples(0)


@both
def test_a_new_attribute_is_created_with_a_warning(cls: type[Sampler]) -> None:
    with begin(cls) as sampler:
        with pytest.warns(RuntimeWarning, match=r"created the attribute 'lenght': 5 of 5 .*; did you mean 'length'\?$"):
            sampler.set_attr("lenght", 2)
        sampler.set_attr("lenght", 3)  # now it is there
        assert sampler.get_attr("lenght") == [3] * 5
        assert sampler.get_attr("length") == [5] * 5


def test_calls_change_flattened_wrappers_and_put_another_environment_in_its_place() -> None:
    def env_fn() -> Any:
        return TimeLimit(OrderEnforcing(CountingEnv(length=1000)), 50)

    with started(env_fn, batch_T=6, batch_B=1) as sampler:
        sampler.obtain_samples(0)
        assert sampler.get_attr("_elapsed_steps") == [6]
        sampler.set_attr("_elapsed_steps", 48)
        assert sampler.obtain_samples(1)[0].env.truncated.nonzero().tolist() == [[1, 0]]
        other = CountingEnv(length=2)
        other.reset()
        sampler.set_attr("env", [other])
        assert sampler.obtain_samples(2)[0].env.terminated[:, 0].tolist() == [False, True] * 3


def test_calls_have_their_time() -> None:
    with pytest.raises(SamplerStateError, match="initialize"):
        SerialSampler(CountingEnv, batch_T=1, batch_B=1).get_attr("level")
    with begin(SerialSampler) as sampler:
        sampler.start_samples(0)
        for call in (partial(sampler.get_attr, "level"), partial(sampler.set_attr, "level", 3)):
            with pytest.raises(SamplerStateError, match=r"[gs]et_attr was called out of order: .* wait_samples"):
                call()


@both
def test_a_factory_that_asks_for_it_is_told_where_and_for_what(cls: type[Sampler]) -> None:
    with begin(cls, rank=1, world_size=2) as sampler:
        contexts = sampler.get_attr("context")
        evals = sampler.get_attr("context", evaluation=True)
    assert [context.env_rank for context in contexts] == [5, 6, 7, 8, 9]
    assert [context.env_rank for context in evals] == [3, 4, 5]
    assert {context.purpose for context in contexts} == {Purpose.TRAIN}
    assert {context.purpose for context in evals} == {Purpose.EVAL}
    assert [context.worker_rank for context in contexts] == ([0, 0, 0, 1, 1] if cls is ParallelSampler else [0] * 5)
    assert len({context.seed for context in (*contexts, *evals)}) == 8


def test_the_example_environment_is_told_that_it_is_one() -> None:
    told = []

    def env_fn(context: EnvContext) -> Any:
        told.append((context.purpose, context.worker_rank, os.getpid()))
        return CountingEnv()

    with started(env_fn, cls=ParallelSampler):
        assert told == [(None, -1, os.getpid())]


class LevelledBatch(BatchedCartPole):
    level = 0

    def add(self, n: int, factor: int = 1) -> tuple[int, int]:
        self.level += n * factor
        return self.num_envs, self.level

    def fail_on(self, num_envs: int) -> None:
        if self.num_envs == num_envs:
            raise ArithmeticError("not here")


@pytest.mark.parametrize(
    ("cls", "sizes", "evals"), [(SerialSampler, [5], [3]), (partial(ParallelSampler, n_workers=2), [3, 2], [2, 1])]
)
def test_calls_reach_the_batched_environment_of_each_worker(cls: Any, sizes: list[int], evals: list[int]) -> None:
    with started(LevelledBatch, cls=cls, batch_B=5, batched=True, eval_n_envs=3) as sampler:
        for evaluation, own in ((False, sizes), (True, evals)):
            assert sampler.get_attr("num_envs", evaluation=evaluation) == own
            assert sampler.call("add", 2, factor=3, evaluation=evaluation) == [(n, 6) for n in own]
            levels = list(range(10, 10 + len(own)))
            sampler.set_attr("level", levels, evaluation=evaluation)
            assert sampler.get_attr("level", evaluation=evaluation) == levels
            sampler.set_attr("level", 4, evaluation=evaluation)
            assert sampler.call("add", 1, evaluation=evaluation) == [(n, 5) for n in own]
            with pytest.raises(ConfigError, match=rf"got 9 values for {len(own)} environments"):
                sampler.set_attr("level", [0] * 9, evaluation=evaluation)
        with pytest.warns(RuntimeWarning, match=f"has created the attribute 'lewel': {len(sizes)} of .*'level'"):
            sampler.set_attr("lewel", 1)
        with pytest.raises(EnvCallError, match=f"on env_rank {0 if len(sizes) == 1 else 3} raised ArithmeticError"):
            sampler.call("fail_on", sizes[-1])
        batch, _ = sampler.obtain_samples(0)
        assert batch.env.valid.all()


# ---- what arrives here and cannot be unpickled --------------------------


class NeedsTwo(Exception):
    """Its pickle calls it with one argument."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one)


class KeepsErrors(TrajInfo):
    def terminate(self, final_observation: Any) -> None:
        self.Error = NeedsTwo(1, 2)


@pytest.mark.slow
def test_an_attribute_that_cannot_be_unpickled_is_named_in_that_batch_and_no_other() -> None:
    with started(CountingEnv, cls=ParallelSampler, batch_T=12, traj_info_cls=KeepsErrors) as sampler:
        says = r"attribute 'Error' of a KeepsErrors of env_rank 0, .* cannot be unpickled .*TypeError"
        for itr in range(3):
            with pytest.raises(ConfigError, match=says) as caught:
                sampler.obtain_samples(itr)
            assert isinstance(caught.value.__cause__, TypeError)
            assert sampler.state is SamplerState.READY
            assert sampler.samples_np.env.valid.all()
            assert sampler.get_attr("length") == [5] * 2, "nothing of the batch is left in the pipes"
        assert sampler.stats().workers[0].batches == 3


class AtHome:
    """Can be unpickled in one process alone."""

    def __reduce__(self) -> Any:
        return eval, (f"1 // (__import__('os').getpid() == {os.getpid()})",)


def test_a_result_that_cannot_be_unpickled_here_harms_nobody() -> None:
    class Homely(CountingEnv):
        def answer(self) -> Any:
            return AtHome()

    says = "call .answer. on env_rank 0 returned a result .* cannot be unpickled .* ZeroDiv"
    with started(Homely, cls=ParallelSampler) as sampler:
        for _ in range(2):
            with pytest.raises(EnvCallError, match=says):
                sampler.call("answer")
            assert sampler.get_attr("length") == [5] * 2
        sampler.obtain_samples(0)
