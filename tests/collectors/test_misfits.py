"""Data that nearly fits: numbers that float32 cannot hold, structures with too much in them, nothing at all."""

import warnings
from typing import Any

import numpy as np
import pytest

from penstock import ParallelSampler, RandomAgent, Sampler, SerialSampler, WorkerError
from tests.collectors.test_checks import check_named, make, nested, observation, replacing, reward

both = pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
KEYS = r"observation of env_rank 3 must have the entries \['goal', 'grid'\], got "
HOLD = r"must have values that float32 can hold, got 1e\+300"

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "too large": (observation(np.array([1.0, 1e300])), f"observation of env_rank 3 {HOLD}"),
    "too large in a list": (observation([1.0, 1e300]), f"observation of env_rank 3 {HOLD}"),
    "too large at an end": (
        {**observation(np.array([1.0, 1e300])), "short": True},
        f"the final observation of env_rank 3 {HOLD}",
    ),
    "too large in a nested leaf": (
        {"spoil": replacing(0, {"grid": np.array([1.0, 1e300]), "goal": (3, np.zeros(1))}), "nested": True},
        rf"observation\['grid'\] of env_rank 3 {HOLD}",
    ),
    "reward too large": (
        reward(1e300),
        r"the reward of env_rank 3 must be a number that float32 can hold, got 1e\+300",
    ),
    "None": (observation(None), r"observation of env_rank 3 must have shape \(2,\), got None"),
    "dict": (observation({"a": 1.0, "b": 2.0}), r"observation of env_rank 3 must have shape \(2,\), got a dict"),
    "a key too many": (nested(extra=1), KEYS + r"\['grid', 'goal', 'extra'\]"),
    "no dict": ({"spoil": replacing(0, np.zeros(2)), "nested": True}, KEYS + "a ndarray"),
    "a tuple too long": (
        {"spoil": replacing(0, {"grid": np.zeros(2), "goal": (1, np.zeros(1), 2)}), "nested": True},
        r"observation\['goal'\] of env_rank 3 must have the entries \[0, 1\], got a tuple of 3",
    ),
    "a tuple too short": (
        {"spoil": replacing(0, {"grid": np.zeros(2), "goal": (1,)}), "nested": True},
        r"observation\['goal'\] of env_rank 3 must have the entries \[0, 1\], got a tuple of 1",
    ),
}


@both
@pytest.mark.parametrize("name", BAD)
def test_what_nearly_fits_is_named_in_its_batch(cls: type[Sampler], name: str) -> None:
    wrong, message = BAD[name]
    right = {key: value for key, value in wrong.items() if not key.startswith("spoil")}
    with make(cls, [right] * 3 + [wrong]) as sampler:
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
        with pytest.raises(WorkerError) as error:
            sampler.obtain_samples(1)
    check_named(error, message)


@both
def test_infinity_itself_is_recorded_as_it_is(cls: type[Sampler]) -> None:
    with make(cls, observation(np.array([1.0, -np.inf])), batch_T=4) as sampler:
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
        assert sampler.samples_np.env.observation[3, :, 1].tolist() == [-np.inf] * 4


def test_a_user_who_wants_no_warnings_gets_infinity() -> None:
    with make(SerialSampler, observation(np.array([1.0, 1e300])), batch_T=4) as sampler:
        sampler.initialize(RandomAgent())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sampler.obtain_samples(0)
        assert sampler.samples_np.env.observation[3, :, 1].tolist() == [np.inf] * 4


@both
def test_before_the_first_batch_no_time_step_is_told(cls: type[Sampler]) -> None:
    def fail(result: Any) -> Any:
        raise ArithmeticError("no")

    with (
        make(cls, {"spoil": fail}, max_decorrelation_steps=50) as sampler,
        pytest.raises(WorkerError, match=r"ArithmeticError: no while decorrelating env_rank \d \(start-up\)"),
    ):
        sampler.initialize(RandomAgent())
