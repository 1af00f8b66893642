"""What is unusual but right is recorded, and what an environment raises itself passes, whatever is checked."""

import types
from collections import OrderedDict
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from penstock import ParallelSampler, RandomAgent, Sampler, SerialSampler, WorkerError
from penstock.envs import CountingEnv

from ..scale import quick_first

NAN, INF = float("nan"), float("inf")
ALL_OPTIONS = {"check_finite": True, "debug": True}


class Info(OrderedDict[str, Any]):
    pass


def unusual(place: int, change: Callable[[Any], Any]) -> type[CountingEnv]:
    class Unusual(CountingEnv):
        def step(self, action: Any) -> Any:
            result: list[Any] = list(super().step(action))
            result[place] = change(result[place])
            return tuple(result)

    return Unusual


@pytest.mark.parametrize("options", quick_first([{}, ALL_OPTIONS]), ids=["plain", "all options"])
@pytest.mark.parametrize(
    ("place", "change"),
    [
        (0, lambda observation: observation.astype(np.float16)),
        (1, int),
        (1, bool),
        (1, np.float32),
        (1, np.float64),
        (1, np.array),
        (1, Fraction),
        (1, lambda reward: 10**25 if reward == 2 else reward),
        (2, np.bool_),
        (2, int),
        (2, lambda terminated: np.array([terminated])),
        (3, np.bool_),
        (3, np.array),
        (4, Info),
        (4, types.MappingProxyType),
    ],
)
def test_unusual_data_that_is_right_passes(place: int, change: Callable[[Any], Any], options: dict[str, Any]) -> None:
    compare_with_plain(SerialSampler, place, change, options)


def compare_with_plain(cls: type[Sampler], place: int, change: Callable[[Any], Any], options: dict[str, Any]) -> None:
    size = {"batch_T": 12, "batch_B": 2, "max_decorrelation_steps": 10, "eval_n_envs": 1, "eval_max_steps": 12}
    with cls(unusual(place, change), **size, **options) as sampler, SerialSampler(CountingEnv, **size) as plain:
        for each in (sampler, plain):
            each.initialize(RandomAgent(), seed=0)
        got, infos = sampler.obtain_samples(0)
        wanted, _ = plain.obtain_samples(0)
        for field in ("observation", "terminated", "truncated", "done", "final_obs"):
            assert (got.env[field] == wanted.env[field]).all()
        expected = [[float(change(float(r))) for r in row] if place == 1 else row for row in wanted.env.reward.tolist()]
        np.testing.assert_array_equal(got.env.reward, np.array(expected, np.float32))
        assert len(infos) >= 4
        assert [info.Length for info in sampler.evaluate_agent(0)] == [5, 5]


def test_unusual_data_passes_in_processes_too() -> None:
    compare_with_plain(ParallelSampler, 2, np.bool_, ALL_OPTIONS)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nan_and_inf_are_recorded_as_they_are_unless_told_otherwise(dtype: Any) -> None:
    class Endless(CountingEnv):
        def step(self, action: Any) -> Any:
            _, _, *rest = super().step(action)
            return np.array([NAN, -INF], dtype), NAN, *rest

    with SerialSampler(Endless, batch_T=3, batch_B=2, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent())
        samples, _ = sampler.obtain_samples(0)
    assert samples.env.reward.isnan().all()
    assert samples.env.observation[1:, :, 0].isnan().all()
    assert (samples.env.observation[1:, :, 1] == -INF).all()


class Unpacking(CountingEnv):
    def step(self, action: Any) -> Any:
        first, second = super().step(action)  # type: ignore[misc]
        return first, second


def test_exceptions_of_the_environment_itself_pass_unchanged() -> None:
    with SerialSampler(Unpacking, batch_T=2, batch_B=1, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent())
        with pytest.raises(WorkerError, match=r"raised ValueError while .*: too many values to unpack") as error:
            sampler.obtain_samples(0)
    assert type(error.value.__cause__) is ValueError
