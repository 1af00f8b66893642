"""Environments that write their observations in place: the batches of a plain loop that calls `step`, and errors that
name them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from hypothesis import given
from hypothesis import strategies as st

from penstock import RandomAgent, SerialSampler, SpaceError, WorkerError
from penstock.envs import BatchedCartPole, CountingEnv, NestedEnv
from penstock.envs.direct_steps import step_into_of

from ..against_loop import compare
from ..scale import examples, quick_first
from ..support import Diary, collect_with, sampler_of

SIZES: dict[str, Any] = {"batch_T": 12, "batch_B": 4, "n_batches": 3}


class Nested(NestedEnv):
    """A NestedEnv that writes in place."""

    def step_into(self, out: Any, action: Any) -> Any:
        observation, *rest = super().step(action)
        out["position"][...] = observation["position"]
        out["camera"][...] = observation["camera"]
        out["goal"][0][...] = observation["goal"][0]
        out["goal"][1][...] = observation["goal"][1]
        return tuple(rest)


class Walk(gym.Env[Any, Any]):
    """A random walk over the cells of a Discrete space; ends at the first one."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = spaces.Discrete(9, start=3), spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = int(self.np_random.integers(4, 12))
        return self.at, {}

    def step(self, action: Any) -> Any:
        self.at = min(11, self.at + 2 * int(action) - 1)
        return self.at, float(self.at), self.at == 3, False, {}

    def step_into(self, out: Any, action: Any) -> Any:
        out[...], *rest = self.step(action)
        return tuple(rest)


class Without(CountingEnv):
    step_into = None  # type: ignore[assignment]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"sampler": {"check_finite": True, "debug": True}},
    {"sampler": {"record_final_obs": False}},
    {"traj_info_cls": Diary},
    {"wait_reset": True, "sampler": {"debug": True}},
]


@pytest.mark.parametrize("env_fn", [CountingEnv, partial(CountingEnv, truncate=True), Nested, Walk])
@pytest.mark.parametrize("options", quick_first(OPTIONS), ids=str)
def test_batches_are_those_of_a_plain_loop_that_calls_step(env_fn: Any, options: dict[str, Any]) -> None:
    assert step_into_of(env_fn(), 0) is not None
    compare(SerialSampler, env_fn, RandomAgent, **SIZES, **options)


@examples(15, 30)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    classes=st.lists(st.sampled_from([CountingEnv, Without]), min_size=4, max_size=4),
    batch_T=st.integers(1, 9),
    truncate=st.booleans(),
    wait_reset=st.booleans(),
)
def test_some_environments_may_write_in_place(
    lengths: list[int], classes: list[Any], batch_T: int, truncate: bool, wait_reset: bool
) -> None:
    env_fns = [partial(cls, length, truncate) for cls, length in zip(classes, lengths, strict=False)]
    sizes = {"batch_T": batch_T, "batch_B": len(lengths), "n_batches": 3}
    compare(SerialSampler, env_fns, RandomAgent, wait_reset=wait_reset, **sizes)


def test_what_is_written_in_place_has_the_dtype_that_is_recorded() -> None:
    options = {"observation_dtype": np.float32, "env_info": {"count": 0}}
    for batch, _ in collect_with(SerialSampler, Nested, bootstrap_value=False, **options):
        position, goes_on = batch.env.observation.position, ~batch.env.done[:-1]
        assert position.dtype == np.float32
        assert goes_on.any()
        np.testing.assert_array_equal(position[1:][goes_on], batch.agent.action.move[:-1][goes_on])


# ---- batched environments ----------------------------------------------------------------------


@pytest.mark.parametrize("options", quick_first(OPTIONS[:3]), ids=str)
def test_batched_environments_write_whole_rows(options: dict[str, Any]) -> None:
    env_fn = partial(BatchedCartPole, max_episode_steps=9)
    assert step_into_of(env_fn(num_envs=1), 0) is not None
    compare(SerialSampler, env_fn, RandomAgent, batched=True, **SIZES, **options)


# ---- which method is called --------------------------------------------------------------------


class NewStep(CountingEnv):
    def step(self, action: Any) -> Any:
        return super().step(action)


class NewBoth(NewStep):
    def step_into(self, out: Any, action: Any) -> Any:
        return super().step_into(out, action)


class Mixin:
    def step_into(self, out: Any, action: Any) -> Any:
        return 0


class Mixed(Mixin, NewStep):
    pass


@pytest.mark.parametrize(
    ("make", "is_used"),
    [
        (CountingEnv, True),
        (NewStep, False),
        (NewBoth, True),
        (type("Inheriting", (NewBoth,), {}), True),
        (Without, False),
        (Mixed, True),
        (partial(gym.make, "CartPole-v1"), False),
        (lambda: TimeLimit(CountingEnv(), 3), False),
    ],
)
def test_step_into_is_used_unless_step_is_newer(make: Callable[[], Any], is_used: bool) -> None:
    assert (step_into_of(make(), 0) is not None) == is_used


def test_a_step_that_is_set_on_the_environment_is_used() -> None:
    env = CountingEnv()
    env.step = lambda action: None  # type: ignore[method-assign, assignment, return-value]
    assert step_into_of(env, 0) is None


# ---- errors ------------------------------------------------------------------------------------


class Wrong(CountingEnv):
    """Its 8th move writes or returns something wrong."""

    def __init__(self, returned: Any = "as it should", written: Any = None) -> None:
        super().__init__(length=20)
        self.returned, self.written = returned, written

    def step_into(self, out: Any, action: Any) -> Any:
        result = super().step_into(out, action)
        if self.count == 8 and self.written is not None:
            out[...] = self.written
        return self.returned if self.count == 8 and self.returned != "as it should" else result


FOUR = r"env.step_into of env_rank 2 must return four values .*: got "


@pytest.mark.parametrize(
    ("wrong", "message", "cause", "checks"),
    [
        ({"written": np.zeros(3)}, "could not broadcast", ValueError, {}),
        ({"written": np.nan}, "observation of env_rank 2 must be finite", SpaceError, {"check_finite": True}),
        ({"written": -5}, "observation of env_rank 2 must be in Box", SpaceError, {"debug": True}),
        ({"returned": (0, 1.0, False, False, {})}, FOUR + "5 values", SpaceError, {}),
        ({"returned": None}, FOUR + "None", SpaceError, {}),
        ({"returned": (1.0, "no", False, {})}, "terminated of env_rank 2 must be True or False", SpaceError, {}),
        ({"returned": (1.0, False, False, 3)}, "info .* of env_rank 2 .*must be a dict", SpaceError, {}),
        ({"returned": ("much", False, False, {})}, "reward of env_rank 2 must be a single number", SpaceError, {}),
        ({"returned": (None, True, False, {})}, "reward of env_rank 2 must be a single number", SpaceError, {}),
    ],
)
def test_an_error_names_the_environment(wrong: Any, message: str, cause: type[Exception], checks: Any) -> None:
    with sampler_of(
        SerialSampler, [partial(Wrong, **(wrong if b == 2 else {})) for b in range(4)], **checks
    ) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        with pytest.raises(WorkerError, match=message) as caught:
            sampler.obtain_samples(0)
    assert "env_rank 2" in str(caught.value)
    assert isinstance(caught.value.__cause__, cause)


def test_a_step_into_that_is_no_method_is_refused() -> None:
    env_fn = type("Wrong", (CountingEnv,), {"step_into": 3})
    with pytest.raises(WorkerError, match="step_into of env_rank 0 must be a method, got 3"):
        collect_with(SerialSampler, env_fn)
